"""The arguments of TRL's GRPOTrainer as an environment, a reward and settings: `from_trl`.

    ported = from_trl(reward_funcs=..., args=GRPOConfig(...), train_dataset=..., environment_factory=Shop)
    agent = MultiTurnAgent(AgentConfig(model_name=..., **ported.agent))
    trainer = MultiTurnGRPOTrainer(agent, ported.environment, ported.reward, ported.config)

Notation: G conversations of a group. Reward functions are called with a group, where TRL calls them with all
groups of a batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stateset_agents.core.environment import Conversation, Observation, copy_state
from stateset_agents.core.scoring.base import Result, RewardFunction, RewardResult
from stateset_agents.porting.grpo_config import PortedSettings, ported_settings
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.runtime.user_code import call_user_code, guarded
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.settings import require_trl
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from trl import GRPOConfig

_log = get_logger(__name__)
_NOT_TOOLS = ("reset", "get_reward")
_INSTANCE = "trl_environment"
"""Key in an outcome's metadata: the object whose methods were the conversation's tools."""
Functions = Callable[..., Any] | Sequence[Callable[..., Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """A GRPOTrainer's arguments as ours."""

    environment: TrlEnvironment
    reward: TrlReward
    config: TrainingConfig
    agent: Mapping[str, Any]
    """Arguments of `AgentConfig`, but for the model's name."""


def from_trl(
    *,
    args: GRPOConfig,
    reward_funcs: Functions = None,
    train_dataset: Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
) -> Ported:
    """The arguments as GRPOTrainer takes them; `eval_dataset` is the validation split.

    Raises ConfigurationError for what cannot be followed, see `ported_settings` and docs/bring-your-script.md.
    """
    environment = TrlEnvironment(
        train_dataset,
        eval_dataset=eval_dataset,
        tools=tools,
        environment_factory=environment_factory,
        max_tool_calling_iterations=args.max_tool_calling_iterations,
    )
    num_prompts = None if train_dataset is None else len(environment.scenarios("train"))
    settings: PortedSettings = ported_settings(args, num_prompts=num_prompts)
    reward = TrlReward(
        reward_funcs,
        reward_weights=args.reward_weights,
        environments=environment.scored_by,
        max_steps=settings.training.num_steps() * args.num_iterations,
        num_iterations=args.num_iterations,
    )
    return Ported(environment=environment, reward=reward, config=settings.training, agent=settings.agent)


