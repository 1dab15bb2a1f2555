"""The documented path of advantages by parts, which stand beside the others."""

from stateset_agents.algorithms.advantages import decoupled_advantages as decoupled_advantages
from stateset_agents.algorithms.advantages import summed_advantages as summed_advantages
