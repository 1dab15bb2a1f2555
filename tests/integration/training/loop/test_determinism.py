"""A run is a function of its settings and its seed: how long users, tools and rewards take changes no bit."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, VOCAB, tiny_model, tiny_tokenizer
from tiny_training import SCENARIOS, even_share, make_agent, make_environment, make_trainer, snapshot
from torch import Tensor
from transformers import AutoModelForCausalLM

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.batcher import Stats
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.tools import Tool, tool
from stateset_agents.core.users.simulated_user import ScriptedUser
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

Wait = Callable[[], float]
"""Seconds that the next answer takes."""

_CALLS = [f'<tool_call>{{"name": "look", "arguments": {{"number": {n}}}}}</tool_call>' for n in range(40)]
"""Each is one token of the vocabulary, so that a random model calls a tool in one token of eight or so."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def at_once() -> float:
    return 0.0


def at_random() -> Wait:
    dice = random.Random()  # unseeded on purpose: no two runs wait alike
    return lambda: dice.uniform(0, 0.05)


@dataclass
class SlowUser:
    """Says its lines, each after a while."""

    script: ScriptedUser
    wait: Wait
    local = True

    async def reply(self, messages: Sequence[Message]) -> str | None:
        await asyncio.sleep(self.wait())
        return await self.script.reply(messages)

    def fork(self) -> SlowUser:
        return SlowUser(self.script.fork(), self.wait)


def slow_tool(wait: Wait, asked: list[int]) -> Tool:
    @tool(local=True)
    async def look(number: int) -> str:
        """Look an order up."""
        await asyncio.sleep(wait())
        asked.append(number)
        return f"order {number} is late"

    return look


def slow_reward(wait: Wait) -> Any:
    @reward_function(local=True)
    async def slow_share(trajectory: Trajectory) -> float:
        await asyncio.sleep(wait())
        return (await even_share.score(trajectory)).score or 0.0

    return slow_share


def calling_agent(family: str) -> MultiTurnAgent:
    """A tiny random model that calls `look` now and then, with dropout in its config."""
    raw = tiny_tokenizer().hf
    raw.add_tokens(_CALLS)
    config = CONFIGS[family]()
    config.vocab_size = VOCAB + len(_CALLS)
    config.max_position_embeddings = 512  # GPT-2's n_positions: the tool's schema is long in bytes
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = config.attention_dropout = 0.1
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(ids).logits, model(ids).logits)  # dropout it is
    backend = HuggingFaceBackend(model, HuggingFaceTokenizer(raw), copy_model=False)
    settings = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=6)
    return MultiTurnAgent(settings, backend=backend)


@dataclass(frozen=True)
class Ran:
    tensors: dict[str, Tensor]
    """Final weights and the optimiser's moments."""
    stats: Stats
    """What the backend batched."""
    asked: list[int]
    """What the tool was asked."""


async def run_of(folder: Path, family: str, wait: Wait, **settings: Any) -> Ran:
    """Three steps over conversations of up to three turns, in which everybody takes `wait()` to answer."""
    asked: list[int] = []

    def slow_user(scenario: Scenario, seed: int) -> SlowUser:
        return SlowUser(ScriptedUser(["go on", "and then?"]), wait)

    environment = ConversationEnvironment(
        SCENARIOS, max_turns=3, tools=[slow_tool(wait, asked)], user=slow_user
    )
    agent = calling_agent(family)
    trainer = make_trainer(
        folder,
        agent=agent,
        environment=environment,
        reward=slow_reward(wait),
        max_concurrent=6,  # fewer than the eight of a step, so that some wait for a place
        **{"lr_scheduler_type": "constant", "dropout": True, **settings},
    )
    async with trainer:
        await trainer.train()
        assert trainer.summary()["deterministic"] is trainer.deterministic
        assert isinstance(agent.backend, HuggingFaceBackend)
        return Ran(snapshot(trainer), agent.backend.stats, sorted(asked))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.first(1)
async def test_delays_of_users_tools_and_rewards_leave_the_weights_bit_equal(
    tmp_path: Path, threads: int, family: str
) -> None:
    quick = await run_of(tmp_path / "quick", family, at_once)
    assert quick.asked  # tools were called at all
    slow = await run_of(tmp_path / "slow", family, at_random())
    assert differing(slow.tensors, quick.tensors) == []
    assert (slow.stats, slow.asked) == (quick.stats, quick.asked)


