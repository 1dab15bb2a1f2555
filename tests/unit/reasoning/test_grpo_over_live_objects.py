"""GRPOTrainer over a tiny live model: its groups, its loss against the package's own, and what it learns."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from several import in_two
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, plain_logits, plain_logprobs

import stateset_agents
from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.core.reward import RewardFunction, RewardResult
from stateset_agents.reasoning import (
    GRPOTrainer,
    batch_generate_responses,
    normalize_rewards_per_group,
    setup_distributed_grpo,
)
from stateset_agents.reasoning.trainer import Group, samples_of
from stateset_agents.rewards.reasoning import DeepSeekRewardFunction
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

PROMPTS = ["ab", "cde"]
SMALL = {"group_size": 4, "max_length": 12}


@asynccontextmanager
async def trainer_of(reward: Any = even_share, **settings: Any) -> AsyncIterator[GRPOTrainer]:
    """Over a tiny random Llama, and a reference that is another one."""
    reference = None
    if settings.pop("other_reference", False):
        reference = tiny_model("llama")
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.9)
    tokenizer = tiny_tokenizer().hf
    async with GRPOTrainer(
        tiny_model("llama"), reference, tokenizer, reward, **{**SMALL, **settings}
    ) as trainer:
        yield trainer


def weights(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy_model.parameters()]


# ------------------------------------------------------------------------------ groups


async def test_a_group_has_replies_rewards_and_advantages_of_one_prompt() -> None:
    async with trainer_of() as trainer:
        groups = await trainer.generate_groups(PROMPTS)
    keys = {"prompt", "prompt_ids", "responses", "response_ids", "rewards", "advantages", "old_logprobs"}
    assert [group["prompt"] for group in groups] == PROMPTS
    tokenizer = tiny_tokenizer()
    for group in groups:
        assert group.keys() == keys
        assert group["prompt_ids"] == [256, *tokenizer.encode(group["prompt"])]
        assert {len(group[key]) for key in keys - {"prompt", "prompt_ids"}} == {4}  # type: ignore[literal-required]  # a TypedDict's own
        for text, ids, logprobs in zip(
            group["responses"], group["response_ids"], group["old_logprobs"], strict=True
        ):
            assert text == tokenizer.decode(ids)
            assert len(ids) == len(logprobs) <= 12 - len(group["prompt_ids"])
        [expected] = normalize_rewards_per_group([group["rewards"]], clip=None)
        assert group["advantages"] == pytest.approx(expected)
    assert len({tuple(ids) for group in groups for ids in group["response_ids"]}) > 4  # samples, no copies


async def test_a_prompt_over_half_of_the_length_is_refused() -> None:
    async with trainer_of() as trainer:
        assert await trainer.generate_groups(["abcde"])  # with the token that begins texts, six
        with pytest.raises(ConfigurationError, match=r"a prompt must have 1 to 6 tokens, got 7: 'abcdef'"):
            await trainer.generate_groups(["abcdef"])
        with pytest.raises(ConfigurationError, match="got 0: ''"):
            await trainer.generate_groups([""])
        with pytest.raises(ConfigurationError, match="a prompt must be text or a Scenario, got int"):
            await trainer.generate_groups([5])  # type: ignore[list-item]  # the mistake


async def test_the_token_that_begins_texts_stands_once() -> None:
    async with trainer_of() as trainer:
        [plain, written] = await trainer.generate_groups(["ab", "<|bos|>ab"])
    assert plain["prompt_ids"] == written["prompt_ids"]


async def test_rewards_get_the_prompt_the_response_and_the_truth() -> None:
    seen: list[tuple[str, str, Any]] = []

    def reward(prompt: str, response: str, *, truth: Any) -> float:
        seen.append((prompt, response, truth))
        return float(len(response))

    async with trainer_of(reward, max_length=24) as trainer:
        prompt = Scenario(id="sum", opening="ab<think>", context={"answer": 5})
        [group] = await trainer.generate_groups([prompt])
    assert sorted(seen) == sorted(("ab<think>", text, {"answer": 5}) for text in group["responses"])
    assert group["rewards"] == [float(len(text)) for text in group["responses"]]


async def test_an_object_with_compute_reward_is_called_by_it() -> None:
    async with trainer_of(DeepSeekRewardFunction()) as trainer:
        [group] = await trainer.generate_groups([Scenario(id="sum", opening="2+3?", context={"answer": 5})])
    assert group["rewards"] == [0.0] * 4  # a random model's
    assert group["advantages"] == [0.0] * 4


class _Half(RewardFunction):
    """Fails for the first member."""

    name = "half"

    async def score(self, trajectory: Trajectory) -> RewardResult:
        if trajectory.member == 0:
            raise OSError("the judge is away")
        return RewardResult(score=float(trajectory.member))


async def test_a_reply_without_a_reward_does_not_train() -> None:
    async with trainer_of(_Half()) as trainer:
        [group] = await trainer.generate_groups(["ab"])
        assert group["rewards"] == [None, 1.0, 2.0, 3.0]
        assert group["advantages"] == pytest.approx([None, -math.sqrt(1.5), 0.0, math.sqrt(1.5)])
        assert len(samples_of(group)) == 3
        assert trainer.compute_loss(group)[1]["mean_reward"] == 2.0


@pytest.mark.long
async def test_replies_are_regrouped_by_prompt_one_in_each_slot() -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer().hf
    before = [parameter.clone() for parameter in model.parameters()]
    settings = {"max_length": 12, "temperature": 1.0}
    groups = await batch_generate_responses(model, tokenizer, PROMPTS, 3, 2, **settings)
    assert [len(group) for group in groups] == [3, 3]
    assert groups == await batch_generate_responses(model, tokenizer, PROMPTS, 3, 32, **settings)
    assert groups != await batch_generate_responses(model, tokenizer, PROMPTS, 3, 32, **settings, seed=1)
    alone = await batch_generate_responses(model, tokenizer, PROMPTS[:1], 3, **settings)
    assert alone == groups[:1]
    likeliest = await batch_generate_responses(model, tokenizer, PROMPTS, 3, top_k=1, **settings)
    assert all(len(set(group)) == 1 for group in likeliest)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


async def test_at_most_batch_size_replies_are_sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trainer_of(batch_size=3) as trainer:
        live = peak = 0
        generate = trainer._backend.generate

        async def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal live, peak
            live += 1
            peak = max(peak, live)
            try:
                return await generate(*arguments, **named)
            finally:
                live -= 1

        monkeypatch.setattr(trainer._backend, "generate", counted)
        await trainer.generate_groups(PROMPTS)
    assert peak == 3


@pytest.mark.parametrize(
    ("rewards", "clip", "expected"),
    [
        ([1.0, 0.0], 3.0, [1.0, -1.0]),
        ([0.8, 0.5, 0.9, 0.6], 3.0, [0.632456, -1.264911, 1.264911, -0.632456]),
        ([1.0, None, 0.0], 3.0, [1.0, None, -1.0]),
        ([0.5] * 4, 3.0, [0.0] * 4),
        ([1.0] + [0.0] * 9, 3.0, [3.0] + [-1 / 3] * 9),  # sqrt(9): ten members never reach beyond it
        ([1.0] + [0.0] * 11, None, [math.sqrt(11)] + [-math.sqrt(1 / 11)] * 11),
        ([1.0] + [0.0] * 11, 3.0, [3.0] + [-math.sqrt(1 / 11)] * 11),
    ],
)
def test_rewards_are_normalised_in_their_group(rewards: Any, clip: float | None, expected: Any) -> None:
    assert normalize_rewards_per_group([rewards], clip=clip)[0] == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------ the loss


def by_hand(trainer: GRPOTrainer, reference: Any, group: Group, **more: Any) -> dict[str, float]:
    """algorithms.losses' own figures, on log-probs from plain forwards of transformers."""
    samples, temperature = samples_of(group), trainer.config.temperature
    trajectories = [sample.trajectory for sample in samples]
    lengths = torch.tensor([trajectory.num_agent_tokens for trajectory in trajectories])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def logprobs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([plain_logprobs(model, one, temperature) for one in trajectories])

    now = logprobs(trainer.policy_model)
    stored = torch.cat([torch.tensor(t.turns[0].completion.logprobs) for t in trajectories])
    behaviour = None
    if more.pop("is_weighted", False):
        more["weight_cap"] = 2.0
        stored, behaviour = now, stored
    output = policy_loss(
        "grpo",
        LossInputs(
            now,
            stored,
            torch.cat([torch.tensor(sample.advantages) for sample in samples]),
            ids,
            Denominators.of(lengths),
            behaviour_logprobs=behaviour,
            ref_logprobs=logprobs(reference),
        ),
        clip_ratio=0.2,
        beta=trainer.config.beta,
        **more,
    )
    numbers = output.metrics.to_dict()
    clipped = numbers["policy/clip_fraction_low"] + numbers["policy/clip_fraction_high"]
    return {
        "loss": float(output.loss),
        "pg_loss": numbers["loss/policy"],
        "kl_penalty": numbers["loss/kl"],
        "clip_fraction": clipped,
    }


