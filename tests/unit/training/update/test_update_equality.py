"""The update's gradient against a plain path: one row per forward, full logits, torch's own log-softmax.

On trained weights, whose distributions are peaked: random logits are too flat to show a wrong mask.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from tiny_training import plain_logits, plain_logprobs, talk
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, Lfm2Config, Lfm2ForCausalLM

from stateset_agents.algorithms.losses import Denominators, LossInputs, entropy_loss, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows import chunked_head
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.errors import ConfigurationError

FAMILIES = ["llama", "qwen3", "gpt2", "qwen2-window"]
"""qwen3's head is tied; gpt2 is tied, with biases everywhere; the last one attends 8 tokens back."""


def in_dtype(model, dtype):
    """A copy; in float64 without transformers' norms, which compute in fp32 whatever they are given."""
    made = copy.deepcopy(model).to(dtype)
    if dtype is torch.float64:
        for parent in list(made.modules()):
            for name, norm in list(parent.named_children()):
                if type(norm).__name__.endswith("RMSNorm"):
                    wide = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=dtype)
                    wide.weight = norm.weight
                    setattr(parent, name, wide)
    return made.eval()


APART = (None, None, None)
"""`follows` of turns that each open a row."""


def text(length, seed):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def trained():
    """Family -> a tiny model that knows four texts by heart."""
    texts, models = torch.tensor([text(40, seed) for seed in range(4)]), {}
    for family in FAMILIES:
        model = tiny_model(family).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(input_ids=texts, labels=texts, use_cache=False).loss
            loss.backward()
            optimizer.step()
        assert loss.item() < 2.0  # a uniform guess costs 5.6 nats
        models[family] = model.eval()
    return models


def conversations():
    """Two groups with prompts longer than the window, ragged, with texts the models know; one-token prompts,
    an empty completion, twins, and a conversation that another begins with. Then some of several rows: a
    thought that the next prompt leaves out, four rows, and a tree in which two rows share a turn."""
    known, other, new = text(40, 0), text(40, 1), text(40, 9)
    return [
        talk((known[:20], known[20:25]), (new[:3], known[28:31])),
        talk((known[:20], known[20:29])),
        talk((known[:20], known[20:22]), (new[:2], new[2:14])),
        talk((known[:20], known[20:29])),
        talk((known[:20], known[20:29]), (new[5:9], [])),
        talk((other[:13], other[13:14])),
        talk((other[:13], new[:16])),
        talk(([other[0]], other[1:12])),
        talk(([new[0]], [new[1]])),
        talk(
            (known[:20], known[20:29]), ([*known[:20], *known[25:29], *new[:3]], known[30:36]), follows=APART
        ),
        talk(
            (known[:20], new[3:9]),
            ([*known[:20], *new[7:9], 1], known[5:9]),
            ([*known[:20], *new[7:9], 1, *known[7:9], 2], []),
            ([3], known[9:14]),
            follows=APART,
        ),
        talk((other[:13], other[13:17]), (new[:2], other[17:21]), (new[2:5], new[5:9]), follows=(None, 0, 0)),
    ]


def samples_of(model, talks, drift=0.3):
    """With stored log-probs near the model's own, some of them far enough for the clip to act."""
    dice, made = torch.Generator().manual_seed(1), []
    for place, one in enumerate(talks):
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
        advantages = torch.randn(len(own), generator=dice).tolist()
        made.append(
            Sample(
                trajectory=replace(one, turns=tuple(turns)),
                advantages=tuple(advantages),
                weight=1.0 + place / 8,
            )
        )
    return made


def learner_of(model, **settings):
    settings = {"max_grad_norm": 1e9, "beta": 0.1, "entropy_coef": 0.02, **settings}
    config = TrainingConfig(**{"per_device_train_batch_size": 4, **settings})
    learner = Learner(copy.deepcopy(model), config, num_steps=9, exact_logprobs=True)
    torch.manual_seed(5)
    with torch.no_grad():  # away from the reference
        for parameter in learner.policy.model.parameters():
            parameter.add_(0.003 * torch.randn_like(parameter))
    return learner


