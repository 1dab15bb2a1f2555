"""The pictures of a run's page show the page as it is today."""

from __future__ import annotations

import json

from scripts import report_pictures


def test_pictures_are_of_the_page_as_it_is() -> None:
    taken = json.loads(report_pictures.DIGEST.read_text(encoding="utf-8"))
    assert taken["page"] == report_pictures.digest_of_page(), (
        "the page has changed since: `make demo SEED=0`, then `python -m scripts.report_pictures runs/latest`"
    )