async def test_the_loss_is_that_of_algorithms_on_the_same_numbers() -> None:
    async with trainer_of(other_reference=True, kl_coef=0.5) as trainer:
        [group] = await trainer.generate_groups(["ab"])
        dice = torch.Generator().manual_seed(0)
        group["old_logprobs"] = [
            (torch.tensor(row) + 0.3 * torch.randn(len(row), generator=dice)).tolist()
            for row in group["old_logprobs"]
        ]
        reference = trainer.learner.reference
        assert reference is not None
        wanted = by_hand(trainer, reference.model, group)
        loss, metrics = trainer.compute_loss(group)
    assert metrics.keys() == {"pg_loss", "kl_penalty", "clip_fraction", "mean_reward"}
    assert wanted["clip_fraction"] > 0
    assert wanted["kl_penalty"] > 0
    for name, value in wanted.items():
        assert {**metrics, "loss": float(loss.detach())}[name] == pytest.approx(value, abs=2e-5), name
    rewards = [reward for reward in group["rewards"] if reward is not None]
    assert metrics["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert loss.requires_grad


async def test_the_ratio_is_1_on_the_first_pass() -> None:
    async with trainer_of(kl_coef=0.0) as trainer:
        [group] = await trainer.generate_groups(["ab"])
        _, metrics = trainer.compute_loss(group)
        # -A at ratio 1, averaged over tokens, then over replies whose advantages sum to 0
        assert metrics["pg_loss"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["clip_fraction"] == 0.0
        assert trainer.learner.update(samples_of(group), step=0)["policy/first_ratio_max"] == pytest.approx(
            1.0, abs=1e-4
        )


async def test_without_a_kl_coefficient_there_is_no_reference() -> None:
    async with trainer_of(kl_coef=0.0) as trainer:
        assert trainer.learner.reference is None
    with pytest.raises(ConfigurationError, match=r"no use here \(beta is 0\): leave it out"):
        async with trainer_of(kl_coef=0.0, other_reference=True):
            pass


async def test_the_reference_is_the_model_that_was_given_or_a_copy_of_the_start() -> None:
    async with trainer_of() as trainer:
        assert trainer.learner.reference is not None
        copied = trainer.learner.reference.model
        assert copied is not trainer.policy_model
        assert all(
            torch.equal(*pair)
            for pair in zip(copied.parameters(), trainer.policy_model.parameters(), strict=True)
        )
    model, given = tiny_model("llama"), tiny_model("llama")
    trainer = GRPOTrainer(model, given, tiny_tokenizer().hf, even_share)
    assert trainer.learner.reference is not None
    assert trainer.learner.reference.model is given
    assert trainer.policy_model is model
    assert not any(parameter.requires_grad for parameter in given.parameters())
    with pytest.raises(ConfigurationError, match="the reference is another architecture"):
        GRPOTrainer(tiny_model("llama"), tiny_model("gpt2"), tiny_tokenizer().hf, even_share)


async def test_a_skip_of_0_skips_none_and_a_high_one_all() -> None:
    async with trainer_of() as trainer:
        [group] = await trainer.generate_groups(["ab"])
        plain, _ = trainer.compute_loss(group)
        for skip, same in ((1e-9, True), (0.9, False)):
            copied = copy.copy(trainer.learner._objective)
            copied.config = trainer.config.model_copy(update={"advantage_skip": skip})
            trainer.learner._objective = copied
            assert torch.equal(trainer.compute_loss(group)[0], plain) is same
    async with trainer_of(advantage_skip=100.0) as trainer:
        before = weights(trainer)
        [group] = await trainer.generate_groups(["ab"])
        loss, _ = trainer.compute_loss(group)
        assert isinstance(loss, torch.Tensor)
        assert float(loss.detach()) == 0.0
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        assert all(not bool(p.grad.any()) for p in trainer.policy_model.parameters() if p.grad is not None)
        metrics = await trainer.train_step(["ab"])
        assert metrics["skipped"] == 1.0
        assert all(torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True))


@pytest.mark.long
async def test_a_skip_leaves_out_exactly_the_replies_near_0() -> None:
    async with trainer_of(_Half(), kl_coef=0.0, advantage_skip=0.1) as trainer:
        [group] = await trainer.generate_groups(["ab"])  # advantages None, -1.22, 0, 1.22
        group["old_logprobs"] = [[value - 0.1 for value in row] for row in group["old_logprobs"]]
        loss = trainer.compute_loss(group)[0]
        assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)  # the two others, as far apart
        group["advantages"] = [None, 0.05, 0.05, 1.0]
        assert float(trainer.compute_loss(group)[0]) == pytest.approx(-math.exp(0.1) / 3, abs=1e-4)
        group["advantages"] = [None, 0.15, 0.05, 1.0]
        assert float(trainer.compute_loss(group)[0]) == pytest.approx(-1.15 * math.exp(0.1) / 3, abs=1e-4)


