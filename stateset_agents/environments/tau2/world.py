"""tau2's own world of one conversation: its tools on a fresh database, and what was changed in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stateset_agents.environments.tau2.library import DomainName, library
from stateset_agents.environments.tau2.tables import CopiedRows, row_text

Requestor = Literal["assistant", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool said."""

    content: str
    failed: bool
    """tau2 calls it an error: the tool is unknown, or refused its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What all conversations of a domain share; nobody may change it."""

    name: DomainName
    solo: bool
    """The agent has the phone's tools, too, and nobody to talk to."""
    policy: str
    tools: Sequence[Mapping[str, Any]]
    """Schemas of the agent's tools, in OpenAI's shape, as tau2 makes them."""
    phone_tools: Sequence[Mapping[str, Any]]
    """Those of the user's; none outside of telecom, and none in solo."""
    writes: frozenset[str]
    """Names of the tools that change a database, the phone's among them."""
    environment: Any
    """tau2's, on the database as it is at the start of every conversation."""

    def open(self, task: Any) -> World:
        """A fresh world in which the task's initial actions were done."""
        world = World(domain=self, environment=self._fresh())
        state = task.initial_state
        if state is not None:
            world.environment.set_state(
                initialization_data=state.initialization_data,
                initialization_actions=state.initialization_actions,
                message_history=[],
            )
        return world

    def _fresh(self) -> Any:
        shared = self.environment.tools.db
        if self.name == "telecom":
            return _telecom(self, copy.deepcopy(shared), copy.deepcopy(self.environment.user_tools.db))
        tables = {name: CopiedRows(getattr(shared, name)) for name in type(shared).model_fields}
        return _shop(self, type(shared).model_construct(**tables))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The databases of one conversation, behind tau2's own tools. What is frozen is which; not their rows."""

    domain: Domain
    environment: Any
    """tau2's."""

    def call(self, name: str, arguments: Mapping[str, Any], requestor: Requestor = "assistant") -> ToolResult:
        """As tau2's orchestrator makes a call: what goes wrong is told in the result."""
        call = library().messages.ToolCall(
            name=name, arguments=copy.deepcopy(dict(arguments)), requestor=requestor
        )
        answer = self.environment.get_response(call)
        return ToolResult(content=answer.content or "", failed=answer.error)

    def changes(self) -> Mapping[str, Mapping[str, str]]:
        """Table -> row -> its text, where it is not as at the start; of telecom, both databases whole."""
        if self.domain.name == "telecom":
            kits = {"agent": self.environment.tools, "user": self.environment.user_tools}
            return {name: {"": row_text(kit.db)} for name, kit in kits.items()}
        tables = vars(self.environment.tools.db)
        changed = {name: rows.changes() for name, rows in tables.items() if isinstance(rows, CopiedRows)}
        return {name: rows for name, rows in changed.items() if rows}

    def fork(self) -> World:
        """A copy that goes on from the same state."""
        database = self.environment.tools.db
        if self.domain.name == "telecom":
            phone = copy.deepcopy(self.environment.user_tools.db)
            return World(
                domain=self.domain, environment=_telecom(self.domain, copy.deepcopy(database), phone)
            )
        tables = {name: rows.fork() for name, rows in vars(database).items()}
        return World(
            domain=self.domain, environment=_shop(self.domain, type(database).model_construct(**tables))
        )


@functools.cache
def load_domain(name: DomainName, solo: bool = False) -> Domain:
    """Read it once for all; a tenth of a second for retail, a third for airline."""
    environment = plain_environment(name, solo)
    kits = [kit for kit in (environment.tools, environment.user_tools) if kit is not None]
    write = library().toolkit.ToolType.WRITE
    tools = [tool.openai_schema for tool in environment.get_tools()]
    phone = [] if environment.user_tools is None else [t.openai_schema for t in environment.get_user_tools()]
    return Domain(
        name=name,
        solo=solo,
        policy=environment.get_policy(),
        tools=[*tools, *phone, _DONE] if solo else tools,
        phone_tools=[] if solo else phone,
        writes=frozenset(tool for kit in kits for tool in kit.tools if kit.tool_type(tool) == write),
        environment=environment,
    )


_DONE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "done",
        "description": "Call this function when you are done with the task.",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""With which a solo agent ends, as tau2's has it."""


def plain_environment(name: DomainName, solo: bool = False) -> Any:
    """tau2's environment on the whole database, read from its file; what tau2's own evaluator works on."""
    environment = library().domains[name].get_environment(**({"solo_mode": True} if solo else {}))
    if name == "telecom":
        _steady_bills(environment.tools)
    return environment


def _shop(domain: Domain, database: Any) -> Any:
    shared = domain.environment
    return type(shared)(
        domain_name=shared.domain_name, policy=shared.policy, tools=type(shared.tools)(database)
    )


def _telecom(domain: Domain, database: Any, phone: Any) -> Any:
    shared = domain.environment
    environment = type(shared)(
        domain_name=shared.domain_name,
        policy=shared.policy,
        tools=type(shared.tools)(database),
        user_tools=type(shared.user_tools)(phone),
    )
    environment.solo_mode = domain.solo  # `set_solo_mode` would make every schema anew, 20 ms
    _steady_bills(environment.tools)
    return environment


def _steady_bills(tools: Any) -> None:
    """Give a bill that telecom's tools open the next number; tau2 draws it at random, so that the same talk
    would not show the same twice, and tau2's own evaluator would not find what the agent was shown."""
    charge = type(tools)._apply_one_time_charge

    def charge_with_number(customer_id: str, amount: float, description: str) -> None:
        before = len(tools.db.bills)
        charge(tools, customer_id, amount, description)
        for bill in tools.db.bills[before:]:
            drawn, bill.bill_id = bill.bill_id, f"B{before + 1:08d}"
            customer = tools.get_customer_by_id(customer_id)
            customer.bill_ids = [bill.bill_id if id == drawn else id for id in customer.bill_ids]

    tools._apply_one_time_charge = charge_with_number
