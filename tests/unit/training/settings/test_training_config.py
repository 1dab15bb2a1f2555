"""TrainingConfig: names and aliases, profiles, a loss's own clip range, and what cannot be."""

from __future__ import annotations

import pytest

from stateset_agents.training.config import PROFILES, TrainingConfig, TrainingProfile
from stateset_agents.training.estimators import estimators_with
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives


@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("group_size", "num_generations", 5),
        ("num_epochs", "num_iterations", 3),
        ("clip_epsilon", "clip_ratio", 0.3),
        ("kl_coefficient", "beta", 0.5),
        ("kl_penalty_coeff", "beta", 0.5),
        ("kl_coef", "beta", 0.5),
        ("entropy_coefficient", "entropy_coef", 0.5),
        ("entropy_coeff", "entropy_coef", 0.5),
        ("scale_rewards", "advantage_normalization", "batch"),
    ],
)
def test_an_alias_is_stored_under_the_canonical_name(alias, name, value):
    config = TrainingConfig(**{alias: value})
    assert config.model_dump()[name] == value
    with pytest.raises(ConfigurationError, match=f"{alias} is another name of {name}"):
        TrainingConfig(**{name: value, alias: value})


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ({"bf16": True}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"bf16": True, "fp16": False}, "bf16"),
        ({"use_amp": True}, "auto"),
        ({"use_amp": False}, "fp32"),
        ({"bf16": False}, "fp32"),
    ],
)
def test_the_usual_precision_flags_are_one_field(flags, precision):
    assert TrainingConfig(**flags).precision == precision


@pytest.mark.parametrize(
    "settings", [{"bf16": True, "fp16": True}, {"bf16": True, "precision": "fp32"}, {"bf16": "yes"}]
)
def test_precision_flags_that_contradict_are_refused(settings):
    with pytest.raises(ConfigurationError):
        TrainingConfig(**settings)


def test_scaling_takes_true_and_false():
    assert TrainingConfig(advantage_normalization=True).advantage_normalization == "population"
    assert TrainingConfig(scale_rewards=False).advantage_normalization == "none"


@pytest.mark.parametrize("profile", list(TrainingProfile))
def test_a_profile_is_its_table_with_the_user_s_settings_on_top(profile):
    config = TrainingConfig.from_profile(profile, seed=7)
    defaults = {name: field.default for name, field in TrainingConfig.model_fields.items()}
    assert config.model_dump() == {**defaults, **PROFILES[profile], "profile": profile, "seed": 7}
    assert TrainingConfig.from_profile(profile, beta=0.7).beta == 0.7
    assert TrainingConfig(profile=profile, seed=7) == config


def test_a_saved_configuration_reads_back_as_the_same():
    config = TrainingConfig.from_profile("aggressive", loss_type="gspo", max_steps=3)
    assert TrainingConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({}, (0.2, None)),
        ({"loss_type": "dapo"}, (0.2, 0.28)),
        ({"loss_type": "gspo"}, (3e-4, 4e-4)),
        ({"loss_type": "gspo", "clip_ratio_high": 5e-4}, (3e-4, 5e-4)),
        ({"loss_type": "gspo", "clip_ratio": 1e-3}, (1e-3, None)),
        ({"loss_type": "gspo", "profile": "aggressive"}, (3e-4, 4e-4)),
        ({"loss_type": "dapo", "profile": "conservative"}, (0.2, 0.28)),
        ({"profile": "conservative"}, (0.1, None)),
        ({"profile": "aggressive"}, (0.2, 0.28)),
        ({"profile": "aggressive", "clip_epsilon": 0.1}, (0.1, 0.28)),
    ],
)
def test_a_loss_s_own_clip_range_beats_the_profile_s_and_the_user_s_beats_both(settings, clip):
    config = TrainingConfig(**settings)
    assert (config.clip_ratio, config.clip_ratio_high) == clip


def test_a_card_s_settings_fill_what_the_user_left_open():
    card = {"learning_rate": 4e-4, "beta": 0.01, "group_size": 6, "loss_type": "dapo"}
    config, applied = TrainingConfig.from_profile("conservative", kl_coef=0.3).with_recommended(card)
    assert applied == {"learning_rate": 4e-4, "num_generations": 6, "loss_type": "dapo"}
    assert (config.beta, config.learning_rate, config.num_generations) == (0.3, 4e-4, 6)
    assert config.clip_ratio_high == 0.28  # the loss brought its own
    assert config.max_grad_norm == 0.5  # the profile's
    assert config.with_recommended(card)[1] == applied  # still only the user's count as given


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, "grpo"),
        ({"advantage_estimator": "turn_group"}, "dr_grpo"),
        ({"advantage_estimator": "branch", "profile": "aggressive"}, "dr_grpo"),
        ({"advantage_estimator": "turn_gae"}, "grpo"),
        ({"advantage_estimator": "turn_group", "loss_type": "gspo"}, "gspo"),
    ],
)
def test_an_unbiased_estimator_brings_the_loss_that_keeps_it_so(settings, loss):
    config = TrainingConfig(**settings)
    assert config.loss_type == loss
    assert TrainingConfig(**config.model_dump()) == config


def test_the_loss_of_an_estimator_that_the_user_chose_stands_above_a_card_s():
    chosen, applied = TrainingConfig(advantage_estimator="branch").with_recommended({"loss_type": "dapo"})
    assert (chosen.loss_type, chosen.clip_ratio_high, applied) == ("dr_grpo", None, {})
    chosen, _ = TrainingConfig(advantage_estimator="turn_gae").with_recommended({"loss_type": "dapo"})
    assert (chosen.loss_type, chosen.clip_ratio_high) == ("dapo", 0.28)


