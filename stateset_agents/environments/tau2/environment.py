"""tau2-bench as an environment: its tasks, tools, policies and verdicts, with users of the project's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.core.environment import Observation
from stateset_agents.core.tools import bounded
from stateset_agents.environments.tau2.agents import Idle, Oracle, TransferAtOnce
from stateset_agents.environments.tau2.library import DomainName
from stateset_agents.environments.tau2.tasks import (
    MADE_TOOLS,
    TaskEntry,
    made_tasks,
    official_tasks,
    tasks_of_file,
)
from stateset_agents.environments.tau2.users import (
    Customer,
    CustomerFactory,
    ModelCustomer,
    Phone,
    ScriptedCustomer,
)
from stateset_agents.environments.tau2.verdict import FastVerdict, Judge, Tau2Verdict
from stateset_agents.environments.tau2.world import (
    STOP,
    Called,
    Event,
    Said,
    World,
    brief_schema,
    full_prompt,
    load_domain,
    short_prompt,
)
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import expect_that, is_whole, nearest
from stateset_agents.types.trajectory import Outcome

# Conversations: calls go to tau2's tools, words to the user

MAX_ERRORS = 10
"""Failed calls after which a conversation is cut, as tau2 cuts it (`DEFAULT_MAX_ERRORS`)."""


@dataclass(slots=True, kw_only=True, eq=False)
class Tau2Conversation:
    """The conversation of a task; without a customer it is a solo agent's."""

    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    entry: TaskEntry
    world: World
    customer: Customer | None
    judge: Judge
    turns_left: int
    max_result_chars: int
    events: list[Event] = field(default_factory=list)
    """All that was said and called so far, results whole."""
    num_errors: int = 0
    ended: str = ""
    """Why it ended: `own end`, `max_turns`, `max_errors`, or `words in solo`; empty while it goes on."""

    async def step(self, reply: Message) -> Observation:
        """Run the reply's calls, or else let the user answer its words; words beside calls nobody hears."""
        if self.ended:
            raise ConfigurationError("this tau2 conversation is over: start a new one")
        self.turns_left -= 1
        if reply.tool_calls:
            answers = self._called(reply.tool_calls)
        elif self.customer is None:
            self.ended = "own end" if STOP in reply.content else "words in solo"
            answers = ()
        else:
            answers = await self._answered(self.customer, reply.content)
        is_over = bool(self.ended)
        if not is_over and self.num_errors >= MAX_ERRORS:
            self.ended = "max_errors"
        elif not is_over and self.turns_left <= 0:
            self.ended = "max_turns"
        return Observation(messages=answers, terminated=is_over, truncated=not is_over and bool(self.ended))

    def _called(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        if self.customer is None and any(call.name == "done" and call.error is None for call in calls):
            self.ended = "own end"  # and no other call of this reply is made, as with tau2
            return ()
        return tuple(map(self._run, calls))

    def _run(self, call: ToolCall) -> Message:
        """Make one call; what is no call, or would never come back, is not made and not written down."""
        if call.error is not None or _would_hang(call):
            self.num_errors += 1
            content = f"Error: {call.error or 'powers cannot be calculated'}"
        else:
            result = self.world.call(call.name, call.arguments)
            self.events.append(
                Called(requestor="assistant", name=call.name, arguments=dict(call.arguments), result=result)
            )
            self.num_errors += result.failed
            content = bounded(result.content, self.max_result_chars)
        return Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)

    async def _answered(self, customer: Customer, text: str) -> tuple[Message, ...]:
        self.events.append(Said(speaker="assistant", text=text))
        phone = Phone(tools=self.world.domain.phone_tools, world=self.world, events=self.events)
        words = await customer.answer(text, phone)
        self.events.append(Said(speaker="user", text=STOP if words is None else words))
        if words is None:
            self.ended = "own end"
            return ()
        return (Message(role="user", content=words),)

    async def outcome(self) -> Outcome:
        """tau2's verdict; a conversation that did not come to its own end is worth 0, as with tau2."""
        changed = tuple(
            {"table": table, "row": row}
            for table, rows in self.world.changes().items()
            for row in rows
            if row
        )
        counts = {"ended": self.ended or "not yet", "num_errors": self.num_errors}
        if self.ended in ("max_turns", "max_errors", "words in solo"):
            return Outcome(reward=0.0, success=False, changes=changed, metadata=counts)
        arguments = (self.entry, self.world, self.events)
        verdict = await in_thread(self.judge, *arguments) if self.judge.is_slow else self.judge(*arguments)
        return Outcome(
            reward=verdict.reward,
            success=verdict.reward == 1.0,
            changes=changed,
            metadata={**counts, "parts": dict(verdict.parts)},
        )

    def fork(self) -> Tau2Conversation:
        """An independent copy that goes on from the same state."""
        return replace(
            self,
            world=self.world.fork(),
            customer=None if self.customer is None else self.customer.fork(),
            events=list(self.events),
        )

    async def close(self) -> None:
        """Nothing is held."""


