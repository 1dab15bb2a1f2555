"""Environments: where an agent's conversations come from.

An `Environment` is shareable and holds no conversation; `start` opens a `Conversation`, which the
episode steps with the agent's replies until it is over, asks for its outcome, and closes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from stateset_agents.core.sources.datasets import read_any_scenarios, with_drawn_split
from stateset_agents.core.tools import RecordedToolbox, Tools
from stateset_agents.core.users.simulated_user import User, UserFactory, default_user
from stateset_agents.runtime.named_code import NamedCall, wanted_arguments
from stateset_agents.runtime.user_code import call_checked, call_user_code, format_error, guarded
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    EnvironmentFailure,
    StatesetError,
)
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Outcome

_log = get_logger(__name__)
StateFactory = Callable[..., Any]
"""Makes the state of one conversation; may ask for `scenario` and `seed` by name. The members of a group
share both, and must start from equal states."""


class StateMaker:
    """Makes states, and refuses an object that two conversations would share."""

    def __init__(self, make: StateFactory | str, kind: type | None = None) -> None:
        """`kind` is the class whose methods are tools: each state must be one of it, and is `reset`.

        Raises ConfigurationError for what makes no states.
        """
        rule = "be a function that makes the state of a conversation"
        hint = "one object would be shared by all conversations; give lambda: ..."
        expect_that(callable(make) or isinstance(make, str), "state", rule, make, hint, length=60)
        self._make = NamedCall("state", make, ("scenario", "seed"), positional=())
        self._kind = kind
        if kind is not None and inspect.iscoroutinefunction(getattr(kind, "reset", None)):
            raise ConfigurationError(
                f"{kind.__name__}.reset is async: give state=..., an async function that makes what waits"
            )
        self._last: Any = None
        """Kept, so that another object cannot have its identity."""

    @property
    def local(self) -> bool:
        return not inspect.iscoroutinefunction(self._make.function)

    async def make(self, scenario: Scenario, seed: int) -> Any:
        """Raises EnvironmentFailure where making it breaks, ConfigurationError for None or the last one."""
        state = await guarded("making the state", self._make.call({"scenario": scenario, "seed": seed}))
        await guarded("resetting the state", call_user_code(self._reset, state, scenario, seed))
        if state is self._last and state is not None:
            raise ConfigurationError(
                f"state gave the same {type(state).__name__} to two conversations, which would see what the "
                "other did: make a new one in each call"
            )
        self._last = _expect_state(state)
        return state

    @contextlib.contextmanager
    def preview(self, scenario: Scenario, seed: int) -> Iterator[Any]:
        """A state for inspection before anything runs, closed at the end. Only for a sync function.

        Raises ConfigurationError where its `close` is async: nothing awaits it here.
        """
        args, kwargs = self._make.bound({"scenario": scenario, "seed": seed})
        state = _expect_state(self._make.function(*args, **kwargs))
        self._reset(state, scenario, seed)
        close = getattr(state, "close", None)
        if inspect.iscoroutinefunction(close):
            raise ConfigurationError(
                f"{type(state).__name__}.close is async, so no state can be made to look at the user first: "
                "give ConversationEnvironment(local=True), or False where a step waits on anything remote"
            )
        try:
            yield state
        finally:
            if callable(close):
                close()

    def _reset(self, state: Any, scenario: Scenario, seed: int) -> None:
        """Call the `reset` of the class whose methods are tools, where it has one, with what it asks for by
        name: `scenario`, `seed` and keys of the scenario's context, all of these for `**kwargs`."""
        kind = self._kind
        if kind is None or state is None:
            return
        if not isinstance(state, kind):
            raise ConfigurationError(
                f"state must make a {kind.__name__}, whose methods are tools, got {type(state).__name__}"
            )
        reset = getattr(state, "reset", None)
        if reset is None:
            return
        values = {**scenario.context, "scenario": scenario, "seed": seed}
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in values.items() if takes_all or name in named}
        try:
            inspect.signature(reset).bind(**arguments)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind.__name__}.reset fails for {scenario.id} ({error}): there are {', '.join(values)}"
            ) from None
        if (returned := reset(**arguments)) is not None:
            raise ConfigurationError(
                f"{kind.__name__}.reset returned {returned!r:.60}, which nobody would read: put what the "
                "agent is told into the scenario's opening"
            )


