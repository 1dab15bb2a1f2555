"""Conversations of several rows: every sampled token trains once, in the context in which it was sampled.

Rows are set against one padded forward of plain transformers; against conversations of one row, for a model
that cannot see what they left out; and against themselves, cut in other ways.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import BLOCKS, SIZES, tiny_model
from tiny_training import plain_logprobs, talk
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2Config, Qwen2ForCausalLM

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.layout import packed_layouts, units_of_conversations
from stateset_agents.training.update.batch import Sample, rows_of
from stateset_agents.training.update.learner import Learner

CUTS = [
    {"micro_batch_tokens": 10_000, "per_device_train_batch_size": 4},
    {"micro_batch_tokens": 1},
    {"micro_batch_tokens": 30},
    {"micro_batch_tokens": 40, "row_layout": "padded"},
    {"num_generations": 2, "per_device_train_batch_size": 1, "row_layout": "padded"},
]


def ids(length, seed):
    return torch.randint(250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def conversations():
    """Two rows, three, a tree whose rows share two turns, a tree and a row beside it, and one row."""
    system, thought, words, user = ids(6, 0), ids(5, 1), ids(3, 2), ids(4, 3)
    return [
        talk((system, [*thought, *words]), ([*system, *words, *user], ids(7, 4)), follows=(None, None)),
        talk(
            (system, [*ids(4, 5), *words]),
            ([*system, *words, *user], [*ids(3, 6), *words]),
            ([7, 8], ids(2, 7)),
            ([*system, *words, *user, *words, *user], ids(6, 8)),
            follows=(None, None, -1, None),
        ),
        talk(
            (system, ids(3, 9)),
            ([1], ids(2, 10)),
            ([2, 3], ids(4, 11)),
            ([4], ids(5, 12)),
            follows=(-1, -1, -1, 1),
        ),
        talk(
            (system, ids(3, 13)),
            (user, ids(2, 14)),
            (ids(9, 15), ids(4, 16)),
            ([5], [6]),
            follows=(-1, 0, None, 0),
        ),
        talk((system, ids(3, 17)), (user, ids(5, 18))),
    ]


def samples_of(model, talks, drift=0.3):
    """With an advantage of its own for each token, and log-probs so far off that the clip acts."""
    dice, made = torch.Generator().manual_seed(1), []
    for one in talks:
        with torch.no_grad():
            own = plain_logprobs(model, one)
        noisy = iter((own + drift * torch.randn(len(own), generator=dice)).tolist())
        turns = [
            replace(
                turn,
                completion=replace(
                    turn.completion, logprobs=tuple(next(noisy) for _ in turn.completion.token_ids)
                ),
            )
            for turn in one.turns
        ]
        advantages = tuple(torch.randn(len(own), generator=dice).tolist())
        made.append(Sample(trajectory=replace(one, turns=tuple(turns)), advantages=advantages))
    return made


def learner_of(model, **settings):
    config = {"max_grad_norm": 1e9, "beta": 0.0, "per_device_train_batch_size": 4, **settings}
    return Learner(copy.deepcopy(model), TrainingConfig(**config), num_steps=9, exact_logprobs=True)


def away_from_reference(learner):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return learner


def gradient(learner, samples):
    """What the update's optimiser step saw, and its metrics."""
    seen = {}

    def look(*_):
        named = learner.policy.model.named_parameters()
        seen.update({name: one.grad.clone() for name, one in named if one.grad is not None})

    hook = learner.optimization.optimizer.register_step_pre_hook(look)
    metrics = learner.update(samples, step=1)
    hook.remove()
    return seen, metrics


def distance(one, other):
    """Relative, over all parameters together."""
    assert one.keys() == other.keys()
    a, b = (torch.cat([grads[name].flatten().double() for name in sorted(one)]) for grads in (one, other))
    return float((a - b).norm() / b.norm())


