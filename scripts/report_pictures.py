"""The pictures of a run's page in the README and the docs, taken of `make demo SEED=0` in Chromium.

    make demo SEED=0
    python -m scripts.report_pictures runs/latest     # writes docs/images/*.png and their digest

The digest is of the files that draw the page: tests/unit/repository/test_report_pictures.py fails when they
have changed since the pictures were taken.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
DIGEST = IMAGES / "report-pictures.json"
PAGE = ROOT / "stateset_agents" / "reporting"
WIDTH, HEIGHT = 1280, 800  # pixels of the window
GROUP = "#conversations?stage=train&step-from={step}&step-to={step}"
LONGEST = 620
"""Pixels of a picture's height at most: a row of a table more or less says nothing new."""


def digest_of_page() -> str:
    """SHA-256 of every file that draws a run's page."""
    files = [
        PAGE / "report.py",
        *sorted((PAGE / "assets" / "page").rglob("*.*")),
        PAGE / "assets/charts.yaml",
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(PAGE)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def best_step(run: Path) -> int:
    """The step whose groups differ most within themselves: its partings say most."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/group_std" in line or "reward/std" in line]
    name = "reward/group_std" if "reward/group_std" in steps[0] else "reward/std"
    return int(max(steps, key=lambda line: line[name])["step"])


async def picture(tab: Any, selector: str, name: str) -> None:
    """Write an element of the page as a picture."""
    script = f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect();"
    x, y, width, height = await tab.run(
        f"{script} return [box.x + scrollX, box.y + scrollY, box.width, box.height]; }})()"
    )
    clip = {"x": x, "y": y, "width": width, "height": min(height, LONGEST), "scale": 1}
    shot = await tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    (IMAGES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


async def take(run: Path) -> None:
    """Open the run's page, and write each picture."""
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    from chromium import chromium

    report = (run / "report.html").resolve().as_uri()
    async with chromium() as browser, browser.tab() as tab:
        await tab.look(WIDTH, HEIGHT)
        await tab.open(report)
        await tab.until("!!document.querySelector('.units li')")
        (IMAGES / "demo-report.png").write_bytes(await tab.screenshot())
        await picture(tab, "#timeline", "report-timeline")
        await tab.open("about:blank")
        await tab.open(report + GROUP.format(step=best_step(run)))
        await tab.until("!!document.querySelector('.members-table tbody tr .part-link')")
        await picture(tab, ".members-table", "parting")
        await tab.press("t", "t")
        await tab.until("document.querySelectorAll('.members .t').length > 0")
        await tab.run("document.querySelector('[name=colour][value=advantage]').click()")
        await tab.run("document.querySelector('.members').scrollIntoView()")
        (IMAGES / "report-tokens.png").write_bytes(await tab.screenshot())
    DIGEST.write_text(json.dumps({"page": digest_of_page()}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder of `make demo SEED=0`")
    asyncio.run(take(parser.parse_args().run))


if __name__ == "__main__":
    main()