def _would_hang(call: ToolCall) -> bool:
    """tau2's calculator evaluates its expression, and 9**9**9**9 would take for ever."""
    return call.name == "calculate" and "**" in str(call.arguments.get("expression", "")).replace(" ", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """Values of settings that are not set."""

    prompt: str
    tools: str
    eager: bool
    max_turns: int
    max_result_chars: int


_OFFICIAL = _Defaults(prompt="full", tools="all", eager=False, max_turns=60, max_result_chars=10_000)
_MADE = _Defaults(prompt="short", tools="made", eager=True, max_turns=6, max_result_chars=150)
_JUDGES: Mapping[str, Any] = {"fast": FastVerdict, "tau2": Tau2Verdict}


class Tau2Environment:
    """Service desks of tau2-bench (https://github.com/sierra-research/tau2-bench): airline, retail, telecom.

        Tau2Environment("retail", user="scripted")

    Every conversation is on a fresh database, behind tau2's own tools, and is worth 1 or 0 by tau2's rules.
    Scenarios are tau2's tasks in their official splits; there is no validation split unless `num_validation`
    cuts one from those to train on. A family is the kind of change that a task wants, or `no_write`.
    """

    floor_agents: Mapping[str, Any]
    """Name -> what makes a scripted agent that knows nothing: what it gets is the floor of every result."""

    def __init__(
        self,
        domain: DomainName = "retail",
        *,
        user: str | ChatClient | Mapping[str, Any] | CustomerFactory = "scripted",
        tasks: str | Path = "official",
        prompt: str | None = None,
        tools: str | Sequence[str] | None = None,
        eager: bool | None = None,
        verdict: Literal["fast", "tau2"] = "fast",
        max_turns: int | None = None,
        max_result_chars: int | None = None,
        num_validation: int | None = None,
        num_train: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            domain: airline, retail or telecom.
            user: `scripted`, which needs no model; `solo`, for telecom: nobody, the agent has a ticket and
                the phone itself; a `ChatClient`, or a mapping of its arguments, for a model that is told
                what tau2 tells its user simulator; or a function of `user_scenario` and `seed`.
            tasks: `official`; `made`, of one change each on retail's database (`made_tasks`); or a JSON file
                of tasks in tau2's format.
            prompt: `full` is tau2's own with the whole policy, `short` a line, and where no schemas are shown
                the tools' names and arguments; any other text stands as it is. Made tasks have the short one
                unless set, others the full one.
            tools: Which schemas the agent is shown: `all`, `none`, `made` (those that made tasks take, cut to
                a line each and the arguments' types; theirs unless set), or names. It may call any tool.
            eager: True for a scripted user that tells all it knows at once; for made tasks it does unless
                set.
            verdict: `fast`, or `tau2`: by tau2's own evaluators, the same and much slower.
            max_turns: Maximum replies of the agent (60, of made tasks 6); a conversation that gets there is
                cut, and worth 0.
            max_result_chars: Characters of a tool result that the agent reads (10,000, of made tasks 150).
            num_validation: Number of official training tasks that are held back for validation (0).
            num_train: Made tasks to train on (600).
            seed: Chooses the made tasks to train on.

        Raises ConfigurationError where the library is missing, for what does not fit, and for a task whose
        reward has parts that cannot be scored.
        """
        if domain not in get_args(DomainName):
            names = get_args(DomainName)
            raise ConfigurationError(
                f"domain must be one of {', '.join(names)}, got {domain!r:.60}{nearest(str(domain), names)}"
            )
        expect_that(verdict in _JUDGES, "verdict", "be fast or tau2", verdict, length=60)
        solo = user == "solo"
        if solo and domain != "telecom":
            raise ConfigurationError(f"user: solo is for telecom, {domain} has no tickets: take scripted")
        self._is_made = is_made = tasks == "made"
        defaults = _MADE if is_made else _OFFICIAL
        self._domain = load_domain(domain, solo)
        self._max_turns = _at_least_1("max_turns", defaults.max_turns if max_turns is None else max_turns)
        self._max_result_chars = _at_least_1(
            "max_result_chars", defaults.max_result_chars if max_result_chars is None else max_result_chars
        )
        self._eager = defaults.eager if eager is None else eager
        self._make_customer = None if solo else self._customer_factory(user)
        self._entries = self._tasks(tasks, num_validation, num_train, seed)
        self._by_id = {entry.scenario.id: entry for entry in self._entries}
        self._tools = self._shown(defaults.tools if tools is None else tools)
        self._prompt = self._prompt_text(defaults.prompt if prompt is None else prompt)
        self._judge: Judge = _JUDGES[verdict](self._domain)
        self.local = solo or user == "scripted"
        self.floor_agents = {
            "idle": partial(Idle, solo=solo),
            "transfer_at_once": partial(TransferAtOnce, solo=solo),
        }
        self.degenerate_agents = self.floor_agents

    def scenarios(self, split: str) -> list[Scenario]:
        """The tasks of a split, in tau2's order."""
        expect_split(split)
        return [entry.scenario for entry in self._entries if entry.scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> Tau2Conversation:
        """Open a conversation on a fresh database; the same scenario, seed and replies give the same talk."""
        entry = self._entry(scenario)
        customer: Customer | None = None
        if self._make_customer is None:
            opening = f"<ticket>\n{entry.task.ticket}\n</ticket>"
        else:
            customer = self._make_customer(user_scenario=entry.task.user_scenario, seed=seed)
            opening = await customer.opening()
        system = (Message(role="system", content=self._prompt),) if self._prompt else ()
        return Tau2Conversation(
            opening=(*system, Message(role="user", content=opening)),
            tools=self._tools,
            entry=entry,
            world=self._domain.open(entry.task),
            customer=customer,
            judge=self._judge,
            turns_left=self._max_turns,
            max_result_chars=self._max_result_chars,
        )

    def honest_agent(self, scenario: Scenario) -> Oracle:
        """A scripted agent that knows the scenario's gold actions: success 1.0 everywhere; for
        demonstrations, and for an audit to compare with."""
        return Oracle(self._domain, self._entry(scenario), asks_who=not self._eager)

    def _entry(self, scenario: Scenario) -> TaskEntry:
        entry = self._by_id.get(scenario.id)
        if entry is None:
            raise ConfigurationError(
                f"{scenario.id!r} is no task of this environment: take one of environment.scenarios(split)"
            )
        return entry

    def _customer_factory(self, user: Any) -> CustomerFactory:
        if user == "scripted":
            return partial(ScriptedCustomer, eager=self._eager)
        if isinstance(user, Mapping):
            if not {"url", "model"} <= user.keys():
                raise ConfigurationError(
                    f"a model's user needs url and model, got {', '.join(map(str, user)) or 'nothing'}"
                )
            user = ChatClient(**user)
        if isinstance(user, ChatClient):
            return partial(_of_model, client=user, has_phone=bool(self._domain.phone_tools))
        if callable(user):
            factory: CustomerFactory = user
            return factory
        raise ConfigurationError(
            f"user must be scripted, solo, a ChatClient or its arguments, or a function, got {user!r:.60}"
        )

    def _tasks(
        self, tasks: str | Path, num_validation: int | None, num_train: int | None, seed: int
    ) -> list[TaskEntry]:
        if num_validation is not None and tasks != "official":
            raise ConfigurationError("num_validation is for official tasks: leave it out")
        if num_train is not None and tasks != "made":
            raise ConfigurationError("num_train is for made tasks: leave it out, or write tasks: made")
        if tasks == "official":
            return official_tasks(self._domain, num_validation or 0)
        if tasks != "made":
            return tasks_of_file(self._domain, tasks)
        if self._domain.name != "retail":
            raise ConfigurationError(
                f"made tasks are of retail's database, got domain {self._domain.name}: write domain: retail"
            )
        return made_tasks(
            self._domain, 600 if num_train is None else _at_least_1("num_train", num_train), seed
        )

    def _shown(self, tools: str | Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """The schemas that the agent is shown."""
        schemas = {tool["function"]["name"]: tool for tool in self._domain.tools}
        if tools == "all":
            return list(schemas.values())
        if tools == "made" and self._domain.name == "retail":
            return [brief_schema(schemas[name]) for name in MADE_TOOLS]
        names = [] if tools == "none" else [tools] if isinstance(tools, str) else list(tools)
        for name in names:
            if name not in schemas:
                raise ConfigurationError(
                    f"tools must be all, none or names, got {name!r:.60}{nearest(str(name), schemas)}"
                )
        return [schemas[name] for name in names]

    def _prompt_text(self, prompt: str) -> str:
        if prompt == "full":
            return full_prompt(self._domain)
        if prompt != "short":
            return prompt
        unshown = () if self._tools else self._shown("made" if self._is_made else "all")
        return short_prompt(self._domain, unshown)


def _at_least_1(name: str, value: int) -> int:
    expect_that(is_whole(value, 1), name, "be at least 1", value, length=60)
    return value


def _of_model(user_scenario: Any, seed: int, *, client: ChatClient, has_phone: bool) -> Customer:
    return ModelCustomer(client, user_scenario, has_phone=has_phone)
