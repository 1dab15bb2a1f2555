"""A page of campaigns, small enough for a test."""

from __future__ import annotations

from functools import lru_cache

from stateset_agents.numeric.acquisition.campaign_page import Campaigns, by_policy, by_rule, campaigns
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.rules import RULES

__all__ = ["FAMILY", "small_campaigns"]

FAMILY = LinearFamily(num_variables=4, costs=(1.0, 4.0), budget=8.0)


@lru_cache(maxsize=1)
def small_campaigns() -> Campaigns:
    """Twelve tasks of two players."""
    players = {
        "EI per cost": by_rule(RULES["EI per cost"]),
        "policy": by_policy(AcquisitionPolicyNetwork(hidden=8)),
    }
    return campaigns(FAMILY, players, range(12), name="Small <campaigns>")