def padded_forward(model, samples):
    """[samples][N_i] log-probs of the sampled tokens in order of turns: all rows side by side, row by row."""
    rows = [(place, row) for place, sample in enumerate(samples) for row in sample.trajectory.rows]
    inputs = pad_sequence([torch.tensor(row.token_ids) for _, row in rows], batch_first=True)
    attended = pad_sequence(
        [torch.ones(len(row.token_ids), dtype=torch.long) for _, row in rows], batch_first=True
    )
    logits = model(input_ids=inputs, attention_mask=attended, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, inputs[:, 1:, None])[..., 0]
    of_turns = {}
    for line, (place, row) in enumerate(rows):
        end = 0
        for index, turn in zip(row.indices, row.turns, strict=True):
            start = end + len(turn.prompt_ids)
            end = start + len(turn.completion.token_ids)
            of_turns.setdefault(
                (place, index), logprobs[line, start - 1 : end - 1]
            )  # the first row that has it
    return [
        torch.cat([of_turns[place, index] for index in range(len(sample.trajectory.turns))])
        for place, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("row_layout", ["packed", "padded"])
@pytest.mark.parametrize("averaging", ["trajectory", "token"])
def test_the_gradient_is_that_of_each_row_by_itself(averaging, row_layout):
    model = tiny_model().double()
    loss_type = {"trajectory": "grpo", "token": "dapo"}[averaging]
    learner = learner_of(
        model, loss_type=loss_type, clip_ratio=0.2, clip_ratio_high=0.2, row_layout=row_layout
    )
    samples = samples_of(model, conversations())
    terms = []
    for sample, now in zip(samples, padded_forward(model, samples), strict=True):
        old = torch.tensor([p for turn in sample.trajectory.turns for p in turn.completion.logprobs])
        advantages, ratio = torch.tensor(sample.advantages), (now - old).exp()
        terms.append(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))
    if averaging == "trajectory":
        loss = sum(term.mean() for term in terms) / len(samples)
    else:
        loss = torch.cat(terms).mean()
    parameters = dict(model.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    found, metrics = gradient(learner, samples)
    assert distance(found, expected) < 1e-6  # stored log-probs and advantages are fp32
    assert metrics["loss/policy"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"] > 0.1


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
@pytest.mark.parametrize("kl", ["loss", pytest.param("reward", marks=pytest.mark.long)])
@pytest.mark.first(2)
def test_the_cut_into_micro_batches_does_not_change_the_gradient(loss_type, kl):
    model = tiny_model("gpt2").double()  # its norms are in float64, too
    samples = samples_of(model, conversations())
    kl_settings = {"kl_placement": kl} | ({"kl_estimator": "k1"} if kl == "reward" else {})
    results = []
    for cut in CUTS:
        learner = learner_of(model, loss_type=loss_type, beta=0.5, entropy_coef=0.02, **kl_settings, **cut)
        results.append(gradient(away_from_reference(learner), samples))
    counts = [metrics["batch/micro_batches"] for _, metrics in results]
    assert counts[0] == 1
    assert counts[1] == (5 if loss_type == "gspo" else 11)  # conversations, or rows
    whole, numbers = results[0]
    for found, metrics in results[1:]:
        assert distance(found, whole) < 1e-9
        for name in ("loss/policy", "kl/reference", "policy/ratio", "policy/entropy"):
            assert metrics[name] == pytest.approx(numbers[name], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_kl_in_the_reward_charges_a_token_for_what_later_rows_say(cut):
    start = tiny_model().double()
    learner = away_from_reference(
        learner_of(start, beta=0.5, kl_placement="reward", kl_estimator="k1", **cut)
    )
    model = copy.deepcopy(learner.policy.model)
    samples = [
        replace(sample, advantages=(0.0,) * len(sample.advantages))
        for sample in samples_of(model, conversations(), 0)
    ]
    terms = []
    for now, reference in zip(padded_forward(model, samples), padded_forward(start, samples), strict=True):
        cost = -0.5 * (now - reference).detach()
        to_go = torch.stack([cost[place:].sum() for place in range(len(cost))])
        terms.append((-to_go * now).mean())
    parameters = dict(model.named_parameters())
    loss = sum(terms) / len(samples)
    expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    found, _ = gradient(learner, samples)
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_sampled_token_trains_once(cut):
    learner = learner_of(tiny_model(), **cut)
    samples = samples_of(learner.policy.model, conversations())
    trained = [
        (conversation, place, target, advantage)
        for batch in learner._micro_batches(samples)
        for conversation, place, target, advantage in zip(
            batch.trajectory_ids.tolist(),
            batch.places.tolist(),
            batch.targets.tolist(),
            batch.advantages.tolist(),
            strict=True,
        )
    ]
    said = [
        (conversation, place, target, pytest.approx(advantage))
        for conversation, sample in enumerate(samples)
        for place, (target, advantage) in enumerate(
            zip(
                [id for turn in sample.trajectory.turns for id in turn.completion.token_ids],
                sample.advantages,
                strict=True,
            )
        )
    ]
    assert sorted(trained) == said


def near_sighted():
    """Each of its two layers looks 4 tokens back, so that no logits depend on what lies further than 6."""
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **BLOCKS, num_key_value_heads=2, **window)).double().eval()


@pytest.mark.parametrize("loss_type", sorted(LOSSES))
def test_a_model_that_cannot_see_what_was_dropped_learns_the_same_from_one_row(loss_type):
    system, user, other, last = ids(8, 0), ids(8, 1), ids(8, 2), ids(8, 3)
    replies = [ids(length, length) for length in (9, 5, 4)]
    rows = talk(
        (system, replies[0]),
        ([*system, *replies[0][5:], *user], replies[1]),
        (other, replies[2]),
        ([*last], replies[0]),
        follows=(None, None, -1, 0),
    )
    one = talk((system, replies[0]), (user, replies[1]), (other, replies[2]), (last, replies[0]))
    assert [len(rows.rows), len(one.rows)] == [2, 1]
    model = near_sighted()
    found = []
    for conversation in (rows, one):
        samples = samples_of(model, [conversation, *conversations()[:1]])
        settings = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.02}
        found.append(gradient(away_from_reference(learner_of(model, **settings)), samples)[0])
    assert distance(*found) < 1e-6  # stored log-probs are fp32


