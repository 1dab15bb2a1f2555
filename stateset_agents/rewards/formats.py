"""Rewards that check the last reply's form and likeness: a pattern, a JSON schema, a reference text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.claims.text_checks import words
from stateset_agents.core.scoring.base import RewardResult
from stateset_agents.rewards.verifiable import CheckedReward
from stateset_agents.runtime.named_code import library
from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory

_MOST_CHARACTERS = 20_000
"""Characters of a reply; a longer one fails every check of form."""
_FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n```\Z", re.DOTALL)


def _last_reply(trajectory: Trajectory) -> str | None:
    """The text of the last reply; None where it is longer than anybody reads, or there is none."""
    if not trajectory.replies or len(trajectory.replies[-1].content) > _MOST_CHARACTERS:
        return None
    return trajectory.replies[-1].content


class PatternReward(CheckedReward):
    """1 where the whole last reply matches a regular expression, else 0.

        create_pattern_reward(r"Ticket [A-Z]\\d{3}\\.")

    The pattern is the argument, or the scenario's `context["pattern"]`. Python's `re` may take very long for
    nested repeats such as `(a+)+`: don't write those.
    """

    name = "pattern"
    needs = 'a pattern, or context["pattern"]'

    def __init__(
        self, pattern: str | None = None, *, anywhere: bool = False, ignore_case: bool = False
    ) -> None:
        """`anywhere`: it may stand anywhere in the reply."""
        self._flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
        self._anywhere = anywhere
        self._pattern = None if pattern is None else self._compiled(pattern)

    def _compiled(self, pattern: object) -> re.Pattern[str]:
        try:
            if isinstance(pattern, str):
                return re.compile(nfc(pattern), self._flags)
            why = "it is no text"
        except re.error as error:
            why = str(error)
        raise ConfigurationError(f"the pattern {pattern!r:.80} is no regular expression: {why}")

    def _checked(self, trajectory: Trajectory) -> RewardResult:
        from_context = trajectory.scenario.context.get("pattern")
        pattern = self._pattern if from_context is None else self._compiled(from_context)
        if pattern is None:
            return RewardResult(score=None)
        text = _last_reply(trajectory)
        match = pattern.search if self._anywhere else pattern.fullmatch
        return RewardResult(score=float(text is not None and match(text.strip()) is not None))


class SchemaReward(CheckedReward):
    """1 where the last reply is JSON that a JSON Schema accepts, else 0.

        create_schema_reward({"type": "object", "required": ["order_id"]})

    The schema is the argument, or the scenario's `context["schema"]`. The reply is JSON and nothing else, or
    one block between ``` fences; `is_json` in the breakdown says whether it was JSON at all. References to
    other documents are not fetched. Needs the jsonschema library.
    """

    name = "schema"
    needs = 'a schema, or context["schema"]'

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        self._validators: dict[str, Any] = {}
        self._schema = schema
        if schema is not None:
            self._validator(schema)

    def _validator(self, schema: object) -> Any:
        if not isinstance(schema, Mapping | bool):
            raise ConfigurationError(f"a JSON schema must be a mapping, got {schema!r:.80}")
        key = json.dumps(schema, sort_keys=True, default=str)
        if key not in self._validators:
            missing = "checking a JSON schema needs the jsonschema library: pip install 'jsonschema>=4.20'"
            jsonschema, referencing = library("jsonschema", missing), library("referencing", missing)
            kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            try:
                kind.check_schema(schema)
            except jsonschema.SchemaError as error:
                raise ConfigurationError(
                    f"the schema is no JSON schema: {error.message}, at {error.json_path}"
                ) from error
            self._validators[key] = kind(composed(schema), registry=referencing.Registry())
        return self._validators[key]

    def _checked(self, trajectory: Trajectory) -> RewardResult:
        schema = trajectory.scenario.context.get("schema", self._schema)
        if schema is None:
            return RewardResult(score=None)
        validator = self._validator(schema)
        text = (_last_reply(trajectory) or "").strip()
        fenced = _FENCED.match(text)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refused)
        except (ValueError, RecursionError):
            return RewardResult(score=0.0, breakdown={"is_json": 0.0})
        try:
            is_valid = validator.is_valid(value)
        except RecursionError:  # of the agent's making: a value nested beyond what can be walked
            is_valid = False
        return RewardResult(score=float(is_valid), breakdown={"is_json": 1.0})


def _refused(constant: str) -> None:
    """NaN and Infinity: Python reads them, JSON does not have them."""
    raise ValueError(f"{constant} is no JSON")


class SimilarityReward(CheckedReward):
    """Scores how like the last reply is to the best of the `context["reference"]` texts, see `likeness`.

    It pays for the reference's words in its order. What else is said costs, and so do words left out; another
    wording of the same thing is not recognised, so give several, or use a judge.
    """

    name = "similarity"
    needs = 'context["reference"], a text or a list of wordings'

    def _checked(self, trajectory: Trajectory) -> RewardResult:
        reference = trajectory.scenario.context.get("reference")
        if reference is None:
            return RewardResult(score=None)
        wordings = [reference] if isinstance(reference, str) else reference
        if (
            not isinstance(wordings, Sequence)
            or not wordings
            or not all(isinstance(wording, str) and words(wording) for wording in wordings)
        ):
            raise ConfigurationError(
                f'context["reference"] must be a text or a list of texts with words, got {reference!r:.60}'
            )
        text = _last_reply(trajectory)
        return RewardResult(score=max(likeness(text or "", wording) for wording in wordings))


def likeness(text: str, reference: str) -> float:
    """Return the F1, from 0 to 1, of the longest common subsequence of words, without case and marks.

    ROUGE-L with equal weights (Lin, https://aclanthology.org/W04-1013, section 3): with m words in common in
    order it is 2 m / (words of both). "your order is late" and "the order is very late" have 3: 6 / 9.
    """
    text_words, reference_words = words(nfc(text)), words(nfc(reference))
    if not text_words or not reference_words:
        return 0.0
    row = [0] * (len(reference_words) + 1)
    for word in text_words:
        before = 0
        for index, other in enumerate(reference_words, start=1):
            here = row[index]
            row[index] = before + 1 if word == other else max(here, row[index - 1])
            before = here
    return 2 * row[-1] / (len(text_words) + len(reference_words))


create_pattern_reward = PatternReward
create_schema_reward = SchemaReward
create_similarity_reward = SimilarityReward