@pytest.mark.parametrize("truncation", [{"top_k": 50}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.9}])
async def test_truncated_replies_are_learned_among_the_tokens_that_were_kept(
    truncation: dict[str, float],
) -> None:
    async with trainer_of(**truncation) as trainer:
        [group] = await trainer.generate_groups(["ab"])
        masses, stored_logprobs = [], []
        for sample in samples_of(group):
            stored = torch.tensor(sample.trajectory.turns[0].completion.logprobs)
            with torch.no_grad():
                full = plain_logprobs(trainer.policy_model, sample.trajectory, 0.8)
                probs = plain_logits(trainer.policy_model, sample.trajectory, 0.8).softmax(-1)
            kept = _kept_mass(probs, **truncation)
            assert torch.allclose(full - stored, kept.log(), atol=1e-4)
            masses.append(kept)
            stored_logprobs += stored.tolist()
        assert torch.cat(masses).min() < 0.99
        (batch,) = trainer.learner._micro_batches(samples_of(group))
        scored = trainer.learner.policy.score(batch).logprobs.tolist()  # in the order of the rows
        assert sorted(scored) == pytest.approx(sorted(stored_logprobs), abs=1e-5)
        metrics = trainer.learner.update(samples_of(group), step=0)
        assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert "policy/weight" not in metrics


