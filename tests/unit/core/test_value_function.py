"""The critic by itself: values on every model family, worked GAE numbers, and learning on a fixed batch."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn

from stateset_agents.core.value_function import (
    ValueFunction,
    ValueHead,
    create_value_function,
    hidden_size_of,
    trunk_of,
)
from stateset_agents.types.errors import CheckpointError, ConfigurationError

IDS = torch.tensor([[5, 9, 3, 7, 2, 8], [4, 4, 1, 6, 0, 0]])


def learned(model, **settings):
    """A value function whose head no longer is 0."""
    torch.manual_seed(0)
    function = create_value_function(model, **settings)
    nn.init.normal_(function.head.outer.weight)
    return function


# ------------------------------------------------------------------------------ the head


def test_a_new_head_expects_nothing_and_gives_one_number_per_state():
    head = ValueHead(8)
    assert head(torch.randn(2, 3, 8)).tolist() == torch.zeros(2, 3).tolist()
    assert [type(layer).__name__ for layer in head.children()] == ["Linear", "Dropout", "Linear"]
    assert head.dropout.p == 0.1


def test_the_head_stays_in_fp32_under_half_precision_and_autocast():
    head = ValueHead(4)
    nn.init.normal_(head.outer.weight)
    hidden = torch.randn(3, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head.eval()(hidden)
    assert values.dtype is torch.float32
    assert torch.equal(values, head(hidden.float()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": 4, "inner_size": 0}, "inner_size must be at least 1, got 0"),
        ({"hidden_size": 4, "dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_a_head_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ValueHead(**settings)


def test_states_of_another_width_name_the_mend():
    with pytest.raises(ValueError, match=r"must be \[..., 8\], got \[2, 4\]: make a ValueHead\(4\)"):
        ValueHead(8)(torch.zeros(2, 4))


# ------------------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_values_of_every_family_are_the_head_s_on_its_last_hidden_states(family, dtype):
    model = tiny_model(family).to(dtype).eval()
    function = learned(model)
    values = function.compute_values(IDS)
    with torch.no_grad():
        last = model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
        expected = function.head(last.float())
    assert values.shape == IDS.shape
    assert values.dtype is torch.float32
    assert not values.requires_grad
    assert torch.allclose(values, expected, atol=1e-5)
    assert values.std() > 0.1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_of_a_peft_model_are_part_of_the_trunk(family):
    model = tiny_model(family)
    plain = create_value_function(model).hidden_states(IDS)
    wrapped = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    ).eval()
    assert hidden_size_of(wrapped) == 32
    function = learned(wrapped)
    with_adapter = function.hidden_states(IDS)
    with torch.no_grad():
        expected = wrapped(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(with_adapter, expected, atol=1e-5)
    assert not torch.allclose(with_adapter, plain, atol=1e-2)
    assert function.compute_values(IDS).shape == IDS.shape


def test_virtual_tokens_are_refused_with_the_cure():
    wrapped = get_peft_model(tiny_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigurationError, match=r"PROMPT_TUNING adds virtual tokens.*: use LoRA"):
        create_value_function(wrapped)


def test_a_bare_trunk_is_its_own_and_what_has_none_is_refused():
    trunk = tiny_model().model
    assert trunk_of(trunk) is trunk
    assert create_value_function(trunk).compute_values(IDS).shape == IDS.shape
    with pytest.raises(ConfigurationError, match="Linear has no trunk below its head"):
        create_value_function(nn.Linear(2, 2))


def test_a_value_reads_nothing_that_comes_later_and_no_padding():
    function = learned(tiny_model())
    values = function.compute_values(IDS)
    assert torch.allclose(function.compute_values(IDS[:, :4]), values[:, :4], atol=1e-5)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    assert torch.allclose(function.compute_values(IDS, mask)[1, :4], values[1, :4], atol=1e-5)
    with pytest.raises(ConfigurationError, match="padded on the left: pad them on the right"):
        function.compute_values(IDS, mask.flip(1))


def test_values_are_without_dropout_and_leave_every_module_in_its_mode():
    model = tiny_model("gpt2").train()  # its config has a dropout of .1
    model.transformer.h[0].eval()
    function = learned(model)
    before = [module.training for module in model.modules()]
    assert torch.equal(function.compute_values(IDS), function.compute_values(IDS))
    assert [module.training for module in model.modules()] == before


# ------------------------------------------------------------------------------ advantages


def test_gae_over_tokens_and_over_turns():
    function = create_value_function(tiny_model(), gamma=1.0)
    tokens = function.compute_gae([0] * 6 + [1], [0.2, 0.3, 9, 9, 9, 0.4, 0.6], [1, 1, 0, 0, 0, 1, 1])
    assert [tokens.advantages[t] for t in (0, 1, 5, 6)] == pytest.approx([0.7185, 0.651, 0.58, 0.4], abs=1e-4)
    turns = function.compute_gae([0, 1], [0.2, 0.4], terminated=False, final_value=0.5)
    # delta_1 = 1 + .5 - .4 = 1.1; delta_0 = .4 - .2 = .2, plus .95 * 1.1
    assert turns.advantages == pytest.approx([1.245, 1.1])
    assert turns.returns == pytest.approx([1.445, 1.5])


def test_the_defaults_of_gamma_and_lambda():
    function = create_value_function(tiny_model())
    assert (function.gamma, function.gae_lambda) == (0.99, 0.95)
    assert function.compute_gae([0, 1], [0.0, 0.0]).advantages == pytest.approx([0.99 * 0.95, 1.0])


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("group_mean", [0.1, -0.2, 0.2, -0.1]), ("group_median", [0.1, -0.2, 0.2, -0.1])],
)
def test_group_advantages_need_no_critic(baseline, expected):
    function = create_value_function(tiny_model())
    (plain,) = function.compute_grpo_advantages(
        [[0.8, 0.5, 0.9, 0.6]], baseline, advantage_normalization=False
    )
    assert plain == pytest.approx(expected)
    (scaled,) = function.compute_grpo_advantages([[0.8, 0.5, 0.9, 0.6]], baseline)
    assert scaled == pytest.approx([value / 0.15811388 for value in expected], abs=1e-6)


def test_a_global_mean_is_over_all_groups():
    function = create_value_function(tiny_model())
    advantages = function.compute_grpo_advantages(
        [[1.0, 0.0], [3.0, None]], "global_mean", advantage_normalization=False
    )
    assert advantages == [
        [pytest.approx(-1 / 3), pytest.approx(-4 / 3)],
        [pytest.approx(5 / 3), None],
    ]  # mean 4/3


# ------------------------------------------------------------------------------ learning


def test_updates_lower_the_loss_and_explain_the_returns_while_the_trunk_stands():
    model = tiny_model()
    torch.manual_seed(0)
    function = create_value_function(model, value_clip=None, dropout=0.0)
    trunk = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    returns = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5, 9.0], [0.3, 1.0, 0.0, 1.5, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    seen = [function.update_value_function(IDS, returns, mask=mask, iterations=20) for _ in range(12)]
    assert seen[0]["value/explained_variance"] == 0.0  # it expected 0 everywhere
    assert seen[-1]["value/explained_variance"] > 0.95
    assert seen[-1]["loss/value"] < 0.05 * seen[0]["loss/value"]
    assert all(torch.equal(tensor, trunk[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_value_clip_bounds_how_far_values_move_in_one_update():
    torch.manual_seed(0)
    model = tiny_model()
    hidden = create_value_function(model).hidden_states(IDS)
    moved = {}
    for clip in (0.05, None):
        torch.manual_seed(1)
        function = create_value_function(model, value_clip=clip, dropout=0.0)
        metrics = function.update_value_function(hidden, torch.ones(IDS.shape), iterations=200)
        moved[clip] = (float(function.values_of(hidden).mean()), metrics["value/clip_fraction"])
    assert moved[None][0] == pytest.approx(1.0, abs=0.05)
    assert moved[None][1] == 0.0
    assert 0.05 <= moved[0.05][0] < 0.4
    assert moved[0.05][1] == 1.0


def test_equal_returns_have_no_variance_to_explain():
    function = create_value_function(tiny_model())
    metrics = function.update_value_function(IDS, torch.ones(IDS.shape))
    assert "value/explained_variance" not in metrics
    assert metrics["loss/value"] == 0.5
    with pytest.raises(ValueError, match="no state counts"):
        function.update_value_function(IDS, torch.ones(IDS.shape), mask=torch.zeros(IDS.shape))


def test_states_that_overflowed_teach_nothing():
    function = create_value_function(tiny_model())
    before = function.head.inner.weight.clone()
    function.update_value_function(torch.full((2, 32), float("inf")), torch.ones(2))
    assert torch.equal(function.head.inner.weight, before)


def test_head_and_optimiser_go_through_safetensors_and_on_in_the_same_bits(tmp_path):
    model = tiny_model()
    torch.manual_seed(0)
    one, returns = create_value_function(model, dropout=0.0), torch.rand(IDS.shape)
    one.update_value_function(IDS, returns, iterations=3)
    save_file(one.state_dict(), tmp_path / "critic.safetensors")
    torch.manual_seed(5)
    other = create_value_function(model, dropout=0.0)
    other.load_state_dict(load_file(tmp_path / "critic.safetensors"))
    for function in (one, other):
        function.update_value_function(IDS, returns, iterations=2)
    mine, its = one.state_dict(), other.state_dict()
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    with pytest.raises(CheckpointError, match="value head is of another size"):
        ValueFunction(model, ValueHead(16)).load_state_dict(one.state_dict())


def test_the_head_s_gradient_is_clipped_so_that_its_weights_hardly_move_under_a_tiny_norm():
    def moved(max_grad_norm):
        function = learned(tiny_model("llama"), max_grad_norm=max_grad_norm)
        before = function.head.outer.weight.detach().clone()
        function.update_value_function(IDS, torch.ones(2, 6), iterations=1)
        return float((function.head.outer.weight.detach() - before).abs().max())

    # Adam's first step is lr * g / (|g| + 1e-8): the whole rate, unless g is far below 1e-8
    assert moved(1e-12) < 0.01 * moved(1.0)
