"""The agent programs of examples/agents, as their libraries' documentation writes them, play and get better.

make test-agents                                                # some conversations of each
AGENT_CONVERSATIONS=64 make test-agents                         # as docs/evidence/trained-programs.md tells
AGENT_TRAININGS="agno_agent" make test-agents PYTEST_ARGS="-k gets_better"   # of each that is named
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_programs import NAMES, play, started_warm, train

from stateset_agents.types.trajectory import Status, Trajectory

pytestmark = pytest.mark.agents

NUM_CONVERSATIONS = int(os.environ.get("AGENT_CONVERSATIONS", "8"))
NUM_GENERATIONS = 4


def assert_trained_as_sampled(talk: Trajectory) -> None:
    """The trained tokens of each row are those that its turns sampled, in their order, after their prompt."""
    for row in talk.rows:
        trained = [token for token, bit in zip(row.token_ids, row.action_mask, strict=True) if bit]
        sampled = [token for turn in row.turns[row.trains_from :] for token in turn.completion.token_ids]
        assert trained == sampled
        last = row.turns[-1].completion
        assert row.token_ids == [*last.prompt_ids, *last.token_ids]
    assert sum(sum(row.action_mask) for row in talk.rows) == talk.num_agent_tokens > 0


@pytest.mark.parametrize("name", NAMES)
async def test_a_program_of_a_library_is_a_conversation_without_a_refused_request(name: str) -> None:
    with started_warm(name) as command:
        played = await play(name, NUM_CONVERSATIONS // NUM_GENERATIONS, NUM_GENERATIONS, command)
    print(f"{name}: {len(played.talks)} conversations, {dict(played.paths)}, {len(played.refused)} refused, ")
    assert played.refused == []
    assert [talk.error for talk in played.talks] == [None] * len(played.talks)
    for talk in played.talks:
        assert talk.status is Status.TERMINATED
        assert talk.reward is not None
        assert_trained_as_sampled(talk)


if names := os.environ.get("AGENT_TRAININGS", "").split():  # ten minutes each

    @pytest.mark.parametrize("name", names)
    def test_a_program_gets_better_by_training(tmp_path: Path, name: str) -> None:
        with started_warm(name) as command:
            before, after = train(name, tmp_path, command)
        print(f"{name}: greedy success {before:.1%} before, {after:.1%} after")
        assert after >= before + 0.2
