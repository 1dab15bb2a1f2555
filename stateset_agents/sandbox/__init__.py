"""Programs that nobody has read run here. They make claims about values; whoever asked compares them.

from stateset_agents.sandbox import Job, Sandbox
"""

from stateset_agents.sandbox.claims import Claims
from stateset_agents.sandbox.job import Job, Limits
from stateset_agents.sandbox.levels import Machine, what_is_there
from stateset_agents.sandbox.sandbox import Sandbox
from stateset_agents.types.errors import SandboxFailure

__all__ = ["Claims", "Job", "Limits", "Machine", "Sandbox", "SandboxFailure", "what_is_there"]
