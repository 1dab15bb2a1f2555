"""What conversations of several rows cost an update, against the same turns in one row each.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/rows_cost.py
    .venv/bin/python scripts/rows_cost.py --tokens     count tokens only, which takes seconds

A template that drops earlier thoughts makes each answer to the user open a row: its prompt repeats what was
said, not what was thought. Beside the rows stands `keep`, where thoughts stay and a conversation is one row.
The model has random weights; an update is that of `training.update.learner`, in CPU time. Prints a table:
rows, and rows' tokens, forwarded tokens and time by those of `keep`.

What a tool answered after a thought is said again, too: the last workload has the price of that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample, rows_of
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

VOCABULARY = 512
MOST_TOKENS = 1.3
"""Forwarded tokens of packed rows, by those of `keep`."""
MOST_TIME = 1.35
"""CPU time of their update, by that of `keep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations of one group; lengths in tokens."""

    name: str
    opening: int
    """System prompt, tools and the user's first words, which all members share."""
    exchanges: int
    """How often the user speaks."""
    thought: int
    """Before each answer to the user; the next prompt leaves it out."""
    words: int
    """Of the agent to the user."""
    user: int
    call: int = 0
    """A tool call before the words, in a turn of its own; 0: none is made."""
    result: int = 0

    def member(self, number: int, *, keeps_thoughts: bool) -> Trajectory:
        """One conversation. The same tokens are sampled whether it keeps its thoughts or not."""
        shared, own = random.Random(self.name), random.Random(f"{self.name} {number}")
        turns: list[Turn] = []
        history = draw(shared, self.opening)
        """What the next prompt begins with."""
        for exchange in range(self.exchanges):
            user = draw(shared, self.user) if exchange else []
            thought, words = draw(own, self.thought), draw(own, self.words)
            call, result = draw(own, self.call), draw(own, self.result)
            opens = not exchange or not keeps_thoughts
            prompt = [*history, *user]
            delta = prompt if opens else user
            if self.call:
                turns.append(turn(prompt, delta, [*thought, *call], opens=opens))
                turns.append(turn([*prompt, *thought, *call, *result], result, words, opens=False))
            else:
                turns.append(turn(prompt, delta, [*thought, *words], opens=opens))
            history = [*prompt, *(thought if keeps_thoughts else []), *call, *result, *words]
        return Trajectory(scenario=Scenario(id=self.name), member=number, turns=tuple(turns), reward=0.0)


WORKLOADS = (
    Workload(name="6 turns, thought 300", opening=460, exchanges=6, thought=300, words=60, user=60),
    Workload(name="20 turns, thought 200", opening=950, exchanges=20, thought=200, words=60, user=150),
    Workload(name="6 turns, thought 1500", opening=520, exchanges=6, thought=1500, words=60, user=120),
    Workload(
        name="20 turns, thought 200, call 40, result 60",
        opening=850,
        exchanges=20,
        thought=200,
        words=60,
        user=50,
        call=40,
        result=60,
    ),
)


def draw(dice: random.Random, count: int) -> list[int]:
    """So many tokens."""
    return [dice.randrange(VOCABULARY) for _ in range(count)]


def turn(prompt: Sequence[int], delta: Sequence[int], reply: Sequence[int], *, opens: bool) -> Turn:
    """A turn whose model saw `prompt`, which ends with `delta`."""
    completion = Completion(
        message=Message(role="assistant", content=""),
        prompt_ids=tuple(prompt),
        token_ids=tuple(reply),
        logprobs=(-6.0,) * len(reply),
        finish_reason="stop",
    )
    return Turn(prompt_ids=tuple(delta), completion=completion, follows=None if opens else -1)


def samples(workload: Workload, members: int, *, keeps_thoughts: bool) -> list[Sample]:
    """A group, half of it good."""
    made = []
    for number in range(members):
        trajectory = workload.member(number, keeps_thoughts=keeps_thoughts)
        sign = 1.0 if number % 2 else -1.0
        made.append(Sample(trajectory=trajectory, advantages=(sign,) * trajectory.num_agent_tokens))
    return made


def learner(layers: int, width: int, members: int) -> Learner:
    """Of a small Llama with random weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=16384,
        )
    )
    config = TrainingConfig(beta=0.0, per_device_train_batch_size=1, num_generations=members)
    return Learner(model, config, num_steps=1000, exact_logprobs=True)


def forwarded_tokens(one: Learner, batch: Sequence[Sample]) -> int:
    """How many go through the model in a pass of an update."""
    return sum(layout.num_tokens for layout in one._layouts(rows_of(sample.rows for sample in batch)))


def updates(one: Learner, batches: Sequence[Sequence[Sample]], repetitions: int) -> list[float]:
    """CPU seconds of an update on each of `batches`: the median of so many, taken in turns."""
    took: list[list[float]] = [[] for _ in batches]
    for repetition in range(repetitions + 1):  # the first warms up
        for times, batch in zip(took, batches, strict=True):
            started = time.process_time()
            one.update(batch, step=repetition)
            times.append(time.process_time() - started)
    return [statistics.median(times[1:]) for times in took]


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description="What conversations of several rows cost an update.")
    parser.add_argument("--members", type=int, default=8, help="conversations of the group")
    parser.add_argument("--tokens", action="store_true", help="count tokens only")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    small = learner(1, 16, members=max(2, arguments.members))
    timed = learner(4, 128, members=max(2, arguments.members))
    print("| workload | rows | row tokens | forwarded, packed | time of an update |")
    print("|---|---|---|---|---|")
    for workload in WORKLOADS:
        keep, rows = (samples(workload, arguments.members, keeps_thoughts=flag) for flag in (True, False))
        laid_out = [rows_of(sample.rows for sample in batch) for batch in (keep, rows)]
        in_rows = [sum(len(row.token_ids) for _, row in batch) for batch in laid_out]
        forwarded = [forwarded_tokens(small, batch) for batch in (keep, rows)]
        seconds = ""
        if not arguments.tokens:
            seconds = ratio(updates(timed, (keep, rows), arguments.repetitions), MOST_TIME)
        print(
            f"| {workload.name} | {len(laid_out[1])} | {in_rows[1] / in_rows[0]:.2f} | "
            f"{ratio(forwarded, MOST_TOKENS)} | {seconds} |",
            flush=True,
        )


def ratio(pair: Sequence[float], most: float) -> str:
    """The second by the first, and whether that is too much."""
    quotient = pair[1] / pair[0]
    return f"{quotient:.2f}" + (f", over {most}" if quotient > most else "")


if __name__ == "__main__":
    main()