@pytest.mark.long
async def test_delays_leave_a_training_on_branches_bit_equal(tmp_path: Path) -> None:
    quick = await run_of(tmp_path / "quick", "llama", at_once, advantage_estimator="branch")
    slow = await run_of(tmp_path / "slow", "llama", at_random(), advantage_estimator="branch")
    assert differing(slow.tensors, quick.tensors) == []
    assert (slow.stats, slow.asked) == (quick.stats, quick.asked)
    members = await run_of(tmp_path / "members", "llama", at_once, advantage_estimator="turn_group")
    assert quick.stats.decode_steps > 1.5 * members.stats.decode_steps  # branches were played at all


@pytest.mark.long
async def test_without_the_logical_clock_the_same_delays_change_batches_and_bits(tmp_path: Path) -> None:
    together = await run_of(tmp_path / "together", "gpt2", at_once)
    apart = await run_of(tmp_path / "apart", "gpt2", at_random(), scheduling="throughput")
    assert apart.stats.decode_steps > together.stats.decode_steps
    assert differing(apart.tensors, together.tensors)


@pytest.mark.long
async def test_another_seed_or_no_dropout_is_another_run(tmp_path: Path) -> None:
    one = await run_of(tmp_path / "one", "gpt2", at_once)
    others: list[dict[str, Any]] = [{"seed": 1}, {"dropout": False}]
    for change in others:
        other = await run_of(tmp_path / "other", "gpt2", at_once, **change)
        assert len(differing(one.tensors, other.tensors)) > len(one.tensors) / 2


# ---------------------------------------------------------------------------- what a trained run has stored


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
async def test_stored_log_probs_are_those_of_a_fresh_full_forward_after_four_turns(
    tmp_path: Path, family: str
) -> None:
    lines = ["go on", "and then?", "what else?", "thanks"]
    scenarios = [{**scenario, "context": {"script": lines}} for scenario in SCENARIOS]
    trainer = make_trainer(
        tmp_path,
        agent=make_agent(family, history="keep"),  # one row, whatever random weights say
        environment=make_environment(scenarios=scenarios, max_turns=4),
        save_steps=1,
        save_total_limit=3,
    )
    async with trainer:
        await trainer.train()
    base = tiny_model(family).eval()
    policies = [base, *map(load_model, sorted(trainer.run.checkpoints.glob("step-*")))]
    records = [record for record in rollouts(trainer) if record["stage"] == "train"]
    assert len(records) == 3 * 8
    off_policy = 0.0
    for record in records:
        assert len(record["turns"]) == 4
        stored, mask = torch.tensor(record["logprobs"]), torch.tensor(record["mask"]) == 1
        assert {version for version, bit in zip(record["versions"], mask, strict=True) if bit} == {
            record["step"] - 1
        }
        fresh = full_forward(policies[record["step"] - 1], record["token_ids"])
        torch.testing.assert_close(stored[mask], fresh[mask], atol=1e-4, rtol=0)
        assert not stored[~mask].any()
        later = full_forward(policies[record["step"]], record["token_ids"])
        off_policy = max(off_policy, float((stored - later)[mask].abs().max()))
    assert off_policy > 1e-2  # the weights did move: other weights would have been found out


def load_model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint / "model").eval()


def rollouts(trainer: MultiTurnGRPOTrainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trainer.run.rollouts.read_text().splitlines()[1:]]


@torch.no_grad()
def full_forward(model: Any, row: Sequence[int]) -> Tensor:
    """[T] log-prob of each token of the row after those before it; 0 for the first."""
    ids = torch.tensor([row])
    logprobs = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(-1, ids[0, 1:, None])[:, 0]])


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.long), "bf16"])
async def test_at_the_smallest_learning_rates_the_parameters_move(tmp_path: Path, dtype: Any) -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer(), dtype=dtype)
    settings = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=3)
    trainer = make_trainer(
        tmp_path,
        agent=MultiTurnAgent(settings, backend=backend),
        max_steps=20,
        learning_rate=1e-6,
        weight_decay=0.0,  # what moves is moved by the gradient
    )
    async with trainer:
        parameters = dict(trainer.learner.policy.model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        await trainer.train()
        moments = trainer.learner.optimization.optimizer.state
        felt = moved = 0
        for name, parameter in parameters.items():
            has_gradient = moments[parameter]["exp_avg_sq"] > 0
            felt += int(has_gradient.sum())
            moved += int((has_gradient & (parameter.detach() != before[name])).sum())
    assert felt > 0.5 * sum(parameter.numel() for parameter in parameters.values())
    assert moved > 0.95 * felt
