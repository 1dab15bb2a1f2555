"""An MCP server for tests: a basket in its memory. `python mcp_shop.py` speaks stdio, with a port HTTP."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

from pydantic import Field

try:
    from mcp.server.fastmcp import FastMCP, Image
except ImportError:  # mcp 2
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as FastMCP

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
server = FastMCP("shop", log_level="ERROR")
basket: list[str] = []


@server.tool()
def put(item: str, times: Annotated[int, Field(description="How many.", ge=1)] = 1) -> str:
    """Put something into the basket."""
    basket.extend([item] * times)
    return f"in the basket: {', '.join(basket)}"


@server.tool()
def price(item: str) -> dict[str, float]:
    """What something costs."""
    if item != "tea":
        raise ValueError(f"there is no {item}")
    return {"price": 2.5}


@server.tool()
def get_order(order_id: str) -> dict[str, str]:
    """An order."""
    return {"order_id": order_id, "status": "shipped"}


@server.tool()
def photo() -> Image:
    """What the shop looks like."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def nap(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "rested"


@server.tool()
def whoami() -> str:
    """The process, and who was named by its environment."""
    return f"{os.getpid()} {os.environ.get('SHOPKEEPER', 'nobody')}"


@server.tool()
def burn() -> str:
    """End the process."""
    print("the shop is on fire", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    elif hasattr(server.settings, "port"):
        server.settings.port = port
        server.run("streamable-http")
    else:  # mcp 2
        server.run("streamable-http", port=port)
