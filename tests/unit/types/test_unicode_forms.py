"""One word in two Unicode forms is one word, and takes no time with the square of its marks."""

from __future__ import annotations

import time

from stateset_agents.types.comparison import composed, nfc


def test_texts_anywhere_in_a_value_are_composed() -> None:
    assert composed({"Zu\u0308rich": ["e\u0301", ("e\u0301",), {"e\u0301"}, 3]}) == {
        "Z\u00fcrich": ["\u00e9", ("\u00e9",), {"\u00e9"}, 3]
    }


def test_a_flood_of_marks_is_left_alone_and_hides_nothing() -> None:
    flood = "a" + "\u0301\u0323" * 20_000
    start = time.process_time()
    assert nfc(f"{flood} Zu\u0308rich") == f"{flood} Z\u00fcrich"
    assert time.process_time() - start < 0.5
