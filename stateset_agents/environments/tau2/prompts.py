"""What stands in front of a conversation: tau2's own prompt with the whole policy, or a short one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.environments.tau2.library import prompt_texts
from stateset_agents.environments.tau2.world import Domain

STOP = "###STOP###"
"""With which tau2's users leave."""
_AGENT = "agent/llm_agent.py"


def full_prompt(domain: Domain) -> str:
    """tau2's words around the domain's policy; a solo agent's ticket comes as the user's message instead."""
    texts = prompt_texts(_AGENT)
    if not domain.solo:
        return texts["SYSTEM_PROMPT"].format(
            agent_instruction=texts["AGENT_INSTRUCTION"], domain_policy=domain.policy
        )
    instruction = texts["AGENT_SOLO_INSTRUCTION"].format(stop_function_name="done", stop_token=STOP)
    return texts["SYSTEM_PROMPT"].format(agent_instruction=instruction, domain_policy=domain.policy)


def short_prompt(domain: Domain, tools: Sequence[Mapping[str, Any]]) -> str:
    """One line, and the names of `tools` with their arguments."""
    end = "end with done()" if domain.solo else "say what was done, or why not"
    line = f"{domain.name} desk. call a tool, then {end}."
    return "\n".join([line, *map(_signature, tools)])


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


def _signature(tool: Mapping[str, Any]) -> str:
    function = tool["function"]
    return f"{function['name']}({', '.join(function['parameters'].get('properties', {}))})"
