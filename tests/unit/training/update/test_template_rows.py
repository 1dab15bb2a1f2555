"""Conversations with TRL's templates and ours train: every sampled token once, where it was sampled.

A tiny random model speaks with each template, in both modes of history, through the engine; the gradient of a
step is set against plain transformers, all rows side by side. Eleven templates, of every kind, in the suite;
all 73 in `make test-templates`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from chat_templates import ALL_NAMES, IN_SUITE, chosen, trl_template
from template_talks import opening_of, play, sane_talk, tools_of
from tiny_models import BLOCKS
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample, trained_turns
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory

NUM_TURNS, MEMBERS = 4, 2
MODES = ("template", "keep")
WITH_GRADIENT = ("qwen3", "gptoss", "gemma4_v5", "qwen2_5", "chatml")


class RaggedTalk:
    """The user speaks, a tool answers where there are tools (whatever the agent wrote), the user speaks."""

    def __init__(self, name: str) -> None:
        self.opening = opening_of(name)
        self.tools = tools_of(name)
        self._turn = 0

    async def step(self, reply: Message) -> Observation:
        self._turn += 1
        if self._turn == NUM_TURNS:
            return Observation(terminated=True)
        if self._turn == 2 and self.tools:
            ids = [call.id for call in reply.tool_calls] or ["call_1_0"]
            results = [Message(role="tool", content="It left.", name="look", tool_call_id=id) for id in ids]
            return Observation(messages=tuple(results))
        return Observation(messages=(Message(role="user", content="hm " * self._turn),))

    async def outcome(self) -> Outcome:
        return Outcome(reward=1.0)

    async def close(self) -> None: ...


class RaggedTalks:
    local = True

    def __init__(self, name: str) -> None:
        self._name = name

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(id=self._name)]

    async def start(self, scenario: Scenario, seed: int) -> RaggedTalk:
        return RaggedTalk(self._name)


def model_for(name: str) -> LlamaForCausalLM:
    """A random one with as many tokens as the template's tokenizer."""
    hf = trl_template(name).tokenizer.hf
    sizes = {**BLOCKS, "max_position_embeddings": 8192, "num_key_value_heads": 2}
    special = {"bos_token_id": hf.bos_token_id, "eos_token_id": hf.eos_token_id}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(hf), **sizes, **special)).eval()


async def sampled(name: str, history: str, model: LlamaForCausalLM) -> tuple[Trajectory, ...]:
    template = trl_template(name)
    backend = HuggingFaceBackend(model, template.tokenizer, copy_model=True)
    settings = AgentConfig(history=history, max_new_tokens=8, model_name="tiny")
    agent = MultiTurnAgent(settings, backend=backend)
    agent._template = template  # loading one takes 40 ms
    environment = RaggedTalks(name)
    async with agent:
        engine = ComputationalEngine(agent, environment, EnvironmentReward(), num_generations=MEMBERS)
        (group,) = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return group.trajectories


def row_logprobs(model: LlamaForCausalLM, rows: Sequence[Sequence[int]]) -> Tensor:
    """[R, T-1] log-probs of each row's tokens but the first, by plain transformers, padded at the right."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    attended = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def expect_sampled_once(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        trained = sum(sum(row.action_mask) for row in trajectory.rows)
        assert trained == trajectory.num_agent_tokens
        turns = [turn.number for row in trajectory.rows for turn in trained_turns(row)]
        assert sorted(turns) == list(range(len(trajectory.turns)))


@torch.no_grad()
def expect_fresh_logprobs(model: LlamaForCausalLM, trajectories: Sequence[Trajectory]) -> None:
    rows = [row for trajectory in trajectories for row in trajectory.rows]
    fresh = row_logprobs(model, [row.token_ids for row in rows])
    for row, logprobs in zip(rows, fresh, strict=True):
        mask = torch.tensor(row.action_mask[1:], dtype=torch.bool)
        stored = torch.tensor(row.logprobs[1:])[mask]
        assert (stored - logprobs[: len(mask)][mask]).abs().max() < 1e-4


def turn_logprobs(model: LlamaForCausalLM, talks: Sequence[Trajectory]) -> list[list[Tensor]]:
    """[talks][turns] log-probs [T] of what was sampled, in the row in which it trains."""
    rows = [(at, row) for at, talk in enumerate(talks) for row in talk.rows]
    found: list[dict[int, Tensor]] = [{} for _ in talks]
    for (at, row), logprobs in zip(
        rows, row_logprobs(model, [row.token_ids for _, row in rows]), strict=True
    ):
        end = 0
        for place, (number, turn) in enumerate(zip(row.indices, row.turns, strict=True)):
            start = end + len(turn.prompt_ids)
            end = start + len(turn.completion.token_ids)
            if place >= row.trains_from:
                found[at][number] = logprobs[start - 1 : end - 1]
    return [[of[number] for number in range(len(of))] for of in found]


@torch.no_grad()
def samples_of(model: LlamaForCausalLM, talks: Sequence[Trajectory]) -> list[Sample]:
    """With an advantage for each token, and log-probs so far from the model's own that the clip acts."""
    dice = torch.Generator().manual_seed(2)
    samples = []
    for talk, logprobs in zip(talks, turn_logprobs(model, talks), strict=True):
        turns = []
        for turn, own in zip(talk.turns, logprobs, strict=True):
            old = own + 0.3 * torch.randn(own.shape, generator=dice)
            turns.append(replace(turn, completion=replace(turn.completion, logprobs=tuple(old.tolist()))))
        advantages = torch.randn(talk.num_agent_tokens, generator=dice).tolist()
        samples.append(Sample(trajectory=replace(talk, turns=tuple(turns)), advantages=tuple(advantages)))
    return samples