@pytest.mark.parametrize("given", [{"num_episodes": 12}, {"max_steps": 3}])
def test_a_card_does_not_change_a_length_the_user_gave(given):
    config, applied = TrainingConfig(**given).with_recommended({"max_steps": 110})
    assert (applied, config) == ({}, TrainingConfig(**given))
    assert TrainingConfig().with_recommended({"max_steps": 110})[0].num_steps() == 110


def test_a_card_with_an_unknown_setting_is_refused():
    with pytest.raises(ConfigurationError, match="did you mean 'learning_rate'"):
        TrainingConfig().with_recommended({"lerning_rate": 1e-3})


def test_steps_follow_from_episodes_and_the_last_may_be_short():
    config = TrainingConfig(num_episodes=10, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert (config.episodes_per_step(), config.num_steps()) == (4, 3)
    assert TrainingConfig(num_episodes=10, max_steps=7).num_steps() == 7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lerning_rate": 1}, "did you mean 'learning_rate'"),
        ({"learning_rate": -1e-3}, "learning_rate: .* got -0.001"),
        ({"learning_rate": float("nan")}, "learning_rate: .* got nan"),
        ({"beta": float("inf")}, "beta: .* got inf"),
        ({"num_generations": 1}, "num_generations must be at least 2, got 1"),
        ({"warmup_ratio": 1.0}, "warmup_ratio"),
        ({"loss_type": "grop"}, "loss_type: .*'grpo'.* got 'grop'"),
        ({"profile": "agressive"}, "profile: .*'aggressive'.* got 'agressive'"),
        ({"profile": 3}, "profile"),
        ({"min_group_size": 9}, "min_group_size 9 exceeds num_generations 8: lower it"),
        ({"baseline_type": "leave_one_out"}, "set advantage_normalization to none"),
        ({"kl_placement": "reward"}, "set kl_estimator to k1"),
        ({"kl_controller": "ziegler", "beta": 0}, "a moving beta needs beta > 0"),
        ({"kl_controller": "adaptive", "use_reference_model": False}, "use_reference_model true"),
        ({"loss_type": "reinforce", "dual_clip": 2.0}, "leave dual_clip unset"),
        ({"run_name": "a/b"}, "run_name"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_mend(settings, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        TrainingConfig(**settings)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ advantage estimators


@pytest.mark.parametrize(
    ("estimator", "scaling", "group_size"),
    [
        ("group", "population", 2),
        ("turn_group", "none", 2),
        ("branch", "none", 2),
        ("turn_gae", "batch", 1),
        ("token_gae", "batch", 1),
        ("hybrid", "batch", 2),
    ],
)
def test_each_estimator_brings_its_own_scaling_and_group_size(estimator, scaling, group_size):
    config = TrainingConfig(advantage_estimator=estimator)
    assert (config.advantage_normalization, config.min_group_size) == (scaling, group_size)
    assert TrainingConfig(**config.model_dump()) == config
    off = TrainingConfig(advantage_estimator=estimator, advantage_normalization=False)
    assert off.advantage_normalization == "none"


def test_true_is_the_estimator_s_own_scaling():
    assert TrainingConfig(advantage_normalization=True).advantage_normalization == "population"
    gae = TrainingConfig(advantage_normalization=True, advantage_estimator="turn_gae")
    assert gae.advantage_normalization == "batch"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0.9}, "gamma discounts between turns, which group does not tell apart: leave it at 1"),
        ({"gae_lambda": 0.9}, "group has no critic: leave gae_lambda out, or use one of turn_gae, token_gae"),
        (
            {"advantage_estimator": "turn_group", "value_clip": None},
            "turn_group has no critic: leave value_clip",
        ),
        ({"bootstrap_truncated": False}, "group has no critic: leave bootstrap_truncated out"),
        (
            {"advantage_estimator": "turn_group", "advantage_normalization": True},
            "population does not go with advantage_estimator turn_group: use none",
        ),
        (
            {"advantage_estimator": "token_gae", "advantage_normalization": "sample"},
            "sample does not go with advantage_estimator token_gae: use batch or none",
        ),
        (
            {"advantage_estimator": "turn_gae", "baseline_type": "group_median"},
            "turn_gae has a baseline of its own: leave baseline_type out, or use "
            + alternatives(estimators_with(lambda estimator: estimator.baseline)),
        ),
        (
            {"min_group_size": 1},
            "min_group_size must be at least 2, or use "
            + alternatives(estimators_with(lambda estimator: estimator.group_default == 1)),
        ),
        (
            {"advantage_estimator": "hybrid", "num_generations": 1},
            "num_generations must be at least 2, got 1",
        ),
        ({"advantage_estimator": "turn_gea"}, "advantage_estimator: "),
        ({"advantage_estimator": "turn_gae", "gamma": 1.5}, "gamma: .* got 1.5"),
    ],
)
def test_settings_that_mean_nothing_to_an_estimator_are_refused_with_the_cure(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        TrainingConfig(**settings)


def test_a_critic_s_settings_at_their_defaults_harm_nobody():
    assert TrainingConfig(value_clip=0.2, gamma=1.0, gae_lambda=0.95) == TrainingConfig()
    assert TrainingConfig(advantage_estimator="hybrid", baseline_type="group_median").gamma == 1.0
    assert TrainingConfig(advantage_estimator="token_gae", num_generations=1).min_group_size == 1


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lora": {"target_modules": []}}, "lora: target_modules: .*at least 1 item"),
        ({"lora": {"alpha": float("inf")}}, "lora: alpha: input should be a finite number, got inf"),
        ({"importance": "none", "importance_cap": 3.0}, "importance none has none: leave one out"),
    ],
)
def test_adapters_and_weights_without_effect_are_refused(settings, line):
    with pytest.raises(ConfigurationError, match=line):
        TrainingConfig(**settings)
