"""tau2's own world of one conversation: its tools on a fresh database, and what was changed in it."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any, Literal

from stateset_agents.environments.tau2.library import DomainName, library, prompt_texts

# Tables that are copied row by row: a fresh database for the price of a few rows


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
        """Untouched rows are the shared ones, as in `items`."""
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


Requestor = Literal["assistant", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool call."""

    content: str
    failed: bool
    """tau2 calls it an error: the tool is unknown, or refused its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The data that all conversations of a domain share; nobody may change it."""

    name: DomainName
    solo: bool
    """The agent has the phone's tools, too, and nobody to talk to."""
    policy: str
    tools: Sequence[Mapping[str, Any]]
    """Schemas of the agent's tools, in OpenAI's shape, as tau2 makes them."""
    phone_tools: Sequence[Mapping[str, Any]]
    """Schemas of the user's tools; none outside of telecom, and none in solo."""
    writes: frozenset[str]
    """Names of the tools that change a database, the phone's among them."""
    environment: Any
    """tau2's, on the database as it is at the start of every conversation."""

    def open(self, task: Any) -> World:
        """A fresh world in which the task's initial actions were done."""
        shared = self.environment.tools.db
        if self.name == "telecom":
            phone = copy.deepcopy(self.environment.user_tools.db)
            environment = _telecom(self, copy.deepcopy(shared), phone)
        else:
            tables = {name: CopiedRows(getattr(shared, name)) for name in type(shared).model_fields}
            environment = _shop(self, type(shared).model_construct(**tables))
        world = World(domain=self, environment=environment)
        state = task.initial_state
        if state is not None:
            world.environment.set_state(
                initialization_data=state.initialization_data,
                initialization_actions=state.initialization_actions,
                message_history=[],
            )
        return world


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """The databases of one conversation, behind tau2's own tools. What is frozen is which; not their rows."""

    domain: Domain
    environment: Any
    """tau2's."""

    def call(self, name: str, arguments: Mapping[str, Any], requestor: Requestor = "assistant") -> ToolResult:
        """Make a call as tau2's orchestrator does: what goes wrong is told in the result."""
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
            environment = _telecom(self.domain, copy.deepcopy(database), phone)
        else:
            tables = {name: rows.fork() for name, rows in vars(database).items()}
            environment = _shop(self.domain, type(database).model_construct(**tables))
        return World(domain=self.domain, environment=environment)


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
"""The tool with which a solo agent ends, as tau2's has it."""


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
            random_id, bill.bill_id = bill.bill_id, f"B{before + 1:08d}"
            customer = tools.get_customer_by_id(customer_id)
            customer.bill_ids = [bill.bill_id if id == random_id else id for id in customer.bill_ids]

    tools._apply_one_time_charge = charge_with_number


# Prompts

STOP = "###STOP###"
"""The text with which tau2's users leave."""


def full_prompt(domain: Domain) -> str:
    """tau2's words around the domain's policy; a solo agent's ticket comes as the user's message instead."""
    texts = prompt_texts("agent/llm_agent.py")
    instruction = texts["AGENT_INSTRUCTION"]
    if domain.solo:
        instruction = texts["AGENT_SOLO_INSTRUCTION"].format(stop_function_name="done", stop_token=STOP)
    return texts["SYSTEM_PROMPT"].format(agent_instruction=instruction, domain_policy=domain.policy)


def short_prompt(domain: Domain, tools: Sequence[Mapping[str, Any]]) -> str:
    """One line, and the names of `tools` with their arguments."""
    end = "end with done()" if domain.solo else "say what was done, or why not"
    line = f"{domain.name} desk. call a tool, then {end}."
    functions = [tool["function"] for tool in tools]
    names = [f"{f['name']}({', '.join(f['parameters'].get('properties', {}))})" for f in functions]
    return "\n".join([line, *names])


def brief_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema cut to the first sentence of what the tool does and the types of its arguments; a third of the
    tokens."""
    function = tool["function"]
    parameters = function["parameters"]
    types = {
        name: {key: value for key, value in argument.items() if key in ("type", "items", "anyOf", "enum")}
        for name, argument in parameters.get("properties", {}).items()
    }
    brief = {
        "name": function["name"],
        "description": re.split(r"(?<=\.)\s", function["description"], maxsplit=1)[0],
        "parameters": {
            "type": "object",
            "properties": types,
            "required": list(parameters.get("required", ())),
        },
    }
    return {"type": "function", "function": brief}


# The record of a conversation, which a verdict reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Words, to the other one."""

    speaker: Requestor
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool that was called, and its whole result."""

    requestor: Requestor
    name: str
    arguments: Mapping[str, Any]
    result: ToolResult


Event = Said | Called
