"""Tools an agent may call: typed functions become JSON schemas, calls become tool messages.

    @tool
    def refund(order_id: str, amount: float = 0.0) -> str:
        '''Refund an order.

        Args:
            order_id: The order, e.g. K27.
        '''

A parameter `scenario` or `state` is not the agent's: the conversation fills it in.

The environment runs an agent's calls through a `Toolbox`. What the agent gets wrong comes back to it
as a readable message; what the tool gets wrong is an `EnvironmentFailure`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, overload

import pydantic

from stateset_agents.runtime.named_code import imported
from stateset_agents.runtime.tasks import Deadline, gather_or_cancel, in_thread
from stateset_agents.runtime.user_code import call_user_code, format_error
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    EnvironmentFailure,
    EnvironmentTimeout,
    StatesetError,
)
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.schemas import call_key, inlined
from stateset_agents.types.settings import closest, expect_that, is_whole


class ToolError(Exception):
    """Raised by a tool to tell the agent that its call cannot be done; the agent reads the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function with what the agent is told about it. Calling it calls the function."""

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel] | Mapping[str, Any]
    """A model validates the agent's arguments, strictly: "5" is no integer. A JSON schema is only shown: the
    function, an endpoint of somebody else's, checks them itself."""
    local: bool
    """True when a call waits on nothing remote."""
    scenario_parameter: str | None = None
    """The parameter that takes the conversation's scenario; not shown to the agent."""
    state_parameter: str | None = None
    """The parameter that takes the conversation's state: `state`, or `self` of a class that is given as
    `tools`; not shown to the agent."""
    shared: bool = False
    """True if the object whose method it is may serve all conversations, for no call changes it."""
    timeout: float | None = None
    """Seconds a call may take; None where the run's `turn_timeout` alone limits it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's function shape: `{"type": "function", "function": {name, description, parameters}}`."""
        arguments = self.arguments
        parameters = inlined(arguments if isinstance(arguments, Mapping) else arguments.model_json_schema())
        parameters.setdefault("properties", {})
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *, name: str | None = None, local: bool | None = None, timeout: float | None = None, shared: bool = False
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    local: bool | None = None,
    timeout: float | None = None,
    shared: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function, sync or async; used as `@tool` or `@tool(local=True)`.

    The schema comes from the annotations and defaults, the descriptions from the docstring (its
    `Args:` section). Two parameters are filled in and not shown to the agent: the one annotated `Scenario`
    (or named `scenario`, without annotation) gets the conversation's scenario, the one named `state` gets
    what `ConversationEnvironment(state=...)` made for the conversation. A `state` annotated as text, a number
    or a choice of them is the agent's, as in an address. Sync tools run in a thread and count as local;
    async ones count as remote unless declared `local=True`.

    A call that takes longer than `timeout` seconds fails its conversation (EnvironmentTimeout); the agent
    is not told, for it could not help it.

    A method of one object would be shared by all conversations, and an environment refuses it: give the class
    (`tools=Shop`), or say `shared=True` where no call changes the object, as a search index.

    Raises ConfigurationError for a parameter without annotation, `*args`, or `**kwargs`.
    """
    if function is None:
        return lambda decorated: replace(_tool(decorated, name, local, timeout), shared=shared)
    return _tool(function, name, local, timeout)


def _methods(kind: type) -> list[Tool]:
    """The public methods of a class, in their order, as tools on the conversation's object."""
    names = dict.fromkeys(name for owner in reversed(kind.__mro__) for name in vars(owner))
    members = {name: inspect.getattr_static(kind, name) for name in names}
    methods = {
        name: member
        for name, member in members.items()
        if inspect.isfunction(member) and not name.startswith("_") and name not in _LIFECYCLE
    }
    if not methods:
        raise ConfigurationError(
            f"tools: the class {kind.__name__} has no public method that could be a tool"
        )
    return [_tool(method, name, None, None, owner=kind) for name, method in methods.items()]


