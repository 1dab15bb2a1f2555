"""A chat template with the arguments and the day that it is rendered with, as one text for any renderer.

    {#- stateset_agents: {"date": "2026-11-28", "arguments": {"enable_thinking": false}} #}
    {%- macro strftime_now(format) -%}{{- {'%d %b %Y': '28 Nov 2026'}[format] -}}{%- endmacro %}
    {%- set enable_thinking = enable_thinking | default(False) %}
    {#- stateset_agents: the template #}
    {{- bos_token }} ...

`rendering.py` renders this text, and `write_template` puts it beside weights: so plain transformers, other
servers and this library prompt a model with the tokens that it was trained on. Arguments that a caller of
`apply_chat_template` gives win over those that are pinned.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import ConfigurationError

_FIRST, _LAST = "{#- stateset_agents: ", "{#- stateset_agents: the template #}\n"
_CLOCK = re.compile(r"\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(['\"])([^\\]*?)\1\s*\)")
_ANY_CLOCK = re.compile(r"\bstrftime_now\b(?!\s+is\s+(?:not\s+)?defined\b)")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedTemplate:
    """A template's own text, and what stands before it."""

    text: str
    """Jinja, without what is pinned."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by name."""
    date: datetime.date | None = None
    """On which its clock stands still, at midnight; None where it has none, or where that goes on."""

    @classmethod
    def read(cls, text: str) -> PinnedTemplate:
        """What `written` wrote; any other text has nothing pinned."""
        head, found, own = text.partition(_LAST)
        if not found or not head.startswith(_FIRST):
            return cls(text=text)
        pinned = json.loads(head.removeprefix(_FIRST).split(" #}\n")[0])
        date = pinned["date"]
        return cls(
            text=own,
            arguments=pinned["arguments"],
            date=None if date is None else datetime.date.fromisoformat(date),
        )

    @property
    def tells_date(self) -> bool:
        """Has the template a clock? Raises ConfigurationError for one that cannot be stopped."""
        if _ANY_CLOCK.search(_CLOCK.sub("", _COMMENT.sub("", self.text))):
            raise ConfigurationError(
                "the chat template computes the format of its date, or names strftime_now without a call: "
                "give one that has it as text, such as "
                "strftime_now('%Y-%m-%d'), or AgentConfig(chat_template=\"plain\")"
            )
        return _CLOCK.search(self.text) is not None

    def written(self) -> str:
        """One text for any renderer; the template's own where nothing is pinned.

        Lines end in the line end that jinja's `trim_blocks` drops, so what follows begins as it would alone.
        """
        if not self.arguments and self.date is None:
            return self.text
        date = None if self.date is None else self.date.isoformat()
        pinned = json.dumps({"date": date, "arguments": self.arguments}).replace("#", "\\u0023")
        lines = [f"{_FIRST}{pinned} #}}\n"]
        if self.date is not None:
            days = {call[2]: self.date.strftime(call[2]) for call in _CLOCK.finditer(self.text)}
            lines.append(
                f"{{%- macro strftime_now(format) -%}}{{{{- {days!r}[format] -}}}}{{%- endmacro %}}\n"
            )
        lines += [
            f"{{%- set {name} = {name} | default({value!r}) %}}\n" for name, value in self.arguments.items()
        ]
        return "".join([*lines, _LAST, self.text])


def write_template(folder: Path, text: str, stop_ids: Sequence[int]) -> None:
    """Let the model in `folder` be prompted by this template alone, and end its turns by these tokens, in
    plain transformers and in other servers. Raises OSError where the disk cannot take it."""
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)  # an older processor's
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)  # transformers prefers them
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    ends = settings.get("eos_token_id")
    if {*stop_ids} != {*(ends if isinstance(ends, list) else [ends])}:
        settings["eos_token_id"] = list(stop_ids)
        file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