def _kept_mass(probs: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """[N] the share of each distribution that can be sampled, worked out token by token."""
    masses = []
    for row in probs:
        ordered = row.sort(descending=True).values[: top_k or None]
        total, kept = float(ordered.sum()), 0.0
        for value in ordered:
            if top_p < 1 and kept / total >= top_p:
                break
            kept += float(value)
        masses.append(kept)
    return torch.tensor(masses)


# ------------------------------------------------------------------------------ learning


@pytest.mark.long
@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_a_toy_task_is_learned(iterations: int) -> None:
    settings = {"group_size": 8, "learning_rate": 1e-2, "num_iterations": iterations, "temperature": 1.0}
    async with trainer_of(**settings) as trainer:
        curve = [(await trainer.train_step(PROMPTS))["mean_reward"] for _ in range(30)]
        assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.25
        # what samples is what was trained
        [group] = await trainer.generate_groups(["ab"])
        sample = samples_of(group)[0].trajectory
        with torch.no_grad():
            full = plain_logprobs(trainer.policy_model, sample)
        assert group["old_logprobs"][0] == pytest.approx(full.tolist(), abs=1e-3)


async def test_a_step_tells_what_it_did() -> None:
    async with trainer_of(other_reference=True) as trainer:
        before = weights(trainer)
        metrics = await trainer.train_step(PROMPTS)
        assert metrics["loss"] == pytest.approx(metrics["pg_loss"] + metrics["kl_penalty"])
        assert metrics["kl_penalty"] > 0
        assert metrics["grad_norm"] > 0
        assert (metrics["skipped"], metrics["clip_fraction"]) == (0.0, 0.0)
        assert not all(torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True))
        with pytest.raises(ConfigurationError, match="at least one prompt"):
            await trainer.train_step([])