_LIFECYCLE = ("reset", "fork", "close", "get_reward")
"""Methods of a conversation's object that are no tools; the last is TRL's."""


def _tool(
    function: Callable[..., Any],
    name: str | None,
    local: bool | None,
    timeout: float | None,
    owner: type | None = None,
) -> Tool:
    # functools.partial, an object that can be called, and a class, whose methods an environment offers
    if isinstance(function, type) or not hasattr(function, "__name__"):
        raise ConfigurationError(
            f"a tool must be a typed function, got {function!r:.60}: write a function that calls it"
        )
    name = name or function.__name__

    def wrong(why: str) -> ConfigurationError:
        return ConfigurationError(f"tool {name}: {why}")

    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise wrong(f"timeout must be seconds above 0 or None, got {timeout!r:.60}")
    description, parameter_texts = _read_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise wrong(f"a type in its signature is unknown: {error}") from error
    fields: dict[str, Any] = {}
    scenario_parameter = None
    state_parameter = None
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if place == 0 and owner is not None:
            state_parameter = parameter.name
            continue
        if place == 0 and parameter.name == "self":
            raise ConfigurationError(
                f"tool {name} is a method: leave @tool off and give its class, tools=..."
            )
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise wrong(f"{parameter} cannot be filled by name; name each parameter")
        hint = hints.get(parameter.name)
        if hint is Scenario or (parameter.name == "scenario" and hint is None):
            scenario_parameter = parameter.name
            continue
        if parameter.name == "state" and not (hint and _is_scalar(hint)):
            if owner is not None:
                raise wrong(f"the conversation's state is self, a {owner.__name__}: leave the parameter out")
            state_parameter = parameter.name
            continue
        if parameter.name not in hints:
            raise wrong(f"parameter {parameter.name!r} needs a type, e.g. {parameter.name}: str")
        if isinstance(parameter.default, pydantic.fields.FieldInfo):  # a plain call would get it as a value
            raise wrong(
                f"{parameter.name} has a Field as default: write Annotated[TYPE, Field(...)] = DEFAULT"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        text = parameter_texts.get(parameter.name)
        # The real name is an alias, for it may be one that pydantic's own base class uses (copy, json).
        field = pydantic.Field(default, alias=parameter.name, description=text)
        fields[f"argument_{len(fields)}"] = (hints[parameter.name], field)
    config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        arguments = pydantic.create_model(name, __config__=config, **fields)
        arguments.model_json_schema()
    except pydantic.errors.PydanticUserError as error:  # a type without a schema, or none that JSON can fill
        why = str(error.message).splitlines()[0].partition(". Set ")[0]
        raise wrong(f"a type in its signature cannot be used: {why}") from error
    return Tool(
        name=name,
        description=description,
        function=function,
        arguments=arguments,
        local=not inspect.iscoroutinefunction(function) if local is None else local,
        scenario_parameter=scenario_parameter,
        state_parameter=state_parameter,
        timeout=timeout,
    )


def _is_scalar(hint: Any) -> bool:
    """True for the type of a text or a number, or a choice of such. No state has it: it could not change."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_scalar(typing.get_args(hint)[0])
    if origin in (Union, UnionType):
        return all(map(_is_scalar, typing.get_args(hint)))
    return isinstance(hint, type) and issubclass(hint, str | int | float | Enum | NoneType)


Tools: TypeAlias = Sequence[Tool | Callable[..., Any] | str] | type
"""The source of a `Toolbox`."""


class Toolbox:
    """The tools of one environment. Shareable: it holds no conversation.

    box = Toolbox([track, refund])
    box.schemas                                                    # what the agent is told
    await box.call_all(reply.tool_calls, scenario=scenario, state=shop)  # tool messages, in call order
    """

    def __init__(self, tools: Tools = (), *, max_result_chars: int = 10_000) -> None:
        """Plain typed functions are taken as `@tool` would take them; two equal names are refused. A class
        stands for its public methods: they are called on the conversation's state, which is one of it.
        Functions and the class may be named as "module:function".

        Of a result with more than `max_result_chars` characters the agent reads the first ones, and how many
        were left out.
        """
        expect_that(
            is_whole(max_result_chars, 1), "max_result_chars", "be at least 1", max_result_chars, length=60
        )
        self._max_result_chars = max_result_chars
        self._tools: dict[str, Tool] = {}
        self.state_class: type | None = None
        """The class of which some tools are methods; None where no tool is."""
        tools = [tools] if isinstance(tools, type | str) else tools
        rule = "be a list of typed functions, or a class with methods"
        expect_that(isinstance(tools, Sequence), "tools", rule, tools, length=60)
        for item in tools:
            if isinstance(item, str) and ":" in item:
                item = imported("tool", item)
            if not callable(item):
                raise ConfigurationError(
                    f"a tool must be a typed function or 'module:function', got {item!r:.60}"
                )
            for entry in self._entries(item):
                if entry.name in self._tools:
                    raise ConfigurationError(f"tool {entry.name!r} stands twice: names must be unique")
                self._tools[entry.name] = entry

    def _entries(self, item: Tool | Callable[..., Any]) -> list[Tool]:
        if isinstance(item, Tool):
            return [item]
        if not isinstance(item, type):
            return [tool(item)]
        if self.state_class is not None:
            raise ConfigurationError(
                f"tools has two classes, {self.state_class.__name__} and {item.__name__}, and a conversation "
                "has one state: make one class of them"
            )
        self.state_class = item
        return _methods(item)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [entry.schema for entry in self._tools.values()]

    @property
    def local(self) -> bool:
        return all(entry.local for entry in self._tools.values())

    @property
    def takes_state(self) -> str | None:
        """The name of a tool that asks for the conversation's state; None where no tool does."""
        return next((entry.name for entry in self._tools.values() if entry.state_parameter), None)

    def refuse_shared_objects(self) -> None:
        """Raises ConfigurationError for a tool that is a method of one object: all conversations would see
        what each of them did."""
        for entry in self._tools.values():
            owner = getattr(inspect.unwrap(entry.function), "__self__", None)
            if entry.shared or owner is None or isinstance(owner, type | ModuleType):
                continue
            kind = type(owner).__name__
            raise ConfigurationError(
                f"tool {entry.name} is a method of one {kind}, which all conversations would share: give the "
                f"class, tools={kind}, of which each gets its own (state=lambda: {kind}(...) makes it with "
                f"arguments), or tool(shared=True)(...) where no call changes it"
            )

    async def call(self, call: ToolCall, *, scenario: Scenario | None = None, state: Any = None) -> Message:
        """Run one call; its result, or what was wrong with it, as a tool message.

        `scenario` and `state` are for the tools that ask for them. Raises EnvironmentFailure when the tool
        itself breaks or takes too long; programming errors in it travel.
        """
        content = await self._run(call, scenario, state)
        return Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)

    async def call_all(
        self, calls: Sequence[ToolCall], *, scenario: Scenario | None = None, state: Any = None
    ) -> list[Message]:
        """Run the calls of one reply; answers stand in the order of the calls.

        Async tools run together. Sync ones run one after another, in call order, so that two calls
        that touch the same thing leave it the same in every run.
        """
        one_by_one = [
            index
            for index, call in enumerate(calls)
            if call.name in self._tools and not self._tools[call.name].is_async
        ]
        together = [[index] for index in range(len(calls)) if index not in one_by_one]

        async def run(indices: list[int]) -> list[tuple[int, Message]]:
            return [
                (index, await self.call(calls[index], scenario=scenario, state=state)) for index in indices
            ]

        lanes = await gather_or_cancel(run(indices) for indices in (one_by_one, *together))
        answers = dict(pair for lane in lanes for pair in lane)
        return [answers[index] for index in range(len(calls))]

    async def _run(self, call: ToolCall, scenario: Scenario | None, state: Any) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        if call.name not in self._tools:
            close = closest(call.name, self._tools)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(self._tools)}"
            return f"error: unknown tool {call.name!r}; {hint if self._tools else 'there are no tools here'}"
        entry = self._tools[call.name]
        try:
            arguments = _validated(entry, call.arguments)
        except ToolError as error:
            return f"error: {error}"
        if entry.scenario_parameter is not None:
            if scenario is None:
                raise ConfigurationError(
                    f"tool {entry.name} reads the scenario, and this call was given none"
                )
            arguments[entry.scenario_parameter] = scenario
        if entry.state_parameter is not None:
            if state is None:
                raise ConfigurationError(
                    f"tool {entry.name} asks for the conversation's state, and this call was given none: "
                    "give the environment state=..., a function that makes it"
                )
            arguments[entry.state_parameter] = state
        function = entry.function
        if inspect.getattr_static(self.state_class, entry.name, None) is function:  # a subclass has its own
            function = getattr(type(state), entry.name, function)
        late = EnvironmentTimeout(
            f"tool {entry.name} took longer than {entry.timeout} s: mend what hangs, or raise its timeout"
        )
        try:
            async with Deadline(entry.timeout).bound(late):
                result = await call_user_code(function, **arguments)
        except ToolError as error:
            return bounded(f"error: {error}", self._max_result_chars)
        except (*PROGRAMMING_ERRORS, StatesetError):
            raise
        except Exception as error:  # the boundary to user code: whatever else breaks is the tool's failure
            raise EnvironmentFailure(
                f"tool {entry.name} failed: {format_error(error)}; mend it, or raise ToolError for "
                "what the agent may correct"
            ) from error
        if not isinstance(result, str):
            result = await in_thread(_as_json, entry.name, result)  # a large one takes a while
        return bounded(result, self._max_result_chars)


