"""The error kinds, one per boundary, explained once.

A boundary is where something outside the arithmetic can go wrong:

    ConfigurationError  the user's settings, files or templates cannot work as given
    EnvironmentFailure  an environment, a simulated user or a tool broke
    RewardFailure       a reward function broke or returned something that is no score
    BackendError        generation or weight loading broke
    CheckpointError     a checkpoint is torn, altered, or of another run
    TrainingStopped     training can't go on (everything fails, numbers are not finite)

Every message is one line that names the value and the mend. What the *agent* causes (a malformed
tool call, a context overflow) is no error: it is scored, or crashing would pay. Programming errors
in user code (`PROGRAMMING_ERRORS`) always travel to the caller.
"""

from __future__ import annotations

__all__ = [
    "PROGRAMMING_ERRORS",
    "BackendError",
    "BudgetExceeded",
    "CheckpointError",
    "ConfigurationError",
    "ContextLengthExceeded",
    "EnvironmentFailure",
    "EnvironmentTimeout",
    "RewardFailure",
    "RewardTimeout",
    "StatesetError",
    "TrainingStopped",
]


class StatesetError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(StatesetError, ValueError):
    """Settings, data files or templates that cannot work as given."""


class ContextLengthExceeded(ConfigurationError):
    """A conversation that leaves no room in the model's context."""


class BudgetExceeded(ConfigurationError):
    """The calls or tokens that an endpoint may be asked for are used up. Whoever set that limit must hear of
    it: it ends what is going on, and is no failed conversation."""


class EnvironmentFailure(StatesetError):
    """An environment, a simulated user or a tool broke; the conversation fails, its siblings go on."""


class EnvironmentTimeout(EnvironmentFailure):
    """An environment, a simulated user or a tool took longer than its time limit."""


class RewardFailure(StatesetError):
    """A reward function broke; the trajectory stays unscored and neither trains nor moves a baseline."""


class RewardTimeout(RewardFailure):
    """A reward function took longer than `reward_timeout`."""


class BackendError(StatesetError):
    """Generation, scoring or a weight update failed."""


class CheckpointError(StatesetError):
    """A checkpoint is truncated, altered, or belongs to other settings."""


class TrainingStopped(StatesetError):
    """Training cannot go on; the last checkpoint is kept."""


PROGRAMMING_ERRORS = (
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    AssertionError,
)
"""Mistakes in code, not events of a run: never counted as a failed conversation, always raised."""
