"""A TextArena game by its name as an environment: alone, or against an opponent of one's own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from stateset_agents.environments.gymnasium_text import GymnasiumText
from stateset_agents.runtime.named_code import library
from stateset_agents.runtime.user_code import format_error
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that, nearest

INSTALL = 'TextArena games need textarena and gymnasium: pip install "textarena>=0.7,<0.8" "gymnasium>=1"'
_ONE_AT_A_TIME = threading.Lock()
"""Games draw from Python's and numpy's own generators, which all conversations share."""


class TextArenaGame(GymnasiumText):
    """Every conversation is a game of its own; TextArena's reward comes at its end, and 1 is a success.

        TextArenaGame("GuessTheNumber-v0")
        TextArenaGame("TicTacToe-v0", opponent=lambda observation: "[4]")

    The agent reads what TextArena would show it: what is new where the game's wrapper only appends, else the
    whole observation. Its whole reply is its move.
    """

    def __init__(
        self,
        game: str,
        *,
        opponent: Callable[[str], str] | None = None,
        player: int = 0,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """
        Args:
            game: Name for textarena.make.
            opponent: Plays the other side, as TextArena's agents do: the observation in, its move out. Where
                it draws from `random`, a game draws the same each time.
            player: The agent's place; with 1 the opponent begins.
            options: More arguments for textarena.make.
            **others: `GymnasiumText`'s: scenarios, num_train, num_held_out, seed, max_turns, system_prompt.
        """
        textarena = library("textarena", INSTALL)
        registry = textarena.envs.registration.ENV_REGISTRY
        expect_that(game in registry, "game", f"be one of TextArena's{nearest(game, registry)}", game)
        expect_that("parse" not in others, "parse", "be left out", "one", "the game reads replies itself")
        places = (0,) if opponent is None else (0, 1)
        expect_that(player in places, "player", f"be one of {places}", player)

        def make() -> Any:
            return _Game(textarena.make(game, **(options or {})), opponent, player)

        make.__name__ = game
        try:
            make().reset(seed=0)
        except Exception as error:  # whatever it is: an argument, a download, the number of players
            raise ConfigurationError(
                f"game {game} cannot be played here: {format_error(error)}; two players need opponent=..."
            ) from error
        super().__init__(make, parse=lambda reply: reply, **{"success": 1.0, **others})


@dataclass(eq=False)
class _Game:
    """One game, as `GymnasiumText` steps it."""

    env: Any
    opponent: Callable[[str], str] | None
    player: int
    shown: str = ""
    """The agent's last observation, as TextArena has it."""

    action_space: ClassVar = SimpleNamespace(contains=lambda move: True)  # the game says what is no move

    def reset(self, *, seed: int, options: object = None) -> tuple[str, dict[str, Any]]:
        self.state = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._generators():
            self.env.reset(num_players=1 if self.opponent is None else 2, seed=seed)
            return self._observed(done=False)[0], {}

    def step(self, move: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._generators():
            done, _ = self.env.step(action=move)
            observation, done = self._observed(done=done)
            if not done:
                return observation, 0.0, False, False, {}
            rewards, info = self.env.close()
        told = dict(info[self.player])
        return observation or str(told.get("reason")), float(rewards[self.player]), True, False, told

    def _observed(self, *, done: bool) -> tuple[str, bool]:
        """What the agent reads next, after the opponent's moves, and whether the game is over."""
        place, observation = self.env.get_observation()
        while not done and place != self.player and self.opponent is not None:
            done, _ = self.env.step(action=self.opponent(observation))
            place, observation = self.env.get_observation()
        if place != self.player:
            return "", done  # it ended with the opponent's move, and TextArena asks for nobody's after that
        before, self.shown = self.shown, observation
        return observation.removeprefix(before).strip("\n"), done

    @contextlib.contextmanager
    def _generators(self) -> Iterator[None]:
        """The game's own course of Python's and numpy's generators in place of everybody's."""
        with _ONE_AT_A_TIME:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self.state[0])
            np.random.set_state(self.state[1])
            try:
                yield
            finally:
                self.state = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])

    def close(self) -> None:
        """Nothing: the game holds nothing open."""
