"""tau2-bench as an environment: its tasks, tools, policies and verdicts, with users of the project's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.environments.tau2.agents import Idle, Oracle, TransferAtOnce
from stateset_agents.environments.tau2.conversation import Tau2Conversation
from stateset_agents.environments.tau2.library import DomainName
from stateset_agents.environments.tau2.made_tasks import MADE_TOOLS, made_tasks
from stateset_agents.environments.tau2.prompts import brief_schema, full_prompt, short_prompt
from stateset_agents.environments.tau2.tasks import TaskEntry, official_tasks, tasks_of_file
from stateset_agents.environments.tau2.tau2_verdict import Tau2Verdict
from stateset_agents.environments.tau2.users.customer import Customer, CustomerFactory
from stateset_agents.environments.tau2.users.model_customer import ModelCustomer
from stateset_agents.environments.tau2.users.scripted_customer import ScriptedCustomer
from stateset_agents.environments.tau2.verdict import FastVerdict, Judge
from stateset_agents.environments.tau2.world import load_domain
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """Of what is not set."""

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
            eager: Does the scripted user tell all it knows at once? For made tasks it does unless set.
            verdict: `fast`, or `tau2`: by tau2's own evaluators, the same and much slower.
            max_turns: Most replies of the agent (60, of made tasks 6); a conversation that gets there is cut,
                and worth 0.
            max_result_chars: Of a longer tool result the agent reads the first ones (10,000, of made tasks
                150).
            num_validation: How many of the official tasks to train on are held back for validation (0).
            num_train: Made tasks to train on (600).
            seed: Of the made tasks to train on.

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
        known = self._by_id.get(scenario.id)
        if known is None:
            raise ConfigurationError(
                f"{scenario.id!r} is no task of this environment: take one of environment.scenarios(split)"
            )
        return known

    def _customer_factory(self, user: Any) -> CustomerFactory:
        if user == "scripted":
            return partial(_scripted, eager=self._eager)
        if isinstance(user, Mapping):
            if not {"url", "model"} <= user.keys():
                raise ConfigurationError(
                    f"a model's user needs url and model, got {', '.join(map(str, user)) or 'nothing'}"
                )
            user = ChatClient(**user)
        if isinstance(user, ChatClient):
            return partial(_of_model, client=user, has_phone=bool(self._domain.phone_tools))
        if callable(user):
            made: CustomerFactory = user
            return made
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
                    f"tools must be all, none or names, got {name!r:.60}, which {self._domain.name} has not"
                    f"{nearest(str(name), schemas)}"
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
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be at least 1, got {value!r:.60}")
    return value


def _scripted(user_scenario: Any, seed: int, *, eager: bool) -> Customer:
    return ScriptedCustomer(user_scenario, seed, eager=eager)


def _of_model(user_scenario: Any, seed: int, *, client: ChatClient, has_phone: bool) -> Customer:
    return ModelCustomer(client, user_scenario, has_phone=has_phone)