def gradient(learner, samples):
    """What the update's one optimiser step saw, and its metrics."""
    seen = {}

    def look(*_):
        named = learner.policy.model.named_parameters()
        seen.update({name: one.grad.clone() for name, one in named if one.grad is not None})

    hook = learner.optimization.optimizer.register_step_pre_hook(look)
    metrics = learner.update(samples, step=1)
    hook.remove()
    return seen, metrics


def plain_gradient(learner, samples, temperature=1.0):
    """The same from plain forwards; to be taken before the update."""
    model, config = learner.policy.model.eval(), learner.config
    rows = [sample.trajectory for sample in samples]
    logits = [plain_logits(model, row, temperature) for row in rows]
    logprobs = torch.cat([plain_logprobs(model, row, temperature) for row in rows])
    reference = None
    if learner.reference is not None:
        other = learner.reference.model
        bare = contextlib.nullcontext() if learner.config.lora is None else other.disable_adapter()
        with torch.no_grad(), bare:
            reference = torch.cat([plain_logprobs(other, row, temperature) for row in rows])
    ids = torch.tensor([place for place, row in enumerate(rows) for _ in range(row.num_agent_tokens)])
    denominators = Denominators.of([row.num_agent_tokens for row in rows], max_length=config.loss_length)
    output = policy_loss(
        config.loss_type,
        LossInputs(
            logprobs,
            torch.tensor(
                [
                    value
                    for row in rows
                    for value, bit in zip(row.logprobs, row.action_mask, strict=True)
                    if bit
                ]
            ),
            torch.tensor([sample.weight * value for sample in samples for value in sample.advantages]),
            ids,
            denominators,
            ref_logprobs=reference,
        ),
        clip_ratio=config.clip_ratio,
        clip_ratio_high=config.clip_ratio_high,
        beta=learner.kl.beta,
    )
    entropies = torch.distributions.Categorical(logits=torch.cat(logits)).entropy()
    spread = entropy_loss(entropies, ids, denominators, averaging=LOSSES[config.loss_type].averaging)
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    total = output.loss + config.entropy_coef * spread.loss
    found = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, found, strict=True)), (output.metrics + spread.metrics).to_dict()


def distance(one, other):
    """Relative, over all parameters together."""
    a, b = (torch.cat([grads[name].flatten().double() for name in sorted(other)]) for grads in (one, other))
    return float((a - b).norm() / b.norm())


def assert_equal(learner, samples, tolerance, **how):
    expected, numbers = plain_gradient(learner, samples, **how)
    found, metrics = gradient(learner, samples)
    assert distance(found, expected) < tolerance
    for name in ("policy/ratio", "policy/entropy", "kl/old", "policy/clip_fraction_low", "loss/policy"):
        assert metrics[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-5), name
    return metrics


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-9), pytest.param(torch.float32, 1e-5, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("row_layout", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.first(1)
def test_the_gradient_is_that_of_plain_forwards(trained, family, row_layout, dtype, tolerance):
    learner = learner_of(in_dtype(trained[family], dtype), row_layout=row_layout)
    samples = samples_of(learner.policy.model.eval(), conversations())
    metrics = assert_equal(learner, samples, tolerance)
    assert metrics["policy/clip_fraction_low"] > 0.02
    assert metrics["policy/clip_fraction_high"] > 0.02
    if row_layout == "packed":  # the twin, the rows begun alike and the two groups' prompts went through once
        assert metrics["tokens/forwarded"] < 0.6 * sum(len(one.trajectory.token_ids) for one in samples)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 60},
        {"micro_batch_tokens": 1},
        {"loss_type": "gspo"},
        {"loss_type": "dr_grpo", "beta": 0.0, "entropy_coef": 0.0},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "row_layout": "padded"},
        {"temperature": 0.7},
        {"fast_linears": False},
    ],
    ids=str,
)
@pytest.mark.first(1)
def test_cuts_losses_temperature_and_recomputed_layers_change_nothing(trained, settings, monkeypatch):
    monkeypatch.setattr(chunked_head, "_CHUNK_ROWS", (4, 7))  # several chunks in a micro-batch
    monkeypatch.setattr(chunked_head, "_CACHED_ELEMENTS", 200)  # and a few rows of a chunk at a time
    wide = settings.get("fast_linears", True)  # float64 has no fast linears
    dtype, tolerance = (torch.float64, 1e-9) if wide else (torch.float32, 1e-5)
    learner = learner_of(in_dtype(trained["qwen2-window"], dtype), **settings)
    samples = samples_of(learner.policy.model.eval(), conversations())
    assert_equal(learner, samples, tolerance, temperature=settings.get("temperature", 1.0))


