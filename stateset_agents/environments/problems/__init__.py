"""Problems with one right answer: a question, one reply, a verdict. No user, no tools."""

from stateset_agents.environments.problems.arithmetic import (
    ArithmeticProblems,
    CountdownProblems,
    EquationProblems,
)
from stateset_agents.environments.problems.coding import CodingProblems
from stateset_agents.environments.problems.environment import ProblemEnvironment
from stateset_agents.environments.problems.files import ProblemFiles
from stateset_agents.environments.problems.pictures import PictureProblems
from stateset_agents.environments.problems.procedural import ReasoningGymProblems

__all__ = [
    "ArithmeticProblems",
    "CodingProblems",
    "CountdownProblems",
    "EquationProblems",
    "PictureProblems",
    "ProblemEnvironment",
    "ProblemFiles",
    "ReasoningGymProblems",
]
