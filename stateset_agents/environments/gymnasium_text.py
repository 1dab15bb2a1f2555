"""A Gymnasium environment as a conversation: observations become text, replies become actions."""

from __future__ import annotations

import asyncio
import copy
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.core.environment import Conversation
from stateset_agents.environments.text_world import (
    InvalidAction,
    TextAdapter,
    World,
    WorldStep,
    reset_seed,
    world_conversation,
    world_scenarios,
)
from stateset_agents.runtime.named_code import library
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import format_error, guarded
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import expect_that

if TYPE_CHECKING:
    import gymnasium


class GymnasiumText:
    """Every conversation is an episode in a Gymnasium environment of its own.

        GymnasiumText(
            "FrozenLake-v1",
            options={"is_slippery": False},
            render=lambda observation: f"You stand on field {observation} of 16.",
            actions=["left", "down", "right", "up"],
            success=1.0,
        )

    Each step's reward is its turn's; `EnvironmentReward` adds them up. A reply that is no action is told to
    the agent and costs a turn (`misread_reward`), without a step of the environment.
    """

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        options: Mapping[str, Any] | None = None,
        render: Callable[..., str] | str | None = None,
        parse: Callable[..., Any] | str | None = None,
        actions: Sequence[str] | Mapping[str, Any] | None = None,
        success: Callable[..., Any] | str | float | None = None,
        system_prompt: str | None = None,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | None = None,
        num_train: int | None = None,
        num_held_out: int | None = None,
        seed: int = 0,
        max_turns: int = 20,
        misread_reward: float = 0.0,
        local: bool = True,
    ) -> None:
        """`render`, `parse` and `success` ask for what they want by name: observation, info, env, scenario.

        Args:
            env: Name for gymnasium.make, or a function that makes an environment.
            options: More arguments for gymnasium.make, or for the function.
            render: Says the observation; may be absent where observations are text.
            parse: Makes an action of the `reply`; a ValueError's text is told to the agent.
            actions: Instead of parse: the words that act, in the order of a discrete space or with the action
                of each. A reply must name one of them, and no other.
            success: The least total reward that is a success (one of 0 or less only where the world came to
                its own end, for doing nothing earns 0), or a function, which may also ask for total, rewards,
                terminated, truncated and messages. Absent, success is unknown.
            system_prompt: Opens every conversation.
            scenarios: A scenario's context may have `seed` and `options`, both for reset.
            num_train: Where scenarios are absent: how many seeds to train on (1000).
            num_held_out: Number of validation and of test seeds (100 each), the same whatever `seed` is.
            seed: Chooses the training seeds.
            max_turns: Maximum replies, those that were no action included; the conversation is truncated
                then.
            misread_reward: Reward of a turn whose reply is no action.
            local: Say False for an environment that waits on something remote.

        Functions may be named as "module:function", which is how a YAML file gives them.
        """
        expect_that(isinstance(local, bool), "local", "be true or false", local, length=60)
        self._make, name = _maker(env, dict(options or {}))
        self._adapter = TextAdapter(
            render=render,
            parse=parse,
            actions=actions,
            success=success,
            system_prompt=system_prompt,
            max_turns=max_turns,
            misread_reward=misread_reward,
            offers=("env",),
        )
        self._scenarios = world_scenarios(
            scenarios, family=name, num_train=num_train, num_held_out=num_held_out, seed=seed
        )
        self._name = name
        self.local = local

    def scenarios(self, split: str) -> list[Scenario]:
        expect_split(split)
        return [scenario for scenario in self._scenarios if scenario.split == split]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Make an environment, reset it by the scenario's seed (else the group's), and say what it shows."""
        options = scenario.context.get("options")
        pending = _PendingReset()
        reset_to = reset_seed(scenario, seed)
        opening = in_thread(_GymWorld.reset, self._name, self._make, reset_to, options, pending)
        try:
            world = await guarded(f"resetting {self._name}", opening)
        except asyncio.CancelledError:
            pending.cancel()
            raise
        return await world_conversation(world, self._adapter, scenario)


class _PendingReset:
    """A reset that a thread runs; where nobody waits for it any more, whoever is second closes the world."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._made: _GymWorld | None = None

    def cancel(self) -> None:
        """Nobody does any more: a time-out, say."""
        with self._lock:
            self._is_cancelled = True
            world = self._made
        if world is not None:  # in the moment between its making and our hearing of it
            threading.Thread(target=world.close_now, daemon=True).start()

    def made(self, world: _GymWorld) -> None:
        with self._lock:
            self._made = world
            unwanted = self._is_cancelled
        if unwanted:
            world.close_now()


