"""The error kinds, one per boundary, explained once.

A boundary is where something outside the arithmetic can go wrong:

    ConfigurationError  the user's settings, files or templates cannot work as given
    EnvironmentFailure  an environment, a simulated user or a tool broke
    RewardFailure       a reward function broke or returned something that is no score
    SandboxFailure      the sandbox broke, not the program in it
    BackendError        generation or weight loading broke
    CheckpointError     a checkpoint is torn, altered, or of another run
    JournalError        a deployment's journal is damaged, altered, or of another version
    TrainingStopped     training can't go on (everything fails, numbers are not finite)

Every message is one line that names the value and the fix. What the *agent* causes (a malformed tool call, a
context overflow) is no error: it is scored, since otherwise causing an error would pay. Programming errors in
user code (`PROGRAMMING_ERRORS`) are always raised to the caller.
"""

from __future__ import annotations


class StatesetError(Exception):
    """Base of the errors that this package raises on purpose."""


class ConfigurationError(StatesetError, ValueError):
    """Settings, data files or templates that cannot work as given."""


class ContextLengthExceeded(ConfigurationError):
    """A conversation that leaves no room in the model's context."""


class ConversationRefused(ConfigurationError):
    """A conversation that the chat template does not render: two user messages in a row, say."""


class BudgetExceeded(ConfigurationError):
    """The limit of an endpoint's calls or tokens is reached. It ends the run or evaluation, and is no failed
    conversation, so that whoever set the limit sees it."""


class EnvironmentFailure(StatesetError):
    """An environment, a simulated user or a tool failed; its conversation fails, the others of the group do
    not."""


class EnvironmentTimeout(EnvironmentFailure):
    """An environment, a simulated user or a tool took longer than its time limit."""


class RewardFailure(StatesetError):
    """A reward function failed; the trajectory stays unscored: it is not trained on and in no baseline."""


class RewardTimeout(RewardFailure):
    """A reward function took longer than `reward_timeout`."""


class SandboxFailure(StatesetError):
    """A sandbox could not run a program, or the machine ended it; nothing is known about the program."""


class BackendError(StatesetError):
    """Generation, scoring or a weight update failed."""


class CheckpointError(StatesetError):
    """A checkpoint is truncated, altered, or belongs to other settings."""


class JournalError(StatesetError):
    """A deployment's journal is damaged, altered, or cannot be written."""


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
