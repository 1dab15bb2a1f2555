"""CartPole-v1 and Acrobot-v1 with all rows stepped as one array; equal to Gymnasium's to rounding.

Equations and constants are those of the sources that Gymnasium names: Barto, Sutton and Anderson 1983 with
https://coneural.org/florian/papers/05_cart_pole.pdf, and Sutton and Barto's book, second edition, 11.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Spec, Transition

_State = NDArray[np.float64]


def _uniform_starts(seeds: Sequence[int], limit: float) -> _State:
    """[4, B] within ±limit, as Gymnasium draws it from each seed; a group's seed is drawn once."""
    starts: dict[int, NDArray[np.float64]] = {}
    for seed in seeds:
        if seed not in starts:
            starts[seed] = np.random.default_rng(seed).uniform(-limit, limit, size=4)
    return np.stack([starts[seed] for seed in seeds], axis=1)


class _Classic:
    """Rows with a state [4, B] and a count of steps; no noise after the start."""

    spec: Spec
    _state: _State
    _steps: IntArray

    def action_mask(self) -> BoolArray | None:
        """Every action is always allowed."""
        return None

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows."""
        copy = type(self).__new__(type(self))
        copy.spec = self.spec
        copy._state, copy._steps = self._state[:, rows].copy(), self._steps[rows].copy()
        return copy

    def _begin(self, state: _State) -> None:
        self._state, self._steps = state, np.zeros(state.shape[1], dtype=np.int64)

    def _count(self) -> BoolArray:
        """One step more; which rows have reached the horizon?"""
        self._steps += 1
        return self._steps >= self.spec.horizon


class BatchedCartPole(_Classic):
    """A pole on a cart that is pushed left (0) or right (1); 1 for every step that it stays up.

    An episode ends at 12 degrees or 2.4 m. Observations are [B, 4]: m, m/s, rad, rad/s.
    """

    _GRAVITY, _CART, _POLE, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    """m/s², kg, kg, m, N, s."""
    _LIMITS = np.array([[2.4], [12 * 2 * math.pi / 360]])
    """m, rad."""

    def __init__(self, horizon: int = 500) -> None:
        self.spec = Spec(
            name="CartPole-v1",
            observation_shape=(4,),
            num_actions=2,
            horizon=horizon,
            action_names=("left", "right"),
        )

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """[B, 4], each row as Gymnasium's `reset(seed=...)`."""
        self._begin(_uniform_starts(seeds, 0.05))
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """A fiftieth of a second, by Euler's method."""
        _, speed, angle, turning = self._state
        mass, lever = self._CART + self._POLE, self._POLE * self._HALF_LENGTH
        force = np.where(actions == 1, self._FORCE, -self._FORCE)
        cosine, sine = np.cos(angle), np.sin(angle)
        push = (force + lever * np.square(turning) * sine) / mass
        turning_change = (self._GRAVITY * sine - cosine * push) / (
            self._HALF_LENGTH * (4.0 / 3.0 - self._POLE * np.square(cosine) / mass)
        )
        change = np.empty_like(self._state)
        change[0], change[2], change[3] = speed, turning, turning_change
        change[1] = push - lever * turning_change * cosine / mass
        self._state = self._state + self._SECONDS * change
        is_over: BoolArray = np.logical_or.reduce(np.abs(self._state[::2]) > self._LIMITS)
        return Transition(
            observations=self._observations(),
            rewards=np.ones(len(actions), dtype=np.float32),
            terminated=is_over,
            truncated=self._count(),
        )

    def _observations(self) -> FloatArray:
        return self._state.T.astype(np.float32)


class BatchedAcrobot(_Classic):
    """Two links that hang and swing up by a torque of -1, 0 or 1 at their joint; -1 for every step before.

    Observations are [B, 6]: cosine and sine of both angles, and both angular velocities in rad/s.
    """

    _SECONDS, _GRAVITY, _CENTRE, _INERTIA = 0.2, 9.8, 0.5, 1.0
    """Both links have 1 m, 1 kg, their centre at .5 m and a moment of inertia of 1."""
    _MAX_TURNING = np.array([[4 * math.pi], [9 * math.pi]])

    def __init__(self, horizon: int = 500) -> None:
        self.spec = Spec(
            name="Acrobot-v1",
            observation_shape=(6,),
            num_actions=3,
            horizon=horizon,
            action_names=("torque -1", "torque 0", "torque 1"),
        )

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """[B, 6], each row as Gymnasium's `reset(seed=...)`."""
        self._begin(_uniform_starts(seeds, 0.1).astype(np.float32).astype(np.float64))
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """A fifth of a second, by one step of Runge and Kutta's fourth order."""
        torque = actions.astype(np.float64) - 1.0
        state = _runge_kutta(lambda now: self._change(now, torque), self._state, self._SECONDS)
        state[:2] = (state[:2] + math.pi) % (2 * math.pi) - math.pi
        state[2:] = np.clip(state[2:], -self._MAX_TURNING, self._MAX_TURNING)
        self._state = state
        is_up = -np.cos(state[0]) - np.cos(state[0] + state[1]) > 1.0
        return Transition(
            observations=self._observations(),
            rewards=np.where(is_up, np.float32(0.0), np.float32(-1.0)),
            terminated=is_up,
            truncated=self._count(),
        )

    def _change(self, state: _State, torque: NDArray[np.float64]) -> _State:
        """[4, B] the derivative by time."""
        first, second, first_turning, second_turning = state
        centre, inertia, gravity = self._CENTRE, self._INERTIA, self._GRAVITY
        cosine, sine = np.cos(second), np.sin(second)
        d1 = centre**2 + (1 + centre**2 + 2 * centre * cosine) + 2 * inertia
        d2 = centre**2 + centre * cosine + inertia
        phi2 = centre * gravity * np.cos(first + second - math.pi / 2)
        phi1 = (
            -centre * second_turning * (second_turning + 2 * first_turning) * sine
            + (centre + 1) * gravity * np.cos(first - math.pi / 2)
            + phi2
        )
        second_change = (torque + d2 / d1 * phi1 - centre * first_turning**2 * sine - phi2) / (
            centre**2 + inertia - d2**2 / d1
        )
        return np.stack((first_turning, second_turning, -(d2 * second_change + phi1) / d1, second_change))

    def _observations(self) -> FloatArray:
        first, second, *turning = self._state
        columns = (np.cos(first), np.sin(first), np.cos(second), np.sin(second), *turning)
        return np.stack(columns, axis=1).astype(np.float32)


def _runge_kutta(change: Callable[[_State], Any], state: _State, seconds: float) -> _State:
    """The state `seconds` later; `change` is its derivative."""
    k1 = change(state)
    k2 = change(state + seconds / 2 * k1)
    k3 = change(state + seconds / 2 * k2)
    k4 = change(state + seconds * k3)
    new: _State = state + seconds / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return new
