"""StateSet's document: every call as it is printed there, on tiny real models.

`rows_s1.yaml` says which test shows which row, docs/documents.md what each name is called here.
"""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from repository_paths import ROOT
from tiny_models import BLOCKS, SIZES, VOCAB, tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, make_trainer, same_bits, snapshot
from transformers import AutoModelForCausalLM, GPT2Config

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import create_customer_service_reward
from stateset_agents.core.value_function import ValueHead, create_value_function
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl_grpo_trainer import train_with_trl_grpo
from stateset_agents.types.errors import ConfigurationError

SCENARIOS = [
    {"topic": "refund", "context": "Order delayed"},
    {"topic": "shipping", "context": "Track package"},
]
"""The document's."""
QUICK: dict[str, Any] = {"num_generations": 2, "save_steps": 0, "progress": False, "log_rollouts": False}


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[MultiTurnGRPOTrainer]:
    """With a reference, and the document's scenarios, which name no split."""
    environment = ConversationEnvironment(scenarios=SCENARIOS, max_turns=2)
    made = make_trainer(tmp_path, environment=environment, beta=0.1, max_steps=4, num_generations=4)
    await made.initialize()
    yield made
    await made.close()


# ------------------------------------------------------------------------------ the parts


async def test_agent_environment_and_reward_are_made_as_printed() -> None:
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=8))
    await agent.initialize()
    env = ConversationEnvironment(scenarios=SCENARIOS, max_turns=6)
    reward_fn = create_customer_service_reward()
    assert [scenario.family for scenario in env.scenarios("train")] == ["refund", "shipping"]
    conversation = await env.start(env.scenarios("train")[0], seed=0)
    assert await agent.generate_response(conversation.opening)
    assert reward_fn.name == "customer_service"
    assert create_value_function(model=agent.model, gamma=0.99, gae_lambda=0.95).gamma == 0.99
    await agent.close()


def test_a_value_function_is_made_and_asked_as_printed() -> None:
    model = tiny_model("gpt2")
    value_fn = create_value_function(model=model, gamma=0.99, gae_lambda=0.95)
    advantages = value_fn.compute_grpo_advantages(
        group_rewards=[0.8, 0.5, 0.9, 0.6], baseline_type="group_mean"
    )
    deviation = 0.025**0.5  # the baseline is .7
    assert advantages == pytest.approx([value / deviation for value in (0.1, -0.2, 0.2, -0.1)])
    positional = create_value_function(model, 0.99, 0.95)
    assert (positional.gamma, positional.gae_lambda) == (0.99, 0.95)
    values = value_fn.compute_values(torch.tensor([[5, 6, 7]]))
    assert values.shape == (1, 3)
    gae = value_fn.compute_gae([0.0, 1.0], [0.4, 0.6])
    assert gae.advantages[1] == pytest.approx(0.4)  # 1 - V
    assert gae.advantages[0] == pytest.approx(0.99 * 0.6 - 0.4 + 0.99 * 0.95 * 0.4)
    assert value_fn.update_value_function(torch.tensor([[5, 6, 7]]), torch.ones(1, 3))["loss/value"] > 0
    kinds = [type(layer).__name__ for layer in ValueHead(8).children()]
    assert kinds == ["Linear", "Dropout", "Linear"]  # the ReLU is a function


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("group_mean", 0.2), ("group_median", 0.15), ("global_mean", 0.2)],
)
def test_every_baseline_takes_one_group_and_several(baseline: str, expected: float) -> None:
    value_fn = create_value_function(tiny_model("gpt2"), 0.99, 0.95)
    rewards = [0.8, 0.5, 0.9, 0.2]
    plain = value_fn.compute_grpo_advantages(rewards, baseline, advantage_normalization=False)
    assert plain[0] == pytest.approx(expected)
    assert value_fn.compute_grpo_advantages([rewards], baseline, advantage_normalization=False) == [plain]


# ------------------------------------------------------------------------------ losses and updates


async def test_losses_are_awaited_and_say_so_where_they_are_not(trainer: MultiTurnGRPOTrainer) -> None:
    trajectories = await trainer.generate_trajectories(SCENARIOS)
    with pytest.raises(ConfigurationError) as refused:
        trainer.compute_grpo_loss(trajectories)["total_loss"]
    assert str(refused.value) == (
        "compute_grpo_loss is async, and its result is there when it is awaited: write "
        "(await compute_grpo_loss(...))['total_loss']"
    )
    loss_dict = await trainer.compute_grpo_loss(trajectories)
    enhanced = await trainer.compute_enhanced_grpo_loss(trajectories, beta=0.1)
    assert loss_dict["total_loss"].requires_grad
    assert float(enhanced["kl_penalty"]) == 0.0  # the policy is the reference still
    task = asyncio.create_task(trainer.compute_grpo_loss(trajectories))
    assert torch.equal((await task)["total_loss"], loss_dict["total_loss"])
    members = [member for group in trajectories for member in group.trajectories]
    flat = await trainer.compute_grpo_loss(members)  # trajectories of one scenario are a group
    assert torch.equal(flat["total_loss"], loss_dict["total_loss"])