def _expect_state(state: Any) -> Any:
    if state is None:
        raise ConfigurationError("state must return a conversation's state, got None: is a return missing?")
    return state


def copy_state(state: Any) -> Any:
    """An independent copy: by the state's own `fork()` where it has one, else by `copy.deepcopy`.

    Raises ConfigurationError for what cannot be copied.
    """
    fork = getattr(state, "fork", None)
    if callable(fork):
        copied = fork()
        if copied is state:
            raise ConfigurationError(
                f"{type(state).__name__}.fork() gave the state itself: give an independent copy"
            )
        return copied
    try:
        return copy.deepcopy(state)
    except Exception as error:
        raise ConfigurationError(
            f"the state, a {type(state).__name__}, cannot be copied ({format_error(error)}), and a fork of "
            "the conversation needs a copy: give it fork() or __deepcopy__, or train without branches and "
            "turn_retries"
        ) from error


async def close_state(state: Any) -> None:
    """Call its `close()`, sync or async, where it has one."""
    close = getattr(state, "close", None)
    if callable(close):
        await guarded("closing the state", call_user_code(close))


_ROUNDING = 1e-3
"""Difference that the sum of a breakdown may have from the reward, as a share of its terms: enough for
rounded terms and for fp32, too little for one that was forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's answer to one reply of the agent."""

    messages: tuple[Message, ...] = ()
    """Tool results or the user's next words, in order."""
    conversation: tuple[Message, ...] | None = None
    """All that the agent is to read next, where that is not all it has read with its reply and `messages`."""
    reward: float | None = None
    """Reward of this turn; None where the environment gives none."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Terms that sum to the turn's reward; may be left empty."""
    terminated: bool = False
    """The conversation ended."""
    truncated: bool = False
    """A limit cut it."""

    def __post_init__(self) -> None:
        _expect_messages("Observation.messages", self.messages)
        if not self.breakdown:
            return
        total = math.fsum(self.breakdown.values())
        parts = math.fsum(abs(part) for part in self.breakdown.values())
        if self.reward is None or not abs(total - self.reward) <= _ROUNDING * max(parts, abs(self.reward)):
            raise EnvironmentFailure(
                f"the breakdown of a turn's reward sums to {total:g} and the reward is {self.reward!r}: give "
                f"both, alike, got {dict(self.breakdown)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """The limits that a conversation sets to the agent's next reply, within the agent's own."""

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end it, besides those of `AgentConfig.stop`."""
    with_reasoning: bool = False
    """True if the conversation gets the agent's thoughts beside its words, as clients of a server do."""
    tool_choice: str = "auto"
    """OpenAI's: auto, required (the reply calls a tool), none, or the name of the tool that it calls. The
    reply is sampled under a grammar then, and trained under it; see `AgentConfig.constrain`."""
    answer_schema: Mapping[str, Any] | None = None
    """The JSON schema of a reply in words; None: any words."""
    answer_between: tuple[str, str] | None = None
    """Two texts that a reply in words stands between, such as `("<answer>", "</answer>")` or the fences of a
    code block; None: none. Either this or a schema."""
    thinks: bool = False
    """True: a thought between <think> and </think> comes first, by a grammar."""
    parallel_tool_calls: bool = True
    """False: at most one call in the reply, where a grammar holds."""
    callable_tools: Sequence[Mapping[str, Any]] | None = None
    """The tools that a constrained reply may call, where the prompt lists others; None: those it lists."""
    is_requested: bool = False
    """True where a client's request asks for it: then it holds whatever `AgentConfig.constrain` says."""
    trains: bool = True
    """False: the reply is recorded, and no update learns from it."""


class Conversation(Protocol):
    """One live conversation. Not shared, not reused.

    Its `tools` are read before each reply, and so are the `reply_limits` of one that has them.
    """

    opening: tuple[Message, ...]
    """The first messages: an optional system message, then the user's words."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas (OpenAI's shape) of the tools the agent may call; may be empty."""
        ...

    async def step(self, reply: Message) -> Observation:
        """Take the agent's reply; raise only when the environment itself breaks.

        A conversation that needs more than the reply's words also has `take(completion)`, which is called
        instead with the `Completion`: its length, and whether a limit cut it.
        """
        ...

    async def outcome(self) -> Outcome:
        """The verdict on where things stand now; asked once, when the conversation is over or cut."""
        ...

    def fork(self) -> Conversation:
        """An independent copy that goes on from the same state, and is closed by itself.

        Asked for between two steps, when training plays branches, in a thread that need not be the one
        that steps. Raise NotImplementedError where a conversation cannot be copied.
        """
        ...

    async def close(self) -> None: ...


async def step_conversation(completion: Completion, conversation: Conversation) -> Observation:
    """A conversation's answer to a turn of the agent: by `take` where it has that, else by `step`.

    Users and tools never get the agent's thoughts; a conversation does whose `reply_limits` ask for them.
    """
    limits = getattr(conversation, "reply_limits", None)
    if completion.message.reasoning is not None and not (limits and limits.with_reasoning):
        completion = replace(completion, message=replace(completion.message, reasoning=None))
    take = getattr(conversation, "take", None)  # a protocol's isinstance is slow, and this is each turn
    if take is None:
        return await call_checked(conversation.step, completion.message, kind=Observation)
    return await call_checked(take, completion, kind=Observation)


async def start_conversation(environment: Environment, scenario: Scenario, seed: int) -> Conversation:
    """The conversation that `start` gives; ConfigurationError where it gives none."""
    conversation = await call_checked(environment.start, scenario, seed)
    missing = [name for name in _CONVERSATION_MEMBERS if not hasattr(conversation, name)]
    if missing:
        raise ConfigurationError(
            f"{type(environment).__name__}.start must return a conversation, got a "
            f"{type(conversation).__name__} without {', '.join(missing)}"
        )
    _expect_messages(f"{type(conversation).__name__}.opening", conversation.opening)
    return conversation


def _expect_messages(name: str, messages: object) -> None:
    if isinstance(messages, tuple | list) and all(isinstance(message, Message) for message in messages):
        return
    raise ConfigurationError(
        f"{name} must be a tuple of Messages, got {messages!r:.60}: write (Message(role=..., content=...),)"
    )


_CONVERSATION_MEMBERS = ("opening", "tools", "step", "outcome", "close")


class Environment(Protocol):
    """A source of conversations: what every environment has. `OptionalMembers` are those that it may have."""

    local: bool
    """True when no step waits on anything remote: the engine may then wait for every reply, which
    makes a run reproducible bit by bit (`scheduling: deterministic`)."""

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The scenarios of one split ("train", "validation", "test")."""
        ...

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Open a conversation; the same scenario, seed and replies give the same transcript."""
        ...


class OptionalMembers:
    """Members that an environment may have, with their defaults. A class may inherit them from here; one that
    has `Environment`'s alone is taken too.

    `close()`, where there is one, gives back what the environment holds.
    """

    honest_agent: Callable[..., Any] | None = None
    """Makes a scripted agent that is right on every scenario, for audits and demonstrations; it may ask for
    the `scenario`."""
    degenerate_agents: Mapping[str, Callable[[], Any]] | None = None
    """Name -> function that makes a scripted agent that must not be paid, for audits."""
    floor_agents: Mapping[str, Callable[[], Any]] | None = None
    """Name -> function that makes a scripted agent that knows nothing; its results stand beside every
    evaluation."""
    hold_out: Callable[[Split], None] | None = None
    """Takes some scenarios of train into a split that has none, for good, where no scenario names a split."""
    probe: Callable[..., Any] | None = None
    """Awaited with the training's engine before the first step. Raises ConfigurationError for what would
    spoil the training."""


def optional_member(environment: Environment, name: str) -> Any:
    """The environment's member of this name; the default of `OptionalMembers` where it has none."""
    return getattr(environment, name, getattr(OptionalMembers, name))


def expect_environment(value: object) -> None:
    """Raises ConfigurationError where something else stands in an environment's place, such as the reward."""
    missing = [name for name in ("local", "scenarios", "start") if not hasattr(value, name)]
    if isinstance(value, type):
        raise ConfigurationError(f"environment must be an object, got the class: write {value.__name__}(...)")
    if missing:
        raise ConfigurationError(
            f"environment must have local, scenarios(split) and start(scenario, seed), got a "
            f"{type(value).__name__} without {', '.join(missing)}: the order is agent, environment, reward"
        )


Success = Callable[..., "bool | Outcome | None"]
"""Was the task done? It may ask for scenario, context, messages, replies and state by name, and returns True,
False, None where that cannot be told, or a whole `Outcome`. A function with other names, as in
`lambda s, m: ...`, gets (scenario, messages)."""


class ConversationEnvironment(OptionalMembers):
    """Scenarios, a user for each conversation, and tools: the environment that needs no code.

        ConversationEnvironment(scenarios=[{"topic": "refund", "context": "Order delayed"}], max_turns=6)

    A reply that calls tools is answered by their results, any other by the user; the conversation
    ends when the user leaves. It gives no reward of its own unless success can be told.

    User code runs in a thread, or is awaited where it is async. It asks by name for what it wants to see.
    """

    def __init__(
        self,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
        *,
        max_turns: int = 6,
        tools: Tools = (),
        user: UserFactory | str | None = default_user,
        success: Success | str | None = None,
        state: StateFactory | str | None = None,
        system_prompt: str | None = None,
        local: bool | None = None,
        max_result_chars: int = 10_000,
        first_reply: Literal["any", "call"] = "any",
        answer_schema: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            scenarios: Scenarios, plain dicts (see `Scenario.from_dict`), a `Dataset`, the path of a file, or
                the arguments of `dataset_scenarios`, {"dataset": ..., "columns": ...}. Rows may have any
                shape of `core.sources.row_shapes`. Tools that they offer answer as the row has it.
            max_turns: Most agent completions of a conversation; a round of tool calls is one. A
                conversation that gets there is truncated. With 1 nobody speaks after the agent's reply, and
                one in words is the conversation's own end.
            tools: Functions the agent may call (see `core.tools`), or a class: its public methods are tools,
                and each conversation has an object of it as its state.
            user: Makes the user of a conversation (see `simulated_user`) from scenario, seed and state. None:
                nobody speaks after the opening, so that the agent's first reply in words is the end.
            success: Says whether the task was done (see `Success`); if absent, the user's `satisfied` does.
            state: Makes the state of a conversation, from scenario and seed if it asks for them; tools, user
                and success ask for it by the name `state`. A fork of the conversation has a copy of it.
            system_prompt: Opens every conversation, instead of a row's own.
            local: Does no step wait on anything remote? Read off tools, state and user if absent.
            max_result_chars: Of a longer tool result the agent reads the first ones and how many are missing.
            first_reply: call: the conversation's first reply calls a tool, by a grammar
                (`AgentConfig(constrain="strict")`).
            answer_schema: The JSON schema of replies in words, by a grammar, too.

        `tools`, `user`, `success` and `state` may be named as "module:function", which is how a YAML file
        gives them.
        """
        expect_that(is_whole(max_turns, 1), "max_turns", "be a whole number from 1 on", max_turns)
        rule = "be a list of scenarios or a JSONL file's path"
        expect_that(isinstance(scenarios, Iterable | Path), "scenarios", rule, scenarios, length=60)
        if not callable(user) and not isinstance(user, str | None):
            raise ConfigurationError(
                f"user must be a function, got {type(user).__name__}: give lambda scenario, seed: ..."
            )
        if not isinstance(system_prompt, str | None):
            raise ConfigurationError(f"system_prompt must be text, got {system_prompt!r:.60}")
        expect_that(isinstance(local, bool | None), "local", "be true, false or absent", local, length=60)
        rows = scenarios if isinstance(scenarios, list | tuple) else ()
        self._names_split = any(isinstance(row, Mapping) and row.get("split") for row in rows)
        self._scenarios = tuple(read_any_scenarios(scenarios, needs_opening=user in (None, default_user)))
        self._toolbox = RecordedToolbox(tools, scenarios=self._scenarios, max_result_chars=max_result_chars)
        self._toolbox.refuse_shared_objects()
        state = state if state is not None else self._toolbox.state_class
        self._state = None if state is None else StateMaker(state, self._toolbox.state_class)
        if state is None and self._toolbox.takes_state:  # before `success`, which would say less of it
            raise ConfigurationError(
                f"tool {self._toolbox.takes_state} asks for the conversation's state, and there is none: "
                "give state=..., a function that makes it (what the agent shall give needs another name)"
            )
        of_state = () if state is None else ("state",)
        cures = {"state": "give state=..., a function that makes it"} if state is None else {}
        self._make_user = NamedCall(
            "user",
            user or default_user,
            ("scenario", "seed", *of_state),
            positional=("scenario", "seed"),
            cures=cures,
        )
        self._success: NamedCall | None = None
        if success is not None:
            judged = ("scenario", "context", "messages", "replies", *of_state)
            self._success = NamedCall(
                "success", success, judged, positional=("scenario", "messages"), cures=cures
            )
        self._max_turns = max_turns
        expect_that(first_reply in ("any", "call"), "first_reply", "be any or call", first_reply)
        self._first_reply, self._answer_schema = first_reply, answer_schema
        self._one_reply = user is None or max_turns == 1
        self._system = () if system_prompt is None else (Message(role="system", content=system_prompt),)
        self.local = self._is_local() if local is None else local

    def scenarios(self, split: str) -> list[Scenario]:
        """The scenarios of one split; none where no scenario names it, for splits never stand in for
        one another."""
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    def hold_out(self, split: Split) -> None:
        """Take about a tenth of the scenarios, one at least, into `split`, where none names a split: by a
        hash of each, so that every run takes the same. A warning says how many.

        Nothing happens where a scenario names one, and where there is only one.
        """
        is_split = self._names_split or any(scenario.split != "train" for scenario in self._scenarios)
        if is_split or len(self._scenarios) < 2:
            return
        self._scenarios = tuple(with_drawn_split(self._scenarios, split))
        ids = [scenario.id for scenario in self._scenarios if scenario.split == split]
        _log.warning(
            f"no scenario names a split: {len(ids)} of {len(self._scenarios)} are held out as {split}, "
            f"drawn by a hash of each ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}); "
            "give scenarios a `split` to choose"
        )

    def may_judge(self, scenario: Scenario) -> bool:
        """Might a conversation of this scenario get a verdict? None does without `success` and a goal."""
        if self._success is not None or type(self).start is not ConversationEnvironment.start:
            return True
        return self._make_user.function is not default_user or bool(scenario.context.get("expected_facts"))

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Open a conversation; raises EnvironmentFailure when its user breaks or has nothing to say."""
        state = None if self._state is None else await self._state.make(scenario, seed)
        try:
            arguments = {"scenario": scenario, "seed": seed, "state": state}
            user = _checked(await guarded("user", self._make_user.call(arguments)))
            if self.local and not _is_local(user):
                raise ConfigurationError(
                    f"the user of scenario {scenario.id} is not local, others are: give local=False"
                )
            if not scenario.opening:
                opening = await _reply(user, self._system, state)
                if opening is None:
                    raise EnvironmentFailure(
                        f"the user of scenario {scenario.id} left without opening: give it an `opening`"
                    )
                first = (*self._system, Message(role="user", content=opening))
            else:
                first = scenario.messages(self._system)
        except BaseException:
            await close_state(state)
            raise
        return _ScenarioConversation(
            scenario=scenario,
            user=user,
            opening=first,
            toolbox=self._toolbox,
            success=self._success,
            state=state,
            turns_left=self._max_turns,
            one_reply=self._one_reply,
            must_call=self._first_reply == "call",
            answer_schema=self._answer_schema,
        )

    def _is_local(self) -> bool:
        if not self._toolbox.local or inspect.iscoroutinefunction(self._make_user.function):
            return False
        if self._state is not None and not self._state.local:
            return False
        scenario = self._scenarios[0]
        state: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._state is not None and "state" in self._make_user.wanted:
            state = self._state.preview(scenario, 0)
        try:
            with state as made_state:
                args, kwargs = self._make_user.bound({"scenario": scenario, "seed": 0, "state": made_state})
                return _is_local(_checked(self._make_user.function(*args, **kwargs)))
        except (*PROGRAMMING_ERRORS, StatesetError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"no user could be made for scenario {scenario.id}: {format_error(error)}"
            ) from error


@dataclass(kw_only=True, eq=False)
class _ScenarioConversation:
    opening: tuple[Message, ...]
    scenario: Scenario
    user: User
    toolbox: RecordedToolbox
    success: NamedCall | None
    state: Any
    turns_left: int
    one_reply: bool
    must_call: bool = False
    """True where the next reply must call a tool."""
    answer_schema: Mapping[str, Any] | None = None

    @property
    def reply_limits(self) -> ReplyLimits:
        choice = "required" if self.must_call else "auto"
        return ReplyLimits(tool_choice=choice, answer_schema=self.answer_schema)

    def __post_init__(self) -> None:
        self.tools: Sequence[Mapping[str, Any]] = self.toolbox.offered(self.scenario)
        self.messages = self.opening

    async def step(self, reply: Message) -> Observation:
        self.messages += (reply,)
        self.turns_left -= 1
        self.must_call = False
        if reply.tool_calls:
            calls = self.toolbox.call_all(reply.tool_calls, scenario=self.scenario, state=self.state)
            answers = tuple(await calls)
        else:
            words = await self._user_words()
            if words is None:
                return Observation(terminated=True)
            answers = (Message(role="user", content=words),)
        self.messages += answers
        return Observation(messages=answers, truncated=self.turns_left == 0)

    async def _user_words(self) -> str | None:
        """The user's next words; None where one reply is all: then it only hears, if it is the judge."""
        if self.one_reply and (self.success is not None or not hasattr(self.user, "satisfied")):
            return None
        words = await _reply(self.user, self.messages, self.state)
        return None if self.one_reply else words

    async def outcome(self) -> Outcome:
        judged = await self._judged()
        if isinstance(judged, Outcome):
            return judged
        return Outcome(reward=None if judged is None else float(judged), success=judged)

    async def _judged(self) -> bool | Outcome | None:
        if self.success is None:
            return getattr(self.user, "satisfied", None)
        arguments = {
            "scenario": self.scenario,
            "context": self.scenario.context,
            "messages": self.messages,
            "replies": tuple(
                message for message in self.messages[len(self.opening) :] if message.role == "assistant"
            ),
            "state": self.state,
        }
        success = await guarded("success", self.success.call(arguments))
        if isinstance(success, Outcome) or success is None:
            return success
        if success not in (True, False):
            raise ConfigurationError(
                f"success must return True, False or None, got {success!r:.60} (or a whole Outcome)"
            )
        return bool(success)

    def fork(self) -> Conversation:
        twin = copy.copy(self)
        if self.state is None:
            twin.user = self.user.fork()
            return twin
        twin.state = copy_state(self.state)
        names = wanted_arguments(f"{type(self.user).__name__}.fork", self.user.fork, ("state",))
        twin.user = self.user.fork(**dict.fromkeys(names, twin.state))
        if _keeps(twin.user, self.state):
            raise ConfigurationError(
                f"the user of scenario {self.scenario.id} keeps the state, so that its copy would look at "
                "another conversation's: ask for it where it is used, in goal(messages, state) or "
                "reply(messages, state), or take the copy's in fork(state)"
            )
        return twin

    async def close(self) -> None:
        await close_state(self.state)


def _keeps(user: User, state: Any) -> bool:
    """True if the user, or a function that it holds, holds on to this state."""
    for value in vars(user).values() if hasattr(user, "__dict__") else ():
        if value is state or any(item is state for item in _closed_over(getattr(value, "function", value))):
            return True
    return False


def _closed_over(function: object) -> Iterator[object]:
    """The values that a function's closure holds; a cell may be empty, as after `del`."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _checked(user: Any) -> User:
    if not callable(getattr(user, "reply", None)):
        raise ConfigurationError(
            "user(scenario, seed) must make an object with reply(messages), such as a ScriptedUser, got "
            f"{user!r:.60}"
        )
    valid_user: User = user
    return valid_user


def _is_local(user: User) -> bool:
    """A user that says nothing about it counts as remote."""
    return bool(getattr(user, "local", False))


async def _reply(user: User, messages: Sequence[Message], state: Any) -> str | None:
    names = ("messages",) if state is None else ("messages", "state")
    reply = NamedCall(f"{type(user).__name__}.reply", user.reply, names, positional=("messages",))
    words = await guarded("user", reply.call({"messages": messages, "state": state}))
    if words is not None and not isinstance(words, str):
        raise ConfigurationError(f"{type(user).__name__}.reply must return text or None, got {words!r:.60}")
    return words
