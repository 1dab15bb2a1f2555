"""tau2-bench as an environment: its tasks, tools, policies and verdicts, with users of the project's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.environments.tau2.agents import Idle, Oracle, TransferAtOnce
from stateset_agents.environments.tau2.conversation import Tau2Conversation
from stateset_agents.environments.tau2.customers import Customer, CustomerFactory
from stateset_agents.environments.tau2.library import DomainName
from stateset_agents.environments.tau2.prompts import full_prompt, short_prompt
from stateset_agents.environments.tau2.scripted_customer import ScriptedCustomer
from stateset_agents.environments.tau2.tasks import TaskEntry, official_tasks, tasks_of_file
from stateset_agents.environments.tau2.tau2_verdict import Tau2Verdict
from stateset_agents.environments.tau2.verdict import FastVerdict, Judge
from stateset_agents.environments.tau2.world import load_domain
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import nearest

__all__ = ["Tau2Environment"]

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
        num_validation: int = 0,
    ) -> None:
        """
        Args:
            domain: airline, retail or telecom.
            user: `scripted`, which needs no model; `solo`, for telecom: nobody, the agent has a ticket and
                the phone itself; a `ChatClient`, or a mapping of its arguments, for a model that is told
                what tau2 tells its user simulator; or a function of `user_scenario` and `seed`.
            tasks: `official`, or a JSON file of tasks in tau2's format.
            prompt: `full` is tau2's own with the whole policy, `short` a line with the tools' names; any
                other text stands as it is.
            tools: Which schemas the agent is shown: `all`, `none`, or names. It may call any tool.
            eager: Does the scripted user tell all it knows at once?
            verdict: `fast`, or `tau2`: by tau2's own evaluators, the same and much slower.
            max_turns: Most replies of the agent (60); a conversation that gets there is cut, and worth 0.
            max_result_chars: Of a longer tool result the agent reads the first ones (10,000).
            num_validation: How many of the tasks to train on are held back for validation.

        Raises ConfigurationError where the library is missing, for what does not fit, and for a task whose
        reward has parts that cannot be scored.
        """
        if domain not in get_args(DomainName):
            known = get_args(DomainName)
            raise ConfigurationError(
                f"domain must be one of {', '.join(known)}, got {domain!r:.60}{nearest(str(domain), known)}"
            )
        if verdict not in _JUDGES:
            raise ConfigurationError(f"verdict must be fast or tau2, got {verdict!r:.60}")
        solo = user == "solo"
        if solo and domain != "telecom":
            raise ConfigurationError(f"user: solo is for telecom, {domain} has no tickets: take scripted")
        self._domain = load_domain(domain, solo)
        self._max_turns = _at_least_1("max_turns", 60 if max_turns is None else max_turns)
        self._max_result_chars = _at_least_1(
            "max_result_chars", 10_000 if max_result_chars is None else max_result_chars
        )
        self._eager = bool(eager)
        self._make_customer = None if solo else _customer_factory(user, self._eager)
        self._entries = self._tasks(tasks, num_validation)
        self._by_id = {entry.scenario.id: entry for entry in self._entries}
        self._tools = self._shown(tools or "all")
        self._prompt = self._prompt_text(prompt or "full")
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
        known = self._by_id.get(scenario.id)
        if known is None:
            raise ConfigurationError(
                f"{scenario.id!r} is no task of this environment: take one of environment.scenarios(split)"
            )
        return known

    def _tasks(self, tasks: str | Path, num_validation: int) -> list[TaskEntry]:
        if tasks == "official":
            return official_tasks(self._domain, num_validation)
        if num_validation:
            raise ConfigurationError("num_validation is for official tasks; a task of a file has its split")
        return tasks_of_file(self._domain, tasks)

    def _shown(self, tools: str | Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """The schemas that the agent is shown."""
        schemas = {tool["function"]["name"]: tool for tool in self._domain.tools}
        if tools == "all":
            return list(schemas.values())
        names = [] if tools == "none" else [tools] if isinstance(tools, str) else list(tools)
        for name in names:
            if name not in schemas:
                raise ConfigurationError(
                    f"tools must be all, none or names, got {name!r:.60}, which {self._domain.name} has not"
                    f"{nearest(str(name), schemas)}"
                )
        return [schemas[name] for name in names]

    def _prompt_text(self, prompt: str) -> str:
        if prompt == "full":
            return full_prompt(self._domain)
        return short_prompt(self._domain, self._tools or self._domain.tools) if prompt == "short" else prompt


def _at_least_1(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be at least 1, got {value!r:.60}")
    return value


def _customer_factory(user: Any, eager: bool) -> CustomerFactory:
    if user == "scripted":
        return partial(ScriptedCustomer, eager=eager)
    if callable(user) and not isinstance(user, ChatClient):
        made: CustomerFactory = user
        return made
    raise ConfigurationError(
        f"user must be scripted, solo, a ChatClient or its arguments, or a function, got {user!r:.60}"
    )
