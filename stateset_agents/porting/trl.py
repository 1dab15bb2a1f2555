"""The arguments of TRL's GRPOTrainer as an environment, a reward and settings: `from_trl`.

ported = from_trl(reward_funcs=..., args=GRPOConfig(...), train_dataset=..., environment_factory=Shop)
agent = MultiTurnAgent(AgentConfig(model_name=..., **ported.agent))
trainer = MultiTurnGRPOTrainer(agent, ported.environment, ported.reward, ported.config)
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.core.environment import Conversation, Observation, copy_state
from stateset_agents.core.reward import FunctionReward, RewardResult
from stateset_agents.porting.grpo_config import TRAINER, ported_settings
from stateset_agents.runtime.named_code import check_arguments
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.runtime.user_code import call_user_code, format_error, guarded, is_async
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.settings import require_trl
from stateset_agents.types.errors import ConfigurationError, RewardFailure, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.settings import expect_that, is_number
from stateset_agents.types.trajectory import Outcome, Trajectory

_log = get_logger(__name__)
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What reward functions are called with, besides columns."""
_INSTANCE = "trl_environment"
"""Key in an outcome's metadata: the object whose methods were the conversation's tools."""
_EMPTY = ({"role": "user", "content": ""},)
"""TRL's prompt where a row has none, for an environment whose `reset` says it."""
_ROWS = "give a datasets.Dataset (a split of a DatasetDict, or Dataset.from_pandas(frame)) or a list of dicts"
Functions = Callable[..., Any] | Sequence[Callable[..., Any]] | None
Rows = Iterable[Mapping[str, Any]] | None
Factory = Callable[[], Any] | Mapping[str, Callable[[], Any]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ported:
    """A GRPOTrainer's arguments as ours."""

    environment: TrlEnvironment
    reward: TrlReward
    config: TrainingConfig
    agent: Mapping[str, Any]
    """Arguments of `AgentConfig`, but for the model's name."""


def from_trl(
    reward_funcs: Functions = None, *, args: Any = None, train_dataset: Rows = None, **rest: Any
) -> Ported:
    """The arguments as GRPOTrainer takes them; `rest` is of `TrlEnvironment`.

    Raises ConfigurationError for what cannot be followed, see docs/bring-your-script.md.
    """
    for name, instead in TRAINER.items():
        value = rest.pop(name, None)
        expect_that(value is None, f"from_trl: {name}", "be left out", value, instead, length=60)
    check_arguments("from_trl", TrlEnvironment, rest)
    rounds = getattr(args, "max_tool_calling_iterations", None)  # what is no GRPOConfig is told of below
    environment = TrlEnvironment(train_dataset, max_tool_calling_iterations=rounds, **rest)
    num_prompts = None if train_dataset is None else len(environment.scenarios("train"))
    config, agent = ported_settings(args, num_prompts=num_prompts)
    reward = TrlReward(reward_funcs, reward_weights=args.reward_weights, environments=environment.scored_by)
    reward.max_steps, reward.num_iterations = config.num_steps() * args.num_iterations, args.num_iterations
    reward.plays = environment.plays
    return Ported(environment=environment, reward=reward, config=config, agent=agent)


class TrlReward(FunctionReward):
    """TRL's reward functions, each times its weight. One that says None of a conversation is left out of its
    sum, and a conversation of which all say None is unscored.

    They get what TRL gives them: `prompts`, `completions`, `completion_ids`, the dataset's columns,
    `trainer_state`, `log_extra`, `log_metric`, and `environments` where there are some. Prompts and
    completions are lists of messages where the dataset's prompts are, else texts. A call is for one group,
    where TRL's is for all groups of a batch.
    """

    max_steps = 0
    """`trainer_state.max_steps`."""
    num_iterations = 1
    """Optimiser steps of a batch, by which `trainer_state.global_step` grows."""
    plays = False
    """True where an `environment_factory` makes `environments`."""

    def __init__(
        self, reward_funcs: Functions, *, reward_weights: Any = None, environments: Sequence[str] = ()
    ) -> None:
        """`reward_funcs`: one or several, sync or async; `reward_weights`: a number for each, 1 where absent;
        `environments`: classes whose `get_reward` counts too, with weight 1."""
        several = reward_funcs or () if isinstance(reward_funcs, list | tuple | None) else [reward_funcs]
        functions: list[Any] = list(several)
        are_functions = all(callable(one) and not hasattr(one, "parameters") for one in functions)
        hint = "write a function that asks the reward model"
        expect_that(are_functions, "reward_funcs", "be functions", functions, hint, length=60)
        weights = [1.0] * len(functions) if reward_weights is None else reward_weights
        are_numbers = isinstance(weights, list | tuple) and all(map(is_number, weights))
        fit = are_numbers and len(weights) == len(functions) and math.isfinite(sum(weights))
        rule = f"have one weight for each of {len(functions)} reward_funcs, a finite number"
        expect_that(fit, "reward_weights", rule, weights, length=60)
        names = [str(getattr(function, "__name__", type(function).__name__)) for function in functions]
        every = [*names, *environments]
        expect_that(0 < len(set(every)) == len(every), "reward_funcs", "be some, each of another name", every)
        self._functions = dict(zip(names, functions, strict=True))
        self._weights = dict(zip(every, [*weights, *([1.0] * len(environments))], strict=True))
        is_local = not any(map(is_async, functions))
        super().__init__(self._scored, name="trl", scope="group", local=is_local)

    @property
    def part_weights(self) -> Mapping[str, float]:
        return self._weights

    def check_scenario(self, scenario: Scenario) -> None:
        columns = [name for name in scenario.context if name != "prompt"]
        for function in self._functions.values():
            _expect_takes(function, [*columns, *_GIVEN, *["environments"] * self.plays])

    async def _scored(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        from transformers import TrainerState

        parts = [dict(one.outcome.breakdown if one.outcome else {}) for one in trajectories]

        def log(column: str, values: Sequence[Any]) -> None:
            expect_that(column not in self._weights, "a log", "have a name that no reward has", column)
            if not all(isinstance(value, int | float) for value in values):
                self.warn_once(_log, "log_extra keeps numbers, others are left out", column=column)
                return
            for logged, value in zip(parts, values, strict=True):
                logged[column] = value

        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        batch = max((version for turn in turns for version in turn.completion.versions), default=0)
        arguments = {
            **_columns(trajectories),
            "trainer_state": TrainerState(global_step=batch * self.num_iterations, max_steps=self.max_steps),
            "log_extra": log,
            "log_metric": lambda name, value: log(name, [value] * len(parts)),
        }
        calls = (call_user_code(function, **arguments) for function in self._functions.values())
        for name, returned in zip(self._functions, await gather_or_cancel(calls), strict=True):
            rule = f"{name} must return a list of a number or None for each completion, got {returned!r:.60}"
            values = _called(rule, _numbers, returned)
            if len(values) != len(parts):
                raise RewardFailure(f"{name} returned {len(values)} rewards for {len(parts)} completions")
            for scored, value in zip(parts, values, strict=True):
                scored[name] = value
        results = []
        for one in parts:
            numbers = {name: value for name, value in one.items() if not math.isnan(value)}
            scores = [weight * numbers[name] for name, weight in self._weights.items() if name in numbers]
            results.append(RewardResult(score=sum(scores) if scores else None, breakdown=numbers))
        return results


def _called(what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a script's code. Raises ConfigurationError, a line that begins with `what`, where it
    breaks."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # whatever it is, the script has to be changed
        why = str(error) if isinstance(error, StatesetError) else format_error(error)
        raise ConfigurationError(f"{what}: {' '.join(why.split())}") from error


def _expect_takes(function: Any, names: Iterable[Any], where: str = "") -> None:
    """Raises ConfigurationError where a script's function is not one that takes these arguments."""
    arguments = dict.fromkeys(names)
    what = f"{where}{getattr(function, '__qualname__', type(function).__qualname__)}"
    what += f" is called with {', '.join(map(str, arguments)) or 'nothing'}, so take them or **kwargs"
    _called(what, lambda: inspect.signature(function).bind(**arguments))


def _numbers(returned: Any) -> list[float]:
    """A reward function's list; NaN for None. Raises TypeError or ValueError for another thing."""
    values = list(returned)
    if isinstance(returned, str | bytes | Mapping | Set) or any(isinstance(value, str) for value in values):
        raise TypeError("numbers in a list are expected")
    return [math.nan if value is None else float(value) for value in values]


def _columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    rows = [trajectory.scenario.context for trajectory in trajectories]
    columns = {name: [row.get(name) for row in rows] for name in rows[0] if name != "prompt"}
    instances = [trajectory.metadata.get(_INSTANCE) for trajectory in trajectories]
    if any(isinstance(name, _Held) for name in instances):  # what was read from a file has names alone
        columns["environments"] = [getattr(name, "instance", None) for name in instances]
    columns.update(prompts=[], completions=[], completion_ids=[])
    for trajectory in trajectories:
        messages, first = [_as_trl(message) for message in trajectory.messages], len(trajectory.opening)
        prompt, completion = messages[:first], messages[first:]
        texts = trajectory.opening[-1].content, "".join(message["content"] for message in completion)
        is_text = not trajectory.scenario.prompt
        columns["prompts"].append(texts[0] if is_text else prompt)
        columns["completions"].append(texts[1] if is_text else completion)
        begin = len(trajectory.turns[0].prompt_ids) if trajectory.turns else 0
        columns["completion_ids"].append(trajectory.token_ids[begin:])
    return columns


def _as_trl(message: Message) -> dict[str, Any]:
    """A message as `parse_response` makes one: arguments are an object, calls have no ids, and a reply with
    one that cannot be read is text."""
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        return {**entry, "name": message.name}
    if len(message.readable_calls) < len(message.tool_calls):
        return {**entry, "content": message.content + "".join(call.written for call in message.tool_calls)}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    calls = [{"type": "function", "function": function} for function in functions]
    return {**entry, "tool_calls": calls} if calls else entry


class _Held(str):
    """A class's name, in an outcome's metadata, with the object itself for the reward functions."""

    instance: Any


class TrlEnvironment:
    """A dataset's prompts, and tools as TRL has them: functions, and methods of an `environment_factory`.

    A reply without calls ends the conversation. What a tool raises is told as TRL tells it:
    `{'error': 'no such order'}`.
    """

    def __init__(
        self,
        train_dataset: Rows = None,
        *,
        eval_dataset: Rows = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Factory = None,
        max_tool_calling_iterations: int | None = None,
    ) -> None:
        """
        Args:
            train_dataset: Rows with `prompt`, messages or a text, and columns for rewards and `reset`. Absent
                where the environment's `reset` says the prompt: then one empty prompt stands for all.
            eval_dataset: The rows of the validation split.
            tools: Functions that every conversation has as tools.
            environment_factory: Makes an object for each conversation; its public methods are tools. Several
                by name are chosen by the column `environment`.
            max_tool_calling_iterations: Most rounds of calls; None: no limit.
        """
        require_trl()
        self._named, self.plays = isinstance(environment_factory, Mapping), environment_factory is not None
        one: Any = environment_factory if self.plays else (lambda: None)
        self._factories: Mapping[str | None, Callable[[], Any]] = one if self._named else {None: one}
        self._functions = list(_called("tools must be a list of functions", list, tools or ()))
        self._max_rounds, told = max_tool_calling_iterations, "must make an object when called with nothing"
        named = self._factories.items()
        self._probes = {key: _called(f"environment_factory {one!r:.60} {told}", one) for key, one in named}
        methods = {name: [*self._functions, *_methods(probe)] for name, probe in self._probes.items()}
        self._schemas = {name: [_schema(method) for method in listed] for name, listed in methods.items()}
        for probe in self._probes.values():
            has_reset = callable(getattr(probe, "reset", None)) or not self.plays
            expect_that(has_reset, "environment_factory", "make objects with reset", probe, length=60)
            _expect_takes(getattr(probe, "get_reward", lambda: None), ())
        owners = [type(probe).__name__ for probe in self._probes.values() if hasattr(probe, "get_reward")]
        self.scored_by = tuple(dict.fromkeys(owners))
        """Names of the classes whose `get_reward` is a reward."""
        self.local = not any(is_async(method) for listed in methods.values() for method in listed)
        has_rows = train_dataset is not None or (self.plays and not self._named)
        expect_that(has_rows, "train_dataset", "be rows, or one environment's reset ask", train_dataset)
        train = [{}] if train_dataset is None else train_dataset
        rest = () if eval_dataset is None else eval_dataset
        self._scenarios = [
            self._scenario(split, number, row)
            for split, rows in (("train", train), ("validation", rest))
            for number, row in enumerate(_called(f"the {split} dataset must be rows, {_ROWS}", list, rows))
        ]

    def _scenario(self, split: Any, number: int, row: Any) -> Scenario:
        where = f"row {number} of the {split} dataset"
        expect_that(isinstance(row, Mapping), where, "be a mapping", row, _ROWS, length=60)
        name = row.get("environment") if self._named else None
        pictures = {"image", "images"} & row.keys()
        expect_that(not pictures, where, "have no pictures", [*row], "see docs/multimodal.md")
        expect_that("prompt" in row or self.plays, where, "have a prompt", [*row])
        expect_that(name in self._factories, f"{where}: environment", f"be of {[*self._factories]}", name)
        if self.plays:
            columns = [key for key in row if key != "environment" or not self._named]
            _expect_takes(self._probes[name].reset, columns, f"{where}: ")
        prompt = row.get("prompt", _EMPTY)
        is_text, may_be = isinstance(prompt, str), "be a text or a list of messages"
        listed = [{"role": "user", "content": prompt}] if is_text else prompt
        expect_that(isinstance(listed, list | tuple) and len(listed) > 0, f"{where}: prompt", may_be, prompt)
        messages = tuple(_called(where, Message.from_openai, message) for message in listed)
        # TRL's environments may say what is asked in `reset`, which is added to the last message
        texts = [one.content for one in messages[: -1 if self.plays else None] if one.role == "user"]
        rule = "have words in what the user says"
        expect_that(all(map(str.strip, texts)), f"{where}: prompt", rule, prompt, length=60)
        shared: dict[str, Any] = {"family": name or "default", "context": row, "split": split}
        id, opening, turns = f"{split}-{number}", messages[-1].content, () if is_text else messages
        return Scenario(id=id, opening=opening, prompt=turns, **shared)

    def scenarios(self, split: Split) -> list[Scenario]:
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Make the object where there is a factory, and `reset` it by the row; what it says stands behind the
        prompt's last words."""
        row = dict(scenario.context)
        name = row.pop("environment", None) if self._named else None
        *before, last = scenario.messages()
        instance = await guarded("environment_factory", call_user_code(self._factories[name]))
        if self.plays:
            told = await guarded(f"{type(instance).__name__}.reset", call_user_code(instance.reset, **row))
            last = last if told is None else replace(last, content=f"{last.content}{told}")
            hint = f"give row {scenario.id} a prompt, or let {type(instance).__name__}.reset return it"
            expect_that(bool(last.content.strip()), "the prompt", "have words", last.content, hint)
        opening, tools = (*before, last), self._schemas[name]
        return _TrlConversation(opening, tools, instance, self._functions, self._max_rounds)


def _schema(tool: Any) -> Any:
    from transformers import utils

    make: Any = utils.get_json_schema  # type: ignore[attr-defined]  # not in its __all__
    name = getattr(tool, "__qualname__", repr(tool))
    return _called(f"tool {name} must be a function with types and a docstring", make, tool)


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The methods that are tools, in the order of their names, as TRL lists them."""
    members = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    names = [name for name in members if name[0] != "_" and name not in ("reset", "get_reward")]
    return [getattr(instance, name) for name in names]


@dataclass(eq=False)
class _TrlConversation:
    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    instance: Any
    functions: Sequence[Callable[..., Any]]
    rounds_left: int | None

    async def step(self, reply: Message) -> Observation:
        calls = reply.tool_calls
        if not calls or len(reply.readable_calls) < len(calls) or self.rounds_left == 0:
            return Observation(terminated=True)
        self.rounds_left = None if self.rounds_left is None else self.rounds_left - 1
        tools = {method.__name__: method for method in (*self.functions, *_methods(self.instance))}
        waiting = [call for call in calls if is_async(tools.get(call.name))]
        answers = [await _answer(tools, call) for call in calls if call not in waiting]
        answers += await gather_or_cancel(_answer(tools, call) for call in waiting)  # TRL shows those last
        return Observation(messages=tuple(answers))

    async def outcome(self) -> Outcome:
        if self.instance is None:
            return Outcome(reward=None)
        holder = _Held(type(self.instance).__name__)
        holder.instance, judge = self.instance, getattr(self.instance, "get_reward", lambda: None)
        value = await guarded(f"{holder}.get_reward", call_user_code(judge))
        rule = f"{holder}.get_reward must return a number or None, got {value!r:.60}"
        (score,) = _called(rule, _numbers, [value])
        parts = {} if value is None else {str(holder): score}
        return Outcome(reward=parts.get(holder), breakdown=parts, metadata={_INSTANCE: holder})

    def fork(self) -> Conversation:
        twin = copy.copy(self)
        twin.instance = None if self.instance is None else copy_state(self.instance)
        return twin

    async def close(self) -> None:
        """Nothing: TRL's environments have no end, and reward functions still look at them."""


async def _answer(tools: Mapping[str, Callable[..., Any]], call: ToolCall) -> Message:
    """What the agent reads of a call: the result, or what the tool raised."""
    try:
        if call.name not in tools:
            raise ValueError(f"Tool {call.name} not found.")
        content = str(await call_user_code(tools[call.name], **call.arguments))
    except Exception as error:  # whatever it is, TRL tells the model
        content = str({"error": str(error)})
    return Message(role="tool", name=call.name, content=content, tool_call_id=call.id or None)