class TrlReward(RewardFunction):
    """TRL's reward functions, each times its weight; those that say None of a conversation are left out of
    its sum, and one of which all do is unscored.

    They are called as TRL calls them: `prompts`, `completions`, `completion_ids`, the dataset's columns,
    `trainer_state`, `log_extra`, `log_metric`, and `environments` where there are some. Prompts and
    completions are lists of messages where the dataset's prompts are, else texts.
    """

    scope = "group"

    def __init__(
        self,
        reward_funcs: Functions,
        *,
        reward_weights: Sequence[float] | None = None,
        environments: Sequence[str] = (),
        max_steps: int = 0,
        num_iterations: int = 1,
    ) -> None:
        """
        Args:
            reward_funcs: A function or several, sync or async.
            reward_weights: One for each of them, 1 where absent.
            environments: Names of the classes whose `get_reward` counts too, with weight 1.
            max_steps: For `trainer_state`.
            num_iterations: Optimiser steps of a batch, by which `trainer_state.global_step` grows.
        """
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or ())
        for function in functions:
            if not callable(function) or hasattr(function, "parameters"):
                raise ConfigurationError(
                    f"reward_funcs: {function!r:.60} is a reward model: give a function that asks it"
                )
        weights = [1.0] * len(functions) if reward_weights is None else [float(w) for w in reward_weights]
        rule = f"have one weight for each of {len(functions)} reward_funcs"
        expect_that(len(weights) == len(functions), "reward_weights", rule, weights)
        names = [str(getattr(function, "__name__", type(function).__name__)) for function in functions]
        expect_that(len({*names, *environments}) == len([*names, *environments]), "reward_funcs",
                    "have names of their own", names)  # fmt: skip
        expect_that(bool(names or environments), "reward_funcs", "have a function", [],
                    "or give an environment_factory whose class has get_reward")  # fmt: skip
        self._functions = dict(zip(names, functions, strict=True))
        self._weights = {**dict(zip(names, weights, strict=True)), **dict.fromkeys(environments, 1.0)}
        self._max_steps, self._num_iterations = max_steps, num_iterations
        self.name = "trl"
        self.local = not any(map(_is_async, functions))

    @property
    def part_weights(self) -> Mapping[str, float]:
        return self._weights

    async def score(self, trajectory: Trajectory) -> RewardResult:
        return await self.score_as_group(trajectory)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        logged: list[dict[str, float]] = [{} for _ in trajectories]
        arguments = {**self._columns(trajectories), **self._logs(logged)}
        answers = await gather_or_cancel(
            self._asked(name, arguments, len(trajectories)) for name in self._functions
        )
        results: list[Result] = []
        for index, trajectory in enumerate(trajectories):
            parts = dict(zip(self._functions, (values[index] for values in answers), strict=True))
            parts |= {} if trajectory.outcome is None else trajectory.outcome.breakdown
            scores = {name: float(value) for name, value in parts.items() if value is not None}
            total = sum(self._weights[name] * score for name, score in scores.items()) if scores else None
            results.append(RewardResult(score=total, breakdown={**logged[index], **scores}))
        return results

    async def _asked(self, name: str, arguments: Mapping[str, Any], size: int) -> list[Any]:
        values = list(await call_user_code(self._functions[name], **arguments))
        if len(values) != size:
            raise RewardFailure(f"{name} returned {len(values)} rewards for {size} completions")
        return [None if value is None else float(value) for value in values]

    def _columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        from transformers import TrainerState

        rows = [trajectory.scenario.context for trajectory in trajectories]
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        version = max((version for turn in turns for version in turn.completion.versions), default=0)
        held = [trajectory.metadata.get(_INSTANCE) for trajectory in trajectories]
        state = TrainerState(global_step=version * self._num_iterations, max_steps=self._max_steps)
        columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
        if held[0] is not None:
            columns["environments"] = [_instance(instance) for instance in held]
        return {
            **columns,
            "prompts": [_prompt(trajectory) for trajectory in trajectories],
            "completions": [_completion(trajectory) for trajectory in trajectories],
            "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
            "trainer_state": state,
        }

    def _logs(self, logged: list[dict[str, float]]) -> dict[str, Any]:
        """`log_extra` and `log_metric`, which write into the breakdowns of a group's members."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if not all(isinstance(value, int | float) for value in values):
                self.warn_once(_log, "log_extra keeps numbers alone; texts are left out", column=column)
                return
            for parts, value in zip(logged, values, strict=True):
                parts[column] = float(value)

        def log_metric(name: str, value: float) -> None:
            for parts in logged:
                parts[name] = float(value)

        return {"log_extra": log_extra, "log_metric": log_metric}


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object's own method, not whether it has one
    )


def _instance(held: Any) -> Any:
    if not isinstance(held, _Held):
        raise RewardFailure(
            "environments live as long as their conversations, and these were read from a file"
        )
    return held.instance


def _prompt(trajectory: Trajectory) -> Any:
    if not trajectory.scenario.prompt:
        return trajectory.scenario.opening
    return [_as_trl(message) for message in trajectory.opening]


def _completion(trajectory: Trajectory) -> Any:
    if not trajectory.scenario.prompt:
        return "".join(message.content for message in trajectory.replies)
    return [_as_trl(message) for message in trajectory.messages[len(trajectory.opening) :]]


def _completion_ids(trajectory: Trajectory) -> list[int]:
    row = trajectory.end_to_end
    return row.token_ids[len(trajectory.turns[0].prompt_ids) :] if trajectory.turns else []


def _as_trl(message: Message) -> dict[str, Any]:
    """A message as `parse_response` makes one: arguments are an object, calls have no ids, and a reply with
    one that cannot be read is text."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if len(message.readable_calls) < len(message.tool_calls):
        shown["content"] += "".join(call.written for call in message.tool_calls)
        return shown
    if message.role == "tool":
        return {"role": "tool", "name": message.name, "content": message.content}
    if message.reasoning is not None:
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return shown


