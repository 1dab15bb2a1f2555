"""An OpenEnv server for tests, a number to guess: `python openenv_game.py PORT`. Needs openenv."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Guess(Action):
    number: int = Field(ge=1)


class Hint(Observation):
    hint: str = ""


class Guessing(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret: int | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, top: int = 9, **_: Any) -> Hint:
        self.secret = random.Random(seed).randint(1, top)
        return Hint(hint=f"from 1 to {top}", metadata={"top": top})

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if self.secret is None:
            return Hint(hint="nothing was reset", reward=100.0)  # what must never be seen
        if action.number == 99:
            raise RuntimeError("the game fell off the table")
        if action.number == 77:
            time.sleep(3)
        if action.number == self.secret:
            return Hint(hint="found", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=most)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
