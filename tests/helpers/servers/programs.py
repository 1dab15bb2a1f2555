"""Small agent programs for tests, quick to start: `from programs import program`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

__all__ = ["program"]

_HEAD = """
import http.client, json, os, signal, subprocess, sys, time
from urllib.parse import urlsplit

task = json.loads(sys.stdin.readline())
url = urlsplit(os.environ["OPENAI_BASE_URL"])
messages = []

def say(text, **fields):
    '''The agent's reply in words, or the code of the error.'''
    messages.append({"role": "user", "content": text})
    door = http.client.HTTPConnection(url.hostname, url.port)
    body, kind = json.dumps({"messages": messages, **fields}), {"Content-Type": "application/json"}
    door.request("POST", url.path + "/chat/completions", body, kind)
    data = json.loads(door.getresponse().read())
    door.close()
    if "error" in data:
        return data["error"]["code"]
    messages.append(data["choices"][0]["message"])
    return messages[-1]["content"]

def end(code=0, **verdict):
    print(json.dumps(verdict), flush=True)
    os._exit(code)

"""


def program(folder: Path, body: str) -> list[str]:
    """The command of a program in Python's standard library that does `body`.

    It has `task`, `say(text)` for one request and its reply, and `end(code, reward=..., success=...)`.
    """
    path = folder / "agent_program.py"
    path.write_text(_HEAD + textwrap.dedent(body), encoding="utf-8")
    return [sys.executable, "-S", "-E", str(path)]