class _Held(str):
    """A class's name, in an outcome's metadata, with the object itself for the reward functions."""

    __slots__ = ("instance",)

    instance: Any


class TrlEnvironment:
    """A dataset's prompts, and tools as TRL has them: functions, and methods of an `environment_factory`.

    A reply without calls ends the conversation. What a tool raises is told as TRL tells it:
    `{'error': 'no such order'}`.
    """

    def __init__(
        self,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        *,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        max_tool_calling_iterations: int | None = None,
    ) -> None:
        """
        Args:
            train_dataset: Rows with `prompt`, messages or a text, and columns for rewards and `reset`. Absent
                where the environment's `reset` gives the prompt: then one empty prompt stands for all.
            eval_dataset: The rows of the validation split.
            tools: Functions that every conversation has as tools.
            environment_factory: Makes an object for each conversation; its public methods are tools. Several
                by name are chosen by the column `environment`.
            max_tool_calling_iterations: Most rounds of calls; None: no limit.
        """
        require_trl()
        from transformers.utils import get_json_schema

        self._is_named = isinstance(environment_factory, Mapping)
        self._factories: dict[str | None, Callable[[], Any]] = {}
        if environment_factory is not None:
            self._factories = dict(environment_factory) if self._is_named else {None: environment_factory}  # type: ignore[arg-type,dict-item]  # as just asked
        limit = max_tool_calling_iterations
        rule = "be a whole number from 0, or None"
        expect_that(limit is None or is_whole(limit, 0), "max_tool_calling_iterations", rule, limit)
        self._max_rounds, self._functions = limit, list(tools)
        self._schemas: dict[str | None, list[Mapping[str, Any]]] = {}
        owners: dict[str, None] = {}
        self.local = not any(map(_is_async, self._functions))
        for name, factory in self._factories.items() or {None: object}.items():
            instance = factory()
            if self._factories and not callable(getattr(instance, "reset", None)):
                raise ConfigurationError(f"environment_factory: {type(instance).__name__} needs reset()")
            methods = [*self._functions, *_methods(instance)]
            self._schemas[name] = [get_json_schema(method) for method in methods]
            if hasattr(instance, "get_reward"):
                owners[type(instance).__name__] = None
            self.local = self.local and not any(map(_is_async, methods))
        self.scored_by = tuple(owners)
        """Names of the classes whose `get_reward` is a reward."""
        if train_dataset is None and (not self._factories or self._is_named):
            raise ConfigurationError(
                "train_dataset is missing: give rows, or one environment whose reset says it"
            )
        rows = {"train": [{}] if train_dataset is None else train_dataset, "validation": eval_dataset or ()}
        self._scenarios = {split: self._read(split, items) for split, items in rows.items()}

    def _read(self, split: Any, rows: Iterable[Mapping[str, Any]]) -> list[Scenario]:
        scenarios = []
        for number, row in enumerate(rows):
            where = f"{split}_dataset row {number}"
            if unread := {"image", "images"} & row.keys():
                raise ConfigurationError(f"{where}: {unread.pop()} is not read: see docs/multimodal.md")
            if "prompt" not in row and not self._factories:
                raise ConfigurationError(f"{where} has no prompt, only {', '.join(row)}")
            if row.get("environment") not in self._factories and self._is_named:
                raise ConfigurationError(
                    f"{where}: environment {row.get('environment')!r} is none of {', '.join(map(str, self._factories))}"
                )
            prompt = row.get("prompt", [{"role": "user", "content": ""}])
            messages = () if isinstance(prompt, str) else tuple(map(Message.from_openai, prompt))
            scenarios.append(
                Scenario(
                    id=f"{split}-{number}",
                    family=str(row["environment"]) if self._is_named else "default",
                    opening=prompt if isinstance(prompt, str) else messages[-1].content,
                    context=dict(row),
                    split=split,
                    prompt=messages,
                )
            )
        return scenarios

    def scenarios(self, split: str) -> list[Scenario]:
        return self._scenarios.get(expect_split(split), [])

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Make an object where there is a factory, and `reset` it by the row; what it says stands behind the
        prompt's last words."""
        row = scenario.context
        name = row.get("environment") if self._is_named else None
        opening = scenario.messages()
        instance = None
        if self._factories:
            instance = await guarded("environment_factory", call_user_code(self._factories[name]))
            named = {
                key: value for key, value in row.items() if not (self._is_named and key == "environment")
            }
            told = await guarded(f"{type(instance).__name__}.reset", call_user_code(instance.reset, **named))
            if told is not None:
                opening = (*opening[:-1], replace(opening[-1], content=opening[-1].content + str(told)))
        return _TrlConversation(
            opening=opening,
            tools=self._schemas[name],
            instance=instance,
            functions={function.__name__: function for function in self._functions},
            rounds_left=self._max_rounds,
        )


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The methods that are tools, in the order of their names, as TRL lists them."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [getattr(instance, name) for name, _ in members if name[0] != "_" and name not in _NOT_TOOLS]