async def test_a_group_s_policy_loss_has_the_advantages_that_are_given(trainer: MultiTurnGRPOTrainer) -> None:
    group, _ = await trainer.generate_trajectories(SCENARIOS)
    loss = await trainer._compute_group_policy_loss(group, [1.0, 0.0, 0.0, 0.0])
    assert float(loss.detach()) == pytest.approx(-0.25, abs=1e-5)  # minus their mean at ratio 1
    with pytest.raises(ConfigurationError, match=r"advantages must be one for each trajectory, \[4\]"):
        await trainer._compute_group_policy_loss(group, [1.0])
    with pytest.raises(ConfigurationError, match=r"write await _compute_group_policy_loss\(\.\.\.\)"):
        len(trainer._compute_group_policy_loss(group, [1.0]))


async def test_the_engine_hands_an_update_on_to_the_learner(trainer: MultiTurnGRPOTrainer) -> None:
    group, _ = await trainer.generate_trajectories(SCENARIOS)
    trajectories, advantages = group.trajectories, [1.0, -1.0, 0.5, -0.5]
    before = snapshot(trainer)
    loss = await trainer.engine._update_policy(trajectories, advantages)
    assert loss == pytest.approx(0.0, abs=1e-5)  # minus the mean advantage at ratio 1; its gradient is not 0
    assert not same_bits(snapshot(trainer), before)
    assert trainer.step_number == 1
    with pytest.raises(ConfigurationError, match=r"write await _update_policy\(\.\.\.\)"):
        [*trainer.engine._update_policy(trajectories, advantages)]
    alone = type(trainer.engine)(make_agent(), make_environment(), even_share)
    with pytest.raises(ConfigurationError, match=r"has no learner to update: take trainer\.engine"):
        await alone._update_policy(trajectories, advantages)


# ------------------------------------------------------------------------------ the loop


async def test_the_printed_loop_runs(trainer: MultiTurnGRPOTrainer) -> None:
    num_episodes, eval_steps, save_steps = 2, 2, 2
    eval_scenarios = [{"topic": "refund", "context": "Another order"}]
    before = snapshot(trainer)
    for episode in range(num_episodes):
        trajectories = await trainer.generate_trajectories(SCENARIOS)
        loss_dict = await trainer.compute_enhanced_grpo_loss(trajectories, beta=0.1)
        assert loss_dict["total_loss"].isfinite()
        metrics = await trainer.training_step(trajectories)
        assert metrics["optimizer/grad_norm"] > 0
        if episode % eval_steps == 0:
            eval_metrics = await trainer.evaluate(eval_scenarios)
            assert eval_metrics.n == 1
        if episode % save_steps == 0:
            assert (await trainer.save_checkpoint()).name == "step-000001"
    assert not same_bits(snapshot(trainer), before)


async def test_scenarios_that_name_no_split_get_one_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = ConversationEnvironment(scenarios=SCENARIOS, max_turns=2)
    settings = {"max_steps": 1, "num_episodes": 4, "eval_steps": 1, "eval_episodes": 1}
    async with make_trainer(tmp_path, environment=environment, **settings) as trainer:
        with caplog.at_level(logging.WARNING):
            await trainer.train()
    validation = environment.scenarios("validation")
    assert len(validation) == len(environment.scenarios("train")) == 1
    assert "eval/reward" in {name for line in RunLog(trainer.run).metrics() for name in line.values}
    again = ConversationEnvironment(scenarios=SCENARIOS[::-1], max_turns=2)
    again.hold_out("validation")
    assert again.scenarios("validation") == validation  # by a hash of each, whatever their order
    named = ConversationEnvironment(scenarios=[{**SCENARIOS[0], "split": "test"}, SCENARIOS[1]])
    named.hold_out("validation")
    assert named.scenarios("validation") == []