# ------------------------------------------------------------------------------ how rows are packed


def test_a_conversation_s_rows_are_neighbours_and_share_what_was_said():
    system, words, user = [1] * 10, [2] * 5, [3] * 5
    members = [
        talk(
            (system, [*[9, member] * 10, *words]),
            ([*system, *words, *user], [*[9, member, 9] * 10, *words]),
            follows=(None, None),
        )
        for member in (11, 12, 13)
    ]
    rows = rows_of(member.rows for member in members)
    ids, owners = [row.token_ids for _, row in rows], [conversation for conversation, _ in rows]
    whole = units_of_conversations(ids, owners, max_tokens=100)
    assert whole == [[1, 0], [3, 2], [5, 4]]
    packs = packed_layouts(ids, max_rows=8, max_tokens=60, units=whole)
    assert [sorted(layout.rows) for layout in packs] == [[0, 1], [2, 3], [4, 5]]
    assert {layout.num_tokens for layout in packs} == {10 + 25 + 10 + 35}  # the system's words once
    apart = units_of_conversations(ids, owners, max_tokens=60)
    assert sorted(apart) == [[place] for place in range(6)]
    assert units_of_conversations(ids, owners) == [[0, 1], [2, 3], [4, 5]]
    (together,) = packed_layouts(ids, max_rows=3, max_tokens=999, units=whole)  # three conversations
    assert together.num_tokens == 3 * 80 - 2 * 10


def test_on_a_cpu_what_a_long_conversation_shares_is_worth_more_than_caches():
    """Its rows are longer than a pass has tokens by default."""
    learner = learner_of(tiny_model())
    prompt = [1] * 2500
    long = talk((prompt, [2, 3]), ([*prompt, 3, 4], [5]), follows=(None, None))
    rows = rows_of([long.rows, long.rows[:1]])
    assert [layout.num_tokens for layout in learner._layouts(rows)] == [2505, 2502]


def test_masks_do_not_outlive_their_forward():
    """[L, K] of what a row adds and of all it sees: for many rows they are larger than the activations."""
    learner = learner_of(tiny_model())
    samples = samples_of(learner.policy.model, conversations())
    (batch,) = learner._micro_batches(samples)
    learner.policy.score(batch)
    assert batch.layout.packing._masks == {}
    loss, _ = learner.policy.loss(batch, lambda scores, part: (scores.logprobs.sum(), None))
    loss.backward()
    assert batch.layout.packing._masks  # the backward pass may forward it again
    batch.layout.forget_masks()
    assert batch.layout.packing._masks == {}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_on_a_gpu_the_gradient_is_the_cpu_s(family):
    model = tiny_model(family)
    samples = samples_of(model, conversations())
    wanted, _ = gradient(learner_of(model), samples)
    on_gpu = learner_of(model.to("cuda"), precision="fp32")
    assert on_gpu.policy.packs, on_gpu.policy.why
    found, _ = gradient(on_gpu, samples)
    assert distance({name: one.cpu() for name, one in found.items()}, wanted) < 1e-4