def plain_gradient(model: LlamaForCausalLM, samples: Sequence[Sample]) -> list[Tensor]:
    """Of the clipped loss, averaged over all sampled tokens."""
    talks = [sample.trajectory for sample in samples]
    now = torch.cat([turn for talk in turn_logprobs(model, talks) for turn in talk])
    old = torch.tensor([p for talk in talks for turn in talk.turns for p in turn.completion.logprobs])
    advantages = torch.tensor([advantage for sample in samples for advantage in sample.advantages])
    ratio = (now - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def learner_of(model: LlamaForCausalLM) -> Learner:
    settings = {"loss_type": "dapo", "clip_ratio": 0.2, "clip_ratio_high": 0.2}
    config = TrainingConfig(max_grad_norm=1e9, beta=0.0, per_device_train_batch_size=4, **settings)
    return Learner(copy.deepcopy(model), config, num_steps=9, exact_logprobs=True)


def step_gradient(learner: Learner, samples: Sequence[Sample]) -> list[Tensor]:
    """What the update's optimiser step saw."""
    seen: list[Tensor] = []
    parameters = list(learner.policy.model.parameters())
    hook = learner.optimization.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(parameter.grad.clone() for parameter in parameters)
    )
    learner.update(samples, step=1)
    hook.remove()
    return seen


@pytest.mark.parametrize("name", chosen(IN_SUITE, ALL_NAMES))
@pytest.mark.first(1)
async def test_sampled_tokens_train_once_with_the_log_probs_of_their_rows(name: str) -> None:
    model = model_for(name)
    for history in MODES:
        trajectories = await sampled(name, history, model)
        assert [len(trajectory.turns) for trajectory in trajectories] == [NUM_TURNS] * MEMBERS
        if history == "keep":
            assert [len(trajectory.rows) for trajectory in trajectories] == [1] * MEMBERS
        expect_sampled_once(trajectories)
        expect_fresh_logprobs(model, trajectories)


@pytest.mark.parametrize(
    ("name", "history"),
    chosen([*((name, "template") for name in WITH_GRADIENT), ("qwen3", "keep")], product(ALL_NAMES, MODES)),
)
@pytest.mark.first(1)
async def test_a_step_s_gradient_is_that_of_plain_padded_transformers(name: str, history: str) -> None:
    """Of a talk with thoughts, a call and its result, and of one that a random model had."""
    model = model_for(name)
    talks = [await play(name, sane_talk(name), history), *(await sampled(name, history, model))[:1]]
    exact = copy.deepcopy(model).double()
    samples, learner = samples_of(exact, talks), learner_of(exact)
    trained = [
        (conversation, place)
        for batch in learner._micro_batches(samples)
        for conversation, place in zip(batch.trajectory_ids.tolist(), batch.places.tolist(), strict=True)
    ]
    tokens = [talk.num_agent_tokens for talk in talks]
    assert sorted(trained) == [(at, place) for at in range(2) for place in range(tokens[at])]
    found, expected = step_gradient(learner, samples), plain_gradient(exact, samples)
    difference = sum((a - b).square().sum() for a, b in zip(found, expected, strict=True)).sqrt()
    norm = sum(b.square().sum() for b in expected).sqrt()
    assert norm > 1e-3
    assert difference / norm < 1e-6  # stored log-probs and advantages are fp32