@pytest.mark.parametrize(
    "precision", [{"bf16": True}, {"use_amp": True}, {"gradient_checkpointing": True, "bf16": True}]
)
async def test_a_training_step_runs_in_each_precision(tmp_path: Path, precision: dict[str, bool]) -> None:
    settings = {**precision, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    async with make_trainer(tmp_path, max_steps=1, **settings) as trainer:
        scenarios = trainer.environment.scenarios("train")[:2]
        metrics = await trainer.training_step(await trainer.generate_trajectories(scenarios))
        assert metrics["optimizer/grad_norm"] > 0
        assert trainer.config.precision == ("bf16" if "bf16" in precision else "auto")


# ------------------------------------------------------------------------------ settings


def test_the_printed_settings_are_settings() -> None:
    config = TrainingConfig(
        num_episodes=1000,
        learning_rate=5e-6,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_generations=16,
        beta=0.1,
        use_reference_model=True,
        clip_ratio=0.2,
        advantage_normalization=True,
        baseline_type="group_mean",
        bf16=True,
        max_grad_norm=1.0,
        warmup_ratio=0.1,
        lr_scheduler_type="cosine",
        reward_clip=10.0,
        value_clip=0.2,
        entropy_coef=0.01,
    )
    assert (config.precision, config.advantage_normalization) == ("bf16", "population")
    assert (config.num_steps(), config.reward_clip, config.entropy_coef) == (250, 10.0, 0.01)
    memory = TrainingConfig(
        bf16=True,
        gradient_checkpointing=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
    )
    assert memory.gradient_checkpointing


def test_profiles_differ_as_they_are_named() -> None:
    careful, balanced, fast = (
        TrainingConfig.from_profile(profile)
        for profile in (TrainingProfile.CONSERVATIVE, TrainingProfile.BALANCED, TrainingProfile.AGGRESSIVE)
    )
    assert careful.learning_rate < balanced.learning_rate < fast.learning_rate
    assert careful.clip_ratio < balanced.clip_ratio < fast.clip_ratio_high
    assert balanced == TrainingConfig()


# ------------------------------------------------------------------------------ whole programs


async def test_trl_takes_a_reward_model(tmp_path: Path) -> None:
    agent = make_agent()
    config = TrainingConfig(max_steps=1, beta=0.0, output_dir=str(tmp_path), **QUICK)
    trained_agent = await train_with_trl_grpo(
        config=config,
        agent=agent,
        environment=make_environment(),
        reward_model=even_share,
    )
    assert trained_agent is agent
    await agent.close()


PROGRAM = """
import asyncio
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import create_customer_service_reward
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.config import TrainingConfig

async def train():
    agent = MultiTurnAgent(AgentConfig(model_name="gpt2"))
    await agent.initialize()
    scenarios = [
        {"topic": "refund", "context": "Order delayed"},
        {"topic": "shipping", "context": "Track package"},
    ]
    env = ConversationEnvironment(scenarios=scenarios, max_turns=6)
    reward_fn = create_customer_service_reward()
    config = TrainingConfig(
        num_episodes=100,
        num_generations=8,
        beta=0.1,
        use_reference_model=True,
        clip_ratio=0.2,
    )
    trainer = MultiTurnGRPOTrainer(agent, env, reward_fn, config)
    await trainer.initialize()
    trained_agent = await trainer.train()
    return trained_agent

trained = asyncio.run(train())
"""
"""The minimal example."""


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a random GPT-2 of 64 positions, beside which the program runs."""
    monkeypatch.chdir(tmp_path)
    config = GPT2Config(**{**SIZES, "vocab_size": VOCAB}, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    assert BLOCKS["max_position_embeddings"] > config.n_positions
    AutoModelForCausalLM.from_config(config).save_pretrained("tiny-gpt2")
    tiny_tokenizer().hf.save_pretrained("tiny-gpt2")
    return "tiny-gpt2"


def run_minimal_example(model: str, episodes: int) -> RunLog:
    program = PROGRAM.replace('"gpt2"', f'"{model}"').replace("=100", f"={episodes}")
    names: dict[str, Any] = {}
    exec(compile(program, "minimal.py", "exec"), names)
    assert type(names["trained"]) is MultiTurnAgent
    return RunLog.open("runs/latest")


def test_the_minimal_example_runs(gpt2: str) -> None:
    log = run_minimal_example(gpt2, episodes=4)
    [line] = log.metrics()
    assert line.values["kl/reference"] >= 0
    assert line.values["optimizer/grad_norm"] > 0


@pytest.mark.long
def test_the_minimal_example_runs_to_its_end(gpt2: str) -> None:
    assert len(list(run_minimal_example(gpt2, episodes=100).metrics())) == 25


def test_a_model_that_cannot_be_fetched_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        run_minimal_example("gpt2", episodes=4)
    assert "cannot load a model from 'gpt2'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_complete_tests_are_where_the_document_says_and_seventeen() -> None:
    tree = ast.parse((ROOT / "tests/unit/test_grpo_complete.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert sum(function.name.startswith("test_") for function in functions) == 17
    assert not any("long" in ast.unparse(mark) for function in functions for mark in function.decorator_list)


def test_before_and_after_stand_beside_one_another() -> None:
    page = (ROOT / "docs/evidence/expected-gradients.md").read_text(encoding="utf-8")
    assert "| before | now |" in page