@pytest.mark.parametrize("place", [0, 4, 8, 9, 10, 11])
def test_a_single_conversation_has_the_plain_gradient(trained, place):
    learner = learner_of(in_dtype(trained["llama"], torch.float64))
    assert_equal(learner, samples_of(learner.policy.model.eval(), conversations()[place : place + 1]), 1e-9)


def test_a_prompt_s_gradient_comes_once_from_each_of_its_conversations(trained):
    """Twins have twice the gradient of one, though all of their tokens but none are forwarded twice."""
    learner = learner_of(
        in_dtype(trained["llama"], torch.float64), loss_type="dr_grpo", beta=0.0, entropy_coef=0.0
    )
    (one,) = samples_of(learner.policy.model.eval(), conversations()[:1])
    single, alone = gradient(copy.deepcopy(learner), [one])
    double, together = gradient(learner, [one, one])
    assert distance(double, single) < 1e-12  # a mean over two
    assert together["tokens/forwarded"] == alone["tokens/forwarded"]


def test_adapters_get_the_plain_gradient(trained):
    from peft import LoraConfig, get_peft_model

    model = in_dtype(trained["llama"], torch.float64)
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    wrapped = get_peft_model(model, lora).double()
    learner = learner_of(wrapped)
    assert learner.policy.packs
    samples = samples_of(learner.policy.model.eval(), conversations())
    expected, _ = plain_gradient(learner, samples)
    assert all("lora" in name for name in expected)
    found, _ = gradient(learner, samples)
    assert found.keys() == expected.keys()
    assert distance(found, expected) < 1e-9


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"row_layout": "padded"}),
    ],
)
@pytest.mark.first(1)
def test_the_learner_s_adapter_gets_the_plain_gradient_and_pulls_to_the_model_without_it(
    trained, family, changes
):
    learner = learner_of(trained[family], lora={"rank": 4}, **changes)
    assert learner.policy.packs is ("row_layout" not in changes)
    assert learner.reference.model is learner.policy.model
    samples = samples_of(learner.policy.model.eval(), conversations())
    expected, figures = plain_gradient(learner, samples)
    assert figures["kl/reference"] > 1e-4
    assert {name.split(".")[-3] for name in expected} == {"lora_A", "lora_B"}
    found, metrics = gradient(learner, samples)
    assert found.keys() == expected.keys()
    assert distance(found, expected) < 1e-5
    assert metrics["kl/reference"] == pytest.approx(figures["kl/reference"], rel=1e-4)


def odd_model():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 128,
        "window_size": 8,
    }
    return GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=VOCAB, attention_types=[[["global", "local"], 1]], **sizes, initializer_range=0.3
        )
    )


def test_a_model_that_cannot_be_packed_is_padded_and_its_gradient_is_plain():
    model = odd_model().eval()
    learner = learner_of(model)
    assert not learner.policy.packs
    assert_equal(learner, samples_of(learner.policy.model.eval(), conversations()), 1e-5)
    with pytest.raises(
        ConfigurationError, match=r"GPTNeoForCausalLM cannot be trained on packed rows .*padded"
    ):
        Policy(model, row_layout="packed")


@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_model_that_looks_back_other_than_by_attention_is_padded(spread):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    policy = Policy(Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, initializer_range=spread)).eval())
    assert not policy.packs
    assert "would see other hidden states" in policy.why


def test_a_wrong_window_is_seen_beyond_it(trained):
    model = copy.deepcopy(trained["qwen2-window"])
    assert Policy(model).packs
    for layer in model.model.layers:  # what the attention is told differs from what the masks say
        layer.self_attn.sliding_window = None
    policy = Policy(model)
    assert not policy.packs
    assert "would see other hidden states" in policy.why


def test_packed_rows_are_said_in_the_log(caplog):
    with caplog.at_level("DEBUG", "stateset_agents"):
        learner_of(tiny_model())
    (line,) = [
        record.getMessage() for record in caplog.records if "rows of the update" in record.getMessage()
    ]
    assert "packed" in line
