"""Chat messages, tool calls and completions: the values that travel between agent, user and backend."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import Any, Literal, NamedTuple, get_args

from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.images import IMAGE_MARK, Image, PixelValues
from stateset_agents.types.settings import closest

GREEDY_BELOW = 1e-5
"""Temperatures above 0 and below this are taken as greedy when an agent answers people, as vLLM takes them
(`_SAMPLING_EPS` in vllm/sampling_params.py): logits over them would overflow."""
MAX_NESTING = 64
"""Levels of objects and lists in data from others. A schema of tools has a dozen; hundreds of levels would
exceed Python's recursion limit."""
MAX_VALUES = 20_000
"""Most values of a body, and of all arguments of calls in it: texts, numbers, lists and objects. Checking so
many blocks the event loop for 40 ms."""
_REASONING = ("reasoning", "reasoning_content", "thinking")
"""vLLM's name of a reply's thoughts, the one that it and others had before, and Ollama's and gpt-oss's."""
_ROLES = {"developer": "system", "function": "tool"}
"""Names that OpenAI gave two roles later and before."""
_ARGUMENTS = ("arguments", "parameters", "args")
"""OpenAI's name of a call's arguments, and what models write instead."""
_CALL_KEYS = ("name", "id", "type", "index", "error", "written", "function", *_ARGUMENTS)
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that an agent asked for."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None
    """The reason why the call could not be parsed (broken JSON, for example); the environment shows it to the
    agent."""
    written: str = field(default="", compare=False)
    """The sampled text of a call that could not be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message in OpenAI's chat shape."""

    role: Role
    content: str
    """The words: thoughts and tool calls are not in them. An `IMAGE_MARK` stands where a picture stands."""
    reasoning: str | None = None
    """The agent's thoughts before it spoke, as its template frames thoughts; None where it has no thought.
    Users, tools and judges never get it; clients and programs do, apart from the words."""
    thinks_first: bool = field(default=True, compare=False)
    """True if the thought is one, closed, and before all words; `reasoning` itself no longer tells."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[Image, ...] = ()
    """Pictures in the order of the content's marks."""

    def __post_init__(self) -> None:
        if self.images and self.content.count(IMAGE_MARK) < len(self.images):
            raise ConfigurationError(
                f"a message with {len(self.images)} pictures needs as many IMAGE_MARKs in its content, got "
                f"{self.content!r:.60}"
            )

    @property
    def is_example(self) -> bool:
        """True if this reply may be imitated: not one with a call that cannot be read, or a thought behind
        its first words, which templates write in front."""
        return self.thinks_first and len(self.readable_calls) == len(self.tool_calls)

    @property
    def readable_calls(self) -> list[ToolCall]:
        """The calls of this message that could be parsed."""
        return [call for call in self.tool_calls if call.error is None]

    @property
    def pieces(self) -> list[str]:
        """The texts before, between and behind its pictures; the content alone where it has none."""
        return self.content.split(IMAGE_MARK, len(self.images)) if self.images else [self.content]

    @classmethod
    def from_openai(cls, data: Mapping[str, Any]) -> Message:
        """Read `{"role": ..., "content": ...}`; tool arguments may be a JSON string or an object.

        Content may be text, nothing, or a list of `{"type": "text", "text": ...}` and `{"type": "image_url",
        "image_url": {"url": "data:..."}}` parts; where it is nothing, a `refusal` is what was said.
        `developer` is a newer name of `system`, `function` and `function_call` older ones of `tool` and
        `tool_calls`, `reasoning_content` and `thinking` other ones of `reasoning`. Raises ConfigurationError
        on anything else.
        """
        if not isinstance(data, Mapping):
            raise ConfigurationError(f"a message must be a mapping or a Message, got {_shown(data)}")
        role: Any = data.get("role")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        if role not in get_args(Role):
            raise ConfigurationError(
                f"message role must be one of {', '.join(get_args(Role))}, got {role!r}{_misspelt(data)}"
            )
        for key in ("tool_call_id", "name", "refusal", *_REASONING):
            if not isinstance(data.get(key), str | None):
                raise ConfigurationError(f"message {key} must be text, got {_shown(data[key])}")
        calls = data.get("tool_calls") or ()
        if isinstance(calls, str) or not isinstance(calls, Sequence):
            raise ConfigurationError(f"message tool_calls must be a list, got {_shown(calls)}")
        if not calls and data.get("function_call") is not None:
            calls = ({"function": data["function_call"]},)
        words = data.get("content")
        content, images = _content(data.get("refusal") if words is None else words)
        return cls(
            role=role,
            content=content,
            images=images,
            reasoning=next((data[key] for key in _REASONING if data.get(key) is not None), None),
            tool_calls=tuple(_tool_call(item) for item in calls),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
        )

    def to_openai(self) -> dict[str, Any]:
        """The message as OpenAI's chat format has it (arguments as a JSON string)."""
        parts = self.parts(Image.to_openai) if self.images else None
        data: dict[str, Any] = {"role": self.role, "content": self.content if parts is None else parts}
        if self.tool_calls:
            data["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            data["name"] = self.name
        return data

    def parts(self, part_of: Callable[[Image], dict[str, Any]]) -> list[dict[str, Any]]:
        """The content of a message with pictures as a list of texts and of what `part_of` makes of each."""
        first, *others = self.pieces
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for image, text in zip(self.images, others, strict=True):
            parts += [part_of(image), {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> Message:
        """Read what `to_record` wrote; anything of `from_openai`, too."""
        message = replace(cls.from_openai(data), thinks_first=data.get("thinks_first") is not False)
        facts = [
            (_content(item.get("error"))[0] or None, _content(item.get("written"))[0])
            for item in (data.get("tool_calls") or ())
        ]
        if not any(error for error, _ in facts):
            return message
        calls = zip(message.tool_calls, facts, strict=True)
        read = tuple(replace(call, error=error, written=text) for call, (error, text) in calls)
        return replace(message, tool_calls=read)

    def to_record(self) -> dict[str, Any]:
        """OpenAI's shape with all that the message holds: `reasoning` where there is a thought,
        `thinks_first` where that is false, and of a call that could not be read `error` and what was
        `written`."""
        data = self.to_openai()
        if self.reasoning is not None:
            data["reasoning"] = self.reasoning
        if not self.thinks_first:
            data["thinks_first"] = False
        for call, item in zip(self.tool_calls, data.get("tool_calls", ()), strict=True):
            if call.error is not None:
                item |= {"error": call.error, "written": call.written}
        return data


def _misspelt(data: Mapping[str, Any]) -> str:
    """A hint for a message without a role: the key that was meant to be one."""
    wrong = None if "role" in data else closest("role", [key for key in data if isinstance(key, str)])
    return f": write 'role', not {wrong!r}" if wrong else ""


def _content(content: Any) -> tuple[str, tuple[Image, ...]]:
    """OpenAI's content as text with marks, and its pictures: null is empty, parts are joined."""
    if content is None or isinstance(content, str):
        return content or "", ()
    if not isinstance(content, Sequence):
        raise ConfigurationError(f"message content must be text or a list of parts, got {_shown(content)}")
    texts: list[str] = []
    images: list[Image] = []
    has_images = any(isinstance(part, Mapping) and part.get("type") == "image_url" for part in content)
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            images.append(Image.from_openai(part))
            texts.append(IMAGE_MARK)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            # a mark in words would stand for a picture
            texts.append(part["text"].replace(IMAGE_MARK, "\ufffd") if has_images else part["text"])
        else:
            raise ConfigurationError(
                'a part of a message\'s content must be {"type": "text", "text": ...} or {"type": '
                f'"image_url", "image_url": ...}}, got {_shown(part)}'
            )
    return "".join(texts), tuple(images)


def _tool_call(item: Any) -> ToolCall:
    """One entry of OpenAI's tool_calls; the call may also stand without its "function" wrapper, or have its
    name there, as Inspect's."""
    if isinstance(item, Mapping) and isinstance(item.get("function"), str):
        item = {**item, "function": {"name": item["function"], "arguments": item.get("arguments")}}
    function = (item.get("function") or item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            f'a tool call must be {{"function": {{"name": ..., "arguments": ...}}}}, got {_shown(item)}'
        )
    try:
        arguments, unknown = call_arguments({**_loose_arguments(item), **function})
    except ValueError as error:
        raise ConfigurationError(f"tool call {function['name']!r}: {error}") from error
    if unknown and not arguments:
        raise ConfigurationError(
            f"tool call {function['name']!r} has no arguments, and {unknown[0]!r} beside its name: write "
            '{"function": {"name": ..., "arguments": {...}}}'
        )
    arguments = arguments or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"the arguments of tool call {function['name']!r} are not JSON ({error}): {arguments!r:.80}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(
            f"the arguments of tool call {function['name']!r} must be an object, got {_shown(arguments)}"
        )
    if is_nested_deeper(arguments, MAX_NESTING):
        raise ConfigurationError(
            f"the arguments of tool call {function['name']!r} have more than {MAX_NESTING} levels of objects "
            "and lists: nest them less deeply"
        )
    return ToolCall(name=function["name"], arguments=dict(arguments), id=str(item.get("id") or ""))


def call_arguments(function: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The arguments of `{"name": ..., "arguments": ...}`, and its keys that have no place there.

    Arguments may stand under `parameters` or `args`, too. Null is absent: without arguments they are None.
    Raises ValueError where they stand under two of the names.
    """
    keys = [key for key in _ARGUMENTS if function.get(key) is not None]
    if len(keys) > 1:
        raise ValueError(f"the tool call has {' and '.join(keys)}: put all arguments into arguments")
    unknown = [key for key, value in function.items() if key not in _CALL_KEYS and value is not None]
    return (function[keys[0]] if keys else None), unknown


def _loose_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that stand beside a call's "function" instead of in it; other keys there are a vendor's."""
    return {key: item[key] for key in _ARGUMENTS if item.get(key) is not None}


def tool_results(after: Iterable[Message]) -> tuple[Message, ...]:
    """The tool messages that stand directly behind a reply; `after`: all messages behind it."""
    return tuple(takewhile(lambda message: message.role == "tool", after))


def calls_answered(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[int | None]:
    """The number of the call that each tool message after a reply answers, or None.

    Ids may occur twice: the first result of an id answers its first call. A result without an id, or with one
    that no call has, answers the first call that is left.
    """
    numbers: list[int | None] = [None] * len(results)
    left, ids = list(range(len(calls))), {call.id for call in calls}
    for has_id in (True, False):
        for place, result in enumerate(results):
            if (result.tool_call_id in ids and bool(result.tool_call_id)) != has_id:
                continue
            same = [number for number in left if not has_id or calls[number].id == result.tool_call_id]
            if same:
                left.remove(same[0])
                numbers[place] = same[0]
    return numbers


def is_nested_deeper(value: Any, levels: int) -> bool:
    """True if objects and lists stand in more than so many levels inside one another; `[]` is one level."""
    layer = [value]
    for _ in range(levels + 1):
        layer = [item for item in layer if isinstance(item, Mapping | list | tuple)]
        if not layer:
            return False
        layer = [
            item for group in layer for item in (group.values() if isinstance(group, Mapping) else group)
        ]
    return True


def num_values(body: bytes) -> int:
    """An upper bound of the number of values in a JSON text: its strings, and the separators outside of
    them."""
    separators = sum(map(body.count, (b",", b"[", b"{")))
    if separators <= MAX_VALUES // 2:  # even if none of them stands inside a string
        return separators
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = bare.count(b'"') // 2
    if strings > MAX_VALUES:
        return strings
    outside = b"".join(bare.split(b'"')[::2])
    return sum(map(outside.count, (b",", b"[", b"{")))


def _shown(value: Any) -> str:
    return f"{type(value).__name__}: {value!r:.80}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Says how one turn is sampled.

    `temperature` 0 is greedy. Log-probs are taken under the distribution that is sampled from
    (tempered and truncated); for greedy turns under the plain distribution (temperature 1).
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """The turn ends as soon as its decoded text contains one of these. The message ends before it; its tokens
    stay in the completion, exactly as they were sampled."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text? False for models whose thoughts or calls only they frame."""
    stream: int = 0
    """Key of this turn's own random stream (see `seeds.derive`): token t uses its t-th uniform."""
    return_sampling_mask: bool = False
    """Carry the tokens that top-k and top-p keep, for an update that renormalises over them?"""
    constraint: Constraint | None = None
    """The grammar that the turn keeps to; None: none."""

    @property
    def carries_mask(self) -> bool:
        """True where a sampling mask is asked for and something may be left out: no greedy turn truncates."""
        truncates = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)
        return self.return_sampling_mask and truncates

    def refuse_constraint(self, sampler: str) -> None:
        """Raises ConfigurationError where a sampler that knows no grammar would have to keep to one."""
        if self.constraint is not None:
            raise ConfigurationError(
                f"{sampler} cannot keep to a grammar: leave constrain, tool_choice and answer schemas out"
            )


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a completion were sampled by policy `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The tokens that top-k and top-p kept for each token of a turn, and among which it was drawn.

    Another policy keeps others, so the sets are carried with the turn. vLLM has the same by this name.
    """

    token_ids: array[int]
    """[K] the sets behind one another."""
    counts: array[int]
    """[T] how many ids are each token's; 0: nothing was left out for it."""

    @classmethod
    def of(cls, sets: Iterable[Sequence[int]]) -> SamplingMask:
        """The mask of [T] sets, empty where nothing was left out."""
        token_ids, counts = array("i"), array("i")
        for ids in sets:
            token_ids.extend(ids)
            counts.append(len(ids))
        return cls(token_ids, counts)

    def sets(self) -> list[array[int]]:
        """[T] each token's set."""
        ends = accumulate(self.counts)
        return [self.token_ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]

    def expect(self, sampled: Sequence[int]) -> None:
        """Raises BackendError where a sampled token is not in its set, or has none of its own length."""
        if len(sampled) != len(self.counts):
            raise BackendError(f"a sampling mask of {len(self.counts)} tokens came with {len(sampled)}")
        for place, (token, ids) in enumerate(zip(sampled, self.sets(), strict=True)):
            if ids and token not in ids:
                raise BackendError(
                    f"the sampled token {token} at place {place} is outside the {len(ids)} that top-k and "
                    "top-p kept there: the engine that sampled it returned another token's set"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled turn, exactly as the backend sampled it; never re-tokenised."""

    message: Message
    """A backend gives the raw text as its content; the agent reads thoughts and tool calls out of it."""
    prompt_ids: tuple[int, ...]
    """[P] every token the model saw before the first sampled one."""
    token_ids: tuple[int, ...]
    """[T] sampled tokens, the first end-of-turn token included, or those of the stop string."""
    logprobs: tuple[float, ...]
    """[T] under the policy that sampled them, at the sampling temperature and truncation."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...] = ()
    pixels: tuple[PixelValues, ...] = ()
    """The pictures in `prompt_ids`, in order."""
    constraint: Constraint | None = None
    """The grammar that it was sampled under; None: none."""
    stop: str | None = field(default=None, compare=False)
    """The string of `SamplingParams.stop` that ended it; None where none did."""
    forced: tuple[bool, ...] = ()
    """[T] True for a token that does not train: the constraint allowed no other, so that its log-prob is 0
    whatever the policy, or `ReplyLimits.trains` is False; empty where all do."""
    sampling_mask: SamplingMask | None = None
    """What top-k and top-p kept, where it was asked for and they may have left tokens out."""
    begun: float | None = field(default=None, compare=False)
    """Time at which the model began the turn, in seconds of `time.monotonic()`; None if unknown."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion needs one log-prob per token, got {len(self.token_ids)} tokens "
                f"and {len(self.logprobs)} log-probs"
            )
        if self.forced and len(self.forced) != len(self.token_ids):
            raise ValueError(f"forced must tell it of {len(self.token_ids)} tokens, got {len(self.forced)}")
        if self.version_spans:
            covered = [position for span in self.version_spans for position in range(span.start, span.end)]
            if covered != list(range(len(self.token_ids))):
                raise ValueError(
                    f"version spans {self.version_spans} do not cover {len(self.token_ids)} tokens"
                )

    @property
    def num_trained(self) -> int:
        """Tokens that were the policy's choice: all but the forced ones."""
        return len(self.token_ids) - sum(self.forced)

    @property
    def versions(self) -> Sequence[int]:
        """[T] the policy version behind each token (0 where the backend has no versions)."""
        if not self.version_spans:
            return [0] * len(self.token_ids)
        return [span.version for span in self.version_spans for _ in range(span.start, span.end)]


def finite_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError as `json.loads` does, and for NaN, Infinity, and numbers larger than a float, whichever
    way they are written.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_integer)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]!r} is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 308:  # larger than any float
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)