async def test_the_same_seed_gives_the_same_replies_and_another_others() -> None:
    def said(groups: list[Group]) -> list[list[str]]:
        return [group["responses"] for group in groups]

    seen = []
    for seed in (0, 0, 1):
        async with trainer_of(seed=seed) as trainer:
            seen.append([said(await trainer.generate_groups(PROMPTS)) for _ in range(2)])
    assert seen[0] == seen[1] != seen[2]
    assert seen[0][0] != seen[0][1]


async def test_adamw_has_the_source_s_settings_and_others_take_their_place() -> None:
    async with trainer_of() as trainer:
        [group, *_] = trainer.learner.optimization.optimizer.param_groups
        assert (group["betas"], trainer.config.learning_rate, trainer.config.max_grad_norm) == (
            (0.9, 0.95),
            5e-6,
            1,
        )
        assert (trainer.config.clip_ratio, trainer.config.beta, trainer.config.temperature) == (
            0.2,
            0.04,
            0.8,
        )
    async with trainer_of(
        betas=(0.5, 0.6), max_grad_norm=0.1, advantage_clip=0.5, clip_epsilon=0.3
    ) as trainer:
        [group, *_] = trainer.learner.optimization.optimizer.param_groups
        assert (group["betas"], trainer.config.max_grad_norm, trainer.config.clip_ratio) == (
            (0.5, 0.6),
            0.1,
            0.3,
        )
        [played] = await trainer.generate_groups(["ab"])
        assert max(abs(value) for value in played["advantages"] if value is not None) == 0.5


async def test_after_its_end_nothing_is_sampled() -> None:
    async with trainer_of() as trainer:
        await trainer.generate_groups(["ab"])
    with pytest.raises((BackendError, ConfigurationError)):
        await trainer.train_step(["ab"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size must be a whole number from 1 on, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on, got 0"),
        ({"max_length": 1}, "max_length must be a whole number from 2 on, got 1"),
        ({"top_k": -1}, "top_k must be a whole number from 0 on, got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0: greedy replies are all alike"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        GRPOTrainer(tiny_model("llama"), None, tiny_tokenizer().hf, even_share, **settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_source_s_names_are_not_the_package_s() -> None:
    assert not hasattr(stateset_agents, "GRPOTrainer")
    for named in (GRPOTrainer, batch_generate_responses, normalize_rewards_per_group, setup_distributed_grpo):
        assert named.__doc__ is not None
        assert (
            "group relative policy optimisation" in named.__doc__.splitlines()[0].lower()
            or "GRPO" in (named.__doc__.splitlines()[0])
        )


# ------------------------------------------------------------------------------ several processes


def _trained_here() -> tuple[int, list[float], list[float]]:
    import asyncio
    import os

    async def train() -> tuple[int, list[float], list[float]]:
        processes = setup_distributed_grpo(2, int(os.environ["RANK"]))
        model = tiny_model("llama")
        settings = {**SMALL, "learning_rate": 1e-2, "processes": processes}
        async with GRPOTrainer(model, None, tiny_tokenizer().hf, even_share, **settings) as trainer:
            rewards = [(await trainer.train_step(PROMPTS))["mean_reward"] for _ in range(2)]
        return processes.rank, rewards, next(model.parameters()).flatten().tolist()

    return asyncio.run(train())


@pytest.mark.long
def test_two_processes_train_one_policy() -> None:
    first, second = in_two(_trained_here)
    assert (first[0], second[0]) == (0, 1)
    assert first[1:] == second[1:]
    assert first[2] != next(tiny_model("llama").parameters()).flatten().tolist()


def test_one_process_needs_no_launcher() -> None:
    assert setup_distributed_grpo(1, 0).is_alone


@pytest.mark.parametrize(
    ("world_size", "local_rank", "message"),
    [
        (0, 0, "world_size must be a whole number from 1 on, got 0"),
        (2, 2, "local_rank must be 0 to 1, got 2"),
        (2, 0, "MASTER_ADDR and MASTER_PORT must say where the processes meet"),
    ],
)
def test_processes_that_cannot_meet_are_told_why(
    monkeypatch: pytest.MonkeyPatch, world_size: int, local_rank: int, message: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=message):
        setup_distributed_grpo(world_size, local_rank)