def bounded(text: str, max_chars: int) -> str:
    """The text; of a longer one the first `max_chars` characters, and the number that was left out."""
    left_out = len(text) - max_chars
    if left_out <= 0:
        return text
    return f"{text[:max_chars]}\n[cut here: {left_out} more characters were left out]"


def _validated(entry: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the function wants them; ToolError says in one line what does not fit."""
    if not isinstance(arguments, Mapping):
        raise ToolError(f"{entry.name}: arguments must be an object, got {type(arguments).__name__}")
    if isinstance(entry.arguments, Mapping):
        return dict(arguments)
    try:
        model = entry.arguments.model_validate_json(json.dumps(dict(arguments)), strict=True)
    except pydantic.ValidationError as error:
        raise ToolError(f"{entry.name}: {'; '.join(map(_complaint, error.errors()))}") from error
    fields = entry.arguments.model_fields
    return {str(field.alias): getattr(model, name) for name, field in fields.items()}


def _complaint(error: Any) -> str:
    argument = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"missing argument {argument!r}"
    if error["type"] == "extra_forbidden":
        return f"unknown argument {argument!r}"
    if not argument:
        return f"arguments cannot be read: {error['msg']}"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"argument {argument!r}: {message}, got {json.dumps(error['input'], default=str):.60}"


def _as_json(name: str, result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"tool {name} returned {type(result).__name__}, which is no JSON: {error}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form; return text, numbers, lists or dicts")


_ARGS_SECTION = re.compile(r"^(args|arguments|parameters):\s*$", re.IGNORECASE)
_OTHER_SECTION = re.compile(r"^(returns|raises|yields|examples?|notes?):\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and each parameter's text from a Google-style `Args:` section."""
    description: list[str] = []
    parameters: dict[str, str] = {}
    section, current = "description", ""
    for line in text.splitlines():
        stripped = line.strip()
        if _ARGS_SECTION.match(line):
            section = "args"
        elif _OTHER_SECTION.match(line):
            section = "other"
        elif section == "description":
            description.append(stripped)
        elif section == "args" and stripped:
            indent = len(line) - len(line.lstrip())
            match = _ARGUMENT.match(stripped)
            if match and indent <= 4:
                current = match[1]
                parameters[current] = match[2]
            elif current:
                parameters[current] = f"{parameters[current]} {stripped}".strip()
    return re.sub(r"\s+", " ", " ".join(description)).strip(), parameters


NOT_RECORDED = "error: no answer is recorded for this call"


class RecordedToolbox(Toolbox):
    """Tools that answer as the scenario's row did; those that really run go first.

    A scenario that names tools (`Scenario.tools`) is offered those. One that names none is offered what such
    scenarios call, all of it, so that what is offered does not give away what is to be called.
    """

    def __init__(
        self,
        tools: Tools = (),
        *,
        scenarios: Sequence[Scenario] = (),
        max_result_chars: int = 10_000,
    ) -> None:
        super().__init__(tools, max_result_chars=max_result_chars)
        self._called: dict[str, Mapping[str, Any]] = {}
        for scenario in scenarios:
            if scenario.tools is None:
                for call in recorded_calls(scenario):
                    self._called.setdefault(call["name"], _shape_of(call))

    def offered(self, scenario: Scenario) -> list[dict[str, Any]]:
        """The schemas that a scenario's agent is told."""
        running = {schema["function"]["name"]: schema for schema in self.schemas}
        return [dict(schema) for schema in {**self._recorded(scenario), **running}.values()]

    def _recorded(self, scenario: Scenario) -> Mapping[str, Mapping[str, Any]]:
        """Name -> schema of what the scenario's row offers."""
        if scenario.tools is None:
            return self._called
        schemas = {schema["function"]["name"]: schema for schema in scenario.tools}
        calls = {call["name"]: _shape_of(call) for call in recorded_calls(scenario)}
        return {**schemas, **{name: schema for name, schema in calls.items() if name not in schemas}}

    async def call(self, call: ToolCall, *, scenario: Scenario | None = None, state: Any = None) -> Message:
        """The recorded answer; an unreadable or unknown call is told as everywhere."""
        functions = {} if scenario is None else self._recorded(scenario)
        if call.error is not None or call.name in self._tools or not functions:
            return await super().call(call, scenario=scenario, state=state)
        if call.name not in functions:
            names = dict.fromkeys([*functions, *self._tools])
            content = f"error: unknown tool {call.name!r}; there are: {', '.join(names)}"
        else:
            schemas = list(functions.values())
            key = folded_key(call.name, call.arguments, schemas)
            recorded = [
                entry["content"]
                for entry in recorded_calls(scenario)
                if folded_key(entry["name"], entry["arguments"], schemas) == key
            ]
            content = next((text for text in recorded if text is not None), NOT_RECORDED)
        return Message(
            role="tool",
            content=bounded(content, self._max_result_chars),
            tool_call_id=call.id or None,
            name=call.name,
        )


def recorded_calls(scenario: Scenario | None) -> Sequence[Mapping[str, Any]]:
    """Calls with their results, as `scenario_files.scenario_of_row` writes them into a context."""
    entries = () if scenario is None else scenario.context.get("recorded")
    if not isinstance(entries, list | tuple):
        return ()
    return [
        entry
        for entry in entries
        if isinstance(entry, Mapping) and entry.keys() == {"name", "arguments", "content"}
    ]


def folded_key(name: str, arguments: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> str:
    """One text for calls that are alike but for case and blanks."""
    return call_key(name, arguments, schemas, fold=lambda text: " ".join(text.casefold().split()))


def _shape_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema for a tool of which only calls are known."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {
        key: {"type": kinds[type(value)]} if type(value) in kinds else {}
        for key, value in call["arguments"].items()
    }
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": call["name"], "description": "", "parameters": parameters},
    }