class _GymWorld:
    """Steps run in a thread; nothing else touches the environment meanwhile.

    A step that nobody waits for any more goes on, for Python cannot stop it: `close` then leaves it to that
    step to close the environment in the end.
    """

    def __init__(self, name: str, env: gymnasium.Env[Any, Any], result: WorldStep) -> None:
        self.name = name
        self.result = result
        self._env = env
        self._lock = threading.Lock()
        self._is_stepping = self._is_unwanted = False

    @classmethod
    def reset(
        cls,
        name: str,
        make: Callable[[], gymnasium.Env[Any, Any]],
        seed: int,
        options: Any,
        pending: _PendingReset,
    ) -> _GymWorld:
        """Closes the environment where nobody waits for it any more, after a time-out say."""
        env = make()
        try:
            observation, info = env.reset(seed=seed, options=options)
        except BaseException:
            env.close()
            raise
        world = cls(name, env, WorldStep(observation=observation, info=info))
        pending.made(world)
        return world

    @property
    def offers(self) -> Mapping[str, Any]:
        return {"env": self._env}

    async def step(self, action: Any) -> WorldStep:
        self.result = await in_thread(self._stepped, action)
        return self.result

    def _stepped(self, action: Any) -> WorldStep:
        with self._lock:
            self._is_stepping = True
        try:
            return self._step(action)
        finally:
            with self._lock:
                self._is_stepping = False
                unwanted = self._is_unwanted
            if unwanted:
                self._env.close()

    def _step(self, action: Any) -> WorldStep:
        if not self._env.action_space.contains(action):
            raise InvalidAction(f"{action!r:.60} is no action: actions are {self._env.action_space}")
        observation, reward, terminated, truncated, info = self._env.step(action)
        return WorldStep(
            observation=observation,
            info=info,
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
        )

    def fork(self) -> World:
        try:  # together: the result may show arrays that the environment goes on writing to
            env, result = copy.deepcopy((self._env, self.result))
        except Exception as error:
            raise ConfigurationError(
                f"{self.name} cannot be copied ({format_error(error)}), and branches need copies: give it a "
                "__deepcopy__, or train with another advantage_estimator"
            ) from error
        return _GymWorld(self.name, env, result)

    def close_now(self) -> None:
        """Close the environment, or have the step that is under way do it."""
        with self._lock:
            self._is_unwanted = True
            if self._is_stepping:
                return
        self._env.close()

    async def close(self) -> None:
        await in_thread(self.close_now)


def _maker(env: object, options: dict[str, Any]) -> tuple[Callable[[], gymnasium.Env[Any, Any]], str]:
    """The function that makes an environment, and the environment's name."""
    library("gymnasium", 'Gymnasium environments need gymnasium: pip install "gymnasium>=1"')
    import gymnasium

    if isinstance(env, gymnasium.Env):
        raise ConfigurationError(
            "env must be a name or a function, for every conversation needs an environment of its own: give "
            f"lambda: {type(env.unwrapped).__name__}(...)"
        )
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        try:
            if module:
                importlib.import_module(module)  # registers it, as gymnasium.make has it
            gymnasium.spec(name)
        except (ImportError, gymnasium.error.Error) as error:
            raise ConfigurationError(f"gymnasium has no environment {env!r}: {error}") from error
        return lambda: gymnasium.make(env, **options), name
    if not callable(env):
        raise ConfigurationError(f"env must be a name or a function that makes one, got {env!r:.60}")
    make: Callable[..., gymnasium.Env[Any, Any]] = env
    return lambda: make(**options), str(getattr(env, "__name__", type(env).__name__))
