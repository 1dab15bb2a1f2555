"""TextArena's games: each transcript by TextArena's own loop and by ours."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.porting.textarena import TextArenaGame
from stateset_agents.types.errors import ConfigurationError

pytestmark = pytest.mark.textarena

SINGLE = {
    "GuessTheNumber-v0": ["[10]", "[5]", "no number", *(f"[{number}]" for number in range(1, 21))],
    "2048-v0-ultra-easy": ["[left]", "[up]", "[right]", "[down]"] * 30,
    "FrozenLake-v0": ["[right]", "[down]"] * 10,
    "Mastermind-v0": ["[1 2 3 4]", "[5 6 1 2]", "nonsense", "[1 3 5 2]"] + ["[6 5 4 3]", "[2 1 4 3]"] * 10,
    "FrozenLake-v0-train": ["[right]", "[down]"] * 10,
}


def first_free(observation: str) -> str:
    """Takes the first square that the last board offers."""
    return re.findall(r"Available Moves: '\[(\d)\]'", observation)[-1].join("[]")


def any_free(observation: str) -> str:
    """The same by chance, from the generator that all share."""
    last = observation.rpartition("Available Moves:")[2]
    return random.choice(re.findall(r"\[\d\]", last))


def in_textarena(
    game: str, seed: int, moves: list[str], opponent: Callable[[str], str] | None, player: int
) -> tuple[list[tuple[str, str]], float]:
    """TextArena's documented loop: what the agent saw and said, and its reward."""
    import textarena

    state = random.getstate()
    random.seed(seed)
    env = textarena.make(game)
    env.reset(num_players=1 if opponent is None else 2, seed=seed)
    said, done, script = [], False, iter(moves)
    while not done:
        place, observation = env.get_observation()
        move = opponent(observation) if place != player and opponent else next(script)
        if place == player:
            said.append((observation, move))
        done, _ = env.step(action=move)
    rewards, _ = env.close()
    random.setstate(state)
    return said, float(rewards[player])


async def played(environment: TextArenaGame, moves: list[str]) -> Any:
    backend = ScriptedBackend(lambda request: moves[request.turn])
    agent = MultiTurnAgent(AgentConfig(model_name="tiny", chat_template="plain"), backend=backend)
    await agent.initialize()
    engine = ComputationalEngine(agent, environment, EnvironmentReward(), num_generations=2)
    groups = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return [member for group in groups for member in group.trajectories]


def same_transcript(member: Any, theirs: tuple[list[tuple[str, str]], float]) -> None:
    said, reward = theirs
    assert [reply.content for reply in member.replies] == [move for _, move in said]
    heard = [member.opening[-1].content, *(turn.feedback[0].content for turn in member.turns[:-1])]
    before = ""
    for ours, (observation, _) in zip(heard, said, strict=True):
        assert ours == observation.removeprefix(before).strip("\n")
        before = observation
    assert member.reward == reward


@pytest.mark.parametrize("game", SINGLE)
async def test_a_game_alone_is_textarena_s_word_for_word(game: str) -> None:
    environment = TextArenaGame(game, num_train=3, num_held_out=0, max_turns=100)
    members = await played(environment, SINGLE[game])
    for member in members:
        seed = member.scenario.context["seed"]
        same_transcript(member, in_textarena(game, seed, SINGLE[game], None, 0))
        assert member.success == (member.reward >= 1)
    assert [one.reward for one in members[::2]] == [one.reward for one in members[1::2]]


@pytest.mark.parametrize("player", [0, 1])
@pytest.mark.parametrize("opponent", [first_free, any_free])
async def test_a_game_of_two_is_textarena_s_word_for_word(
    opponent: Callable[[str], str], player: int
) -> None:
    moves = ["[4]", "[4]", "[8]", "[2]", "[6]", "[5]", "[3]", "[0]", "[7]", "[1]"]
    environment = TextArenaGame("TicTacToe-v0", opponent=opponent, player=player, num_train=4, num_held_out=0)
    members = await played(environment, moves)
    for member in members:
        seed = member.scenario.context["seed"]
        same_transcript(member, in_textarena("TicTacToe-v0", seed, moves, opponent, player))
    assert {one.reward for one in members} & {1.0, -1.0}


async def test_a_fork_goes_on_by_itself() -> None:
    environment = TextArenaGame("2048-v0-ultra-easy", num_train=1, num_held_out=0)
    (scenario,) = environment.scenarios("train")
    one = await environment.start(scenario, 0)
    from stateset_agents.types.messages import Message

    def move(word: str) -> Message:
        return Message(role="assistant", content=f"[{word}]")

    await one.step(move("left"))
    other = one.fork()
    first = [(await one.step(move(word))).messages[0].content for word in ("up", "left", "down")]
    second = [(await other.step(move(word))).messages[0].content for word in ("up", "left", "down")]
    assert first == second
    await one.close()
    await other.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            {"game": "GuessTheNumber"},
            r"game must be one of TextArena's \(did you mean 'GuessTheNumber-v0'\?\)",
        ),
        (
            {"game": "TicTacToe-v0"},
            r"game TicTacToe-v0 cannot be played here: AssertionError.*opponent=\.\.\.",
        ),
        ({"game": "GuessTheNumber-v0", "parse": str.strip}, "parse must be left out"),
        ({"game": "GuessTheNumber-v0", "player": 1}, r"player must be one of \(0,\), got 1"),
        ({"game": "GuessTheNumber-v0", "options": {"size": 3}}, "unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_played_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        TextArenaGame(**arguments)
