"""A small order desk on SQLite, with tools, a rule-based caller and gated grading."""

from stateset_agents.environments.retail_desk.agents import DEGENERATE, HonestAgent, ScriptedEpisode, play
from stateset_agents.environments.retail_desk.environment import DeskConversation, RetailDesk
from stateset_agents.environments.retail_desk.full.policy import FAMILIES as FULL_FAMILIES
from stateset_agents.environments.retail_desk.policy import FAMILIES

__all__ = [
    "DEGENERATE",
    "FAMILIES",
    "FULL_FAMILIES",
    "DeskConversation",
    "HonestAgent",
    "RetailDesk",
    "ScriptedEpisode",
    "play",
]
