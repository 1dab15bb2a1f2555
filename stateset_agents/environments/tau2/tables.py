"""Tables whose rows are copied when they are first touched: a fresh database for the price of a few rows."""

from __future__ import annotations

import copy
import json
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any


def row_text(row: Any) -> str:
    """A row as tau2 hashes it (`tau2.utils.utils.get_dict_hash`): 1 and 1.0 are not alike."""
    return json.dumps(row.model_dump(warnings=False), sort_keys=True, default=str)


class CopiedRows(MutableMapping[str, Any]):
    """One table of a conversation, over the table that all conversations share.

    `table[key]` is the conversation's own row, copied at the first touch. `items()` and `values()` give
    shared rows where none is touched: tau2's tools only read those.
    """

    __slots__ = ("_own", "_shared")

    def __init__(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        self._shared = shared
        self._own = dict(own or {})

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            self._own[key] = copy.deepcopy(self._shared[key])
        return self._own[key]

    def __setitem__(self, key: str, row: Any) -> None:
        self._own[key] = row

    def __delitem__(self, key: str) -> None:
        raise TypeError("rows of a tau2 table are never deleted")

    def __contains__(self, key: object) -> bool:
        return key in self._own or key in self._shared

    def __iter__(self) -> Iterator[str]:
        yield from self._shared
        yield from (key for key in self._own if key not in self._shared)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def items(self) -> ItemsView[str, Any]:
        """Untouched rows are the shared ones: read them, and no more."""
        return {key: self._seen(key) for key in self}.items()

    def values(self) -> ValuesView[Any]:
        """As `items`."""
        return {key: self._seen(key) for key in self}.values()

    def _seen(self, key: str) -> Any:
        return self._own[key] if key in self._own else self._shared[key]

    def fork(self) -> CopiedRows:
        """A copy that goes on from the same rows."""
        return CopiedRows(self._shared, copy.deepcopy(self._own))

    def changes(self) -> dict[str, str]:
        """Key -> text of each row that is new, or not as it was."""
        texts = {key: row_text(row) for key, row in self._own.items()}
        return {
            key: text
            for key, text in texts.items()
            if key not in self._shared or text != row_text(self._shared[key])
        }