@dataclass(kw_only=True, eq=False)
class _TrlConversation:
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    instance: Any
    functions: Mapping[str, Callable[..., Any]]
    rounds_left: int | None
    earned: Mapping[str, float] = field(default_factory=dict)

    async def step(self, reply: Message) -> Observation:
        calls = reply.tool_calls
        if not calls or len(reply.readable_calls) < len(calls) or self.rounds_left == 0:
            return Observation(terminated=True)
        if self.rounds_left is not None:
            self.rounds_left -= 1
        known = {**self.functions, **{method.__name__: method for method in _methods(self.instance)}}
        waits = [call for call in calls if _is_async(known.get(call.name))]
        answers = [(call, await _answer(known, call)) for call in calls if call not in waits]
        together = await gather_or_cancel(_answer(known, call) for call in waits)
        answers += zip(waits, together, strict=True)  # TRL shows those behind the others
        return Observation(
            messages=tuple(
                Message(role="tool", name=call.name, content=text, tool_call_id=call.id or None)
                for call, text in answers
            )
        )

    async def outcome(self) -> Outcome:
        if self.instance is None:
            return Outcome(reward=None)
        held = _Held(type(self.instance).__name__)
        held.instance = self.instance
        if not hasattr(self.instance, "get_reward"):
            return Outcome(reward=None, metadata={_INSTANCE: held})
        value = await guarded(f"{held}.get_reward", call_user_code(self.instance.get_reward))
        reward = None if value is None else float(value)
        breakdown = {} if reward is None else {str(held): reward}
        return Outcome(reward=reward, breakdown=breakdown, metadata={_INSTANCE: held})

    def fork(self) -> Conversation:
        twin = copy.copy(self)
        twin.instance = None if self.instance is None else copy_state(self.instance)
        return twin

    async def close(self) -> None:
        """Nothing: TRL's environments have no end, and reward functions still look at them."""


async def _answer(known: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """What the agent reads of a call: the result, or what the tool raised."""
    try:
        if call.name not in known:
            raise ValueError(f"Tool {call.name} not found.")
        return str(await call_user_code(known[call.name], **call.arguments))
    except Exception as error:  # whatever it is, TRL tells the model
        return str({"error": str(error)})
