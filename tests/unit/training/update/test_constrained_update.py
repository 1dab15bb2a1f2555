"""The update of constrained replies is that of the policy that acted, by enumeration of all replies."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_learner import LOOSE, derivative, distance, gradient
from tiny_grammars import (
    PROMPT,
    completion_of,
    constraint_of,
    letters,
    letters_model,
    masked_logprobs,
    replies_of,
)

from stateset_agents.backends.grammars import Grammars
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.fused_layers import fused_hidden
from stateset_agents.training.update import policy
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

GRAMMARS = Grammars(letters())
CONSTRAINT = constraint_of()
REPLIES = list(replies_of(GRAMMARS, CONSTRAINT))
LENGTH = 4


def reward_of(reply: tuple[int, ...]) -> float:
    return (hash(reply) % 97) / 97 - 0.3  # ints hash to themselves: the same everywhere


def learner_of(model: Any, *, grammars: Grammars | None = GRAMMARS, **settings: Any) -> Learner:
    settings = {"beta": 0.0, **LOOSE, "loss_type": "dr_grpo", "loss_length": LENGTH, **settings}
    return Learner(model, TrainingConfig(**settings), num_steps=10, exact_logprobs=True, grammars=grammars)


def samples_of(
    model: Any, *, temperature: float = 1.0, advantage_of: Any = None, constraint: Constraint = CONSTRAINT
) -> list[Sample]:
    """Every reply once, its advantage its probability times its reward, so that the loss of all is minus the
    expected reward."""
    made = []
    for reply in REPLIES:
        with torch.no_grad():
            logprobs = masked_logprobs(model, GRAMMARS, constraint, reply, temperature)
        probability = float(logprobs.sum().exp())
        advantage = (
            probability * reward_of(reply) * len(REPLIES) * LENGTH
            if advantage_of is None
            else advantage_of(reply, probability)
        )
        turn = Turn(prompt_ids=PROMPT, completion=completion_of(GRAMMARS, constraint, reply, logprobs))
        trajectory = Trajectory(scenario=Scenario(id="s"), turns=(turn,))
        made.append(Sample(trajectory=trajectory, advantages=(advantage,) * len(reply)))
    return made


def expected_reward(
    model: Any, temperature: float = 1.0, constraint: Constraint = CONSTRAINT
) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for reply in REPLIES:
        logprob = masked_logprobs(model, GRAMMARS, constraint, reply, temperature).sum()
        total = total + logprob.exp() * reward_of(reply)
    return total


def without_constraints(samples: list[Sample]) -> list[Sample]:
    made = []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        free = replace(turn.completion, constraint=None, forced=())
        trajectory = replace(sample.trajectory, turns=(replace(turn, completion=free),))
        made.append(replace(sample, trajectory=trajectory))
    return made


def test_the_probabilities_of_the_grammar_s_replies_sum_to_one() -> None:
    model = letters_model().double()
    with torch.no_grad():
        total = sum(
            masked_logprobs(model, GRAMMARS, CONSTRAINT, reply).sum().exp().item() for reply in REPLIES
        )
    assert len(REPLIES) == 20
    assert total == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("row_layout", ["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_expected_reward(row_layout: str, temperature: float) -> None:
    model = letters_model().double()
    samples = samples_of(model, temperature=temperature)
    settings = {"row_layout": row_layout, "temperature": temperature}
    update, metrics = gradient(learner_of(copy.deepcopy(model), **settings), samples)
    truth = derivative(model, -expected_reward(model, temperature))
    assert distance(update, truth) < 1e-6
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    free, _ = gradient(learner_of(copy.deepcopy(model), **settings), without_constraints(samples))
    assert distance(free, truth) > 0.1


@pytest.mark.parametrize("opener", [(3,), (0, 2)])
@pytest.mark.parametrize("row_layout", ["packed", "padded"])
def test_raised_tokens_are_raised_in_the_update(row_layout: str, opener: tuple[int, ...]) -> None:
    """The gradient is that of the policy with the bias; without it in the update it is another's."""
    model, raised = letters_model().double(), replace(CONSTRAINT, raised=(opener, 1.5))
    samples = samples_of(model, temperature=0.7, constraint=raised)
    settings = {"row_layout": row_layout, "temperature": 0.7}
    update, metrics = gradient(learner_of(copy.deepcopy(model), **settings), samples)
    truth = derivative(model, -expected_reward(model, 0.7, raised))
    assert distance(update, truth) < 1e-6
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert distance(update, derivative(model, -expected_reward(model, 0.7))) > 0.05


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "dapo"])
def test_forced_tokens_are_in_no_mean(loss_type: str) -> None:
    """The reply d c a d is one choice, whatever the grammar spells out behind it."""
    model = letters_model().double()
    samples = samples_of(model, advantage_of=lambda reply, _: reward_of(reply))
    update, _ = gradient(learner_of(copy.deepcopy(model), loss_type=loss_type), samples)
    terms = []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        reply = turn.completion.token_ids
        chosen = [place for place, forced in enumerate(turn.completion.forced) if not forced]
        logprobs = masked_logprobs(model, GRAMMARS, CONSTRAINT, reply)[chosen]
        terms.append(-sample.advantages[0] * logprobs)
    if loss_type == "dapo":
        loss = torch.cat(terms).mean()
    else:
        loss = torch.stack([term.mean() for term in terms]).mean()
    assert distance(update, derivative(model, loss)) < 1e-6
    assert sum(len(term) for term in terms) < sum(len(reply) for reply in REPLIES)


