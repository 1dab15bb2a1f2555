"""Every shape of row that people publish, at every door: what it asks is asked, what it shows is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_rows import PUBLISHED, Published, row_of, scripted, vision_agent
from repository_paths import ROOT

PAGE = (ROOT / "docs" / "evidence" / "published-rows.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.name)
async def test_a_row_is_read_as_it_says_or_refused_in_a_line(published: Published, tmp_path: Path) -> None:
    agent = await (vision_agent(tmp_path) if published.is_picture else scripted("It is in Lyon."))
    async with agent:
        assert await row_of(published, agent) in PAGE, "write the table anew: see published_rows.py"


def test_the_page_has_these_rows_and_no_others() -> None:
    table = PAGE.partition("<!-- rows -->")[2].partition("<!-- /rows -->")[0]
    assert table.count("\n| ") == len(PUBLISHED) + 1