def test_the_kl_is_between_the_two_policies_that_would_act() -> None:
    model, other = letters_model().double(), letters_model(seed=1).double()
    samples = samples_of(model)
    learner = learner_of(copy.deepcopy(model), beta=0.5, kl_estimator="k3")
    assert learner.reference is not None
    learner.reference.model.load_state_dict(other.state_dict())
    _, metrics = gradient(learner, samples)
    gaps = []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        chosen = [place for place, forced in enumerate(turn.completion.forced) if not forced]
        with torch.no_grad():
            pair = [
                masked_logprobs(net, GRAMMARS, CONSTRAINT, turn.completion.token_ids)
                for net in (other, model)
            ]
        gap = (pair[0] - pair[1])[chosen]
        gaps.append(gap.exp() - gap - 1)
    expected = float(torch.cat(gaps).mean())
    assert metrics["kl/reference"] == pytest.approx(expected, rel=1e-4)


def test_an_entropy_bonus_is_of_what_was_allowed() -> None:
    model = letters_model().double()
    samples = samples_of(model, advantage_of=lambda *_: 0.0)
    update, _ = gradient(learner_of(copy.deepcopy(model), entropy_coef=0.3), samples)
    entropies = []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        reply = turn.completion.token_ids
        logits = model(input_ids=torch.tensor([[*PROMPT, *reply]])).logits[0, len(PROMPT) - 1 : -1]
        masks = GRAMMARS.replay(CONSTRAINT, reply)
        for row, (word,) in zip(logits, masks, strict=True):
            allowed = [token for token in range(6) if int(word) >> token & 1]
            if len(allowed) > 1:
                p = torch.softmax(row[allowed], 0)
                entropies.append(-(p * p.log()).sum())
    loss = -0.3 * torch.stack(entropies).sum() / (len(samples) * LENGTH)
    assert distance(update, derivative(model, loss)) < 1e-6


def test_two_passes_clip_by_the_masked_ratio() -> None:
    model = letters_model().double()
    learner = learner_of(copy.deepcopy(model), num_iterations=2, learning_rate=1e-4)
    _, metrics = gradient(learner, samples_of(model, advantage_of=lambda reply, _: reward_of(reply)))
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/ratio_max"] < 1.5


def test_what_an_earlier_policy_sampled_is_weighed_under_the_same_masks() -> None:
    """`max_staleness`: pi_old over the sampler, both among what was allowed, and forced tokens have none."""
    model, sampler = letters_model().double(), letters_model(seed=1).double()
    samples = samples_of(sampler, advantage_of=lambda reply, _: reward_of(reply))
    update, metrics = gradient(
        learner_of(copy.deepcopy(model), max_staleness=1, importance="token", importance_cap=1.25), samples
    )
    losses, weights = [], []
    for sample in samples:
        (turn,) = sample.trajectory.turns
        reply = turn.completion.token_ids
        chosen = [place for place, forced in enumerate(turn.completion.forced) if not forced]
        now = masked_logprobs(model, GRAMMARS, CONSTRAINT, reply)[chosen]
        stored = torch.tensor(turn.completion.logprobs, dtype=torch.float64)[chosen]
        weights.append((now.detach() - stored).exp().clamp(max=1.25))
        losses.append(-sample.advantages[0] * (weights[-1] * now).sum())
    loss = torch.stack(losses).sum() / (len(samples) * LENGTH)
    assert distance(update, derivative(model, loss)) < 1e-6
    assert metrics["policy/weight"] == pytest.approx(float(torch.cat(weights).mean()), rel=1e-5)
    assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_fused_layers_give_the_gradient_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, where they round as the others do."""
    samples = samples_of(letters_model(), advantage_of=lambda reply, _: reward_of(reply))
    plain, known = gradient(learner_of(letters_model(), row_layout="packed"), samples)
    fused_calls = []

    def fused(*arguments: Any) -> Any:
        fused_calls.append(1)
        return fused_hidden(*arguments, dtype=torch.float32)

    monkeypatch.setattr(policy, "fused_hidden", fused)
    learner = learner_of(letters_model(), row_layout="packed")
    learner.policy._fuses = True
    assert learner.policy.fuses
    update, metrics = gradient(learner, samples)
    assert fused_calls
    assert distance(update, plain) < 1e-5
    for name in ("policy/first_ratio_max", "policy/entropy"):
        assert metrics[name] == pytest.approx(known[name], abs=1e-5)


def test_recorded_logprobs_of_forced_tokens_are_zero() -> None:
    model = letters_model().double()
    learner = learner_of(model, log_learner_logprobs=True)
    learned = learner.learn_from(samples_of(model), step=0)
    assert learned.logprobs is not None
    for reply, tokens in zip(REPLIES, learned.logprobs, strict=True):
        assert tokens is not None
        assert len(tokens.old) == len(reply)
        if reply == (3, 2, 0, 3, 5):
            assert tokens.old[0] < 0
            assert tokens.old[1:] == (0.0,) * 4


def test_an_update_without_grammars_refuses_constrained_replies() -> None:
    model = letters_model().double()
    samples = samples_of(model)
    with pytest.raises(ConfigurationError, match="this update knows none"):
        learner_of(copy.deepcopy(model), grammars=None).update(samples, step=0)


def test_a_token_that_the_grammar_forbids_is_an_error_that_names_it() -> None:
    with pytest.raises(BackendError, match=r"the token 3 \('d'\) where its grammar forbids it"):
        GRAMMARS.replay(CONSTRAINT, (2, 3))


def test_another_version_of_the_library_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"llguidance 0\.0\.1, and here is"):
        GRAMMARS.matcher(replace(CONSTRAINT, version="0.0.1"))


def test_a_grammar_that_cannot_be_read_is_refused_in_the_library_s_words() -> None:
    with pytest.raises(ConfigurationError, match="cannot follow this grammar"):
        GRAMMARS.matcher(constraint_of("start: missing"))
