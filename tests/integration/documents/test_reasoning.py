"""The chapter on reasoning: every call as it is printed there, on tiny real models, in plain scripts.

`rows_s3.yaml` says which test shows which row, docs/documents.md what each name is called here. Tests without
`async` have no event loop, as the chapter's programs have none.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from repository_paths import ROOT
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_agent
from tiny_vlm import tiny_processor, tiny_vlm

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.thoughts import read_reasoned
from stateset_agents.reasoning import (
    AdaptiveKLController,
    ContinualGRPO,
    DeepSeekRewardFunction,
    GRPOTrainer,
    MultiModalGRPO,
    ReasoningDistillation,
    ResponseCache,
    TemperatureScheduler,
    adaptive_group_size,
    batch_generate_responses,
    normalize_rewards_per_group,
    setup_distributed_grpo,
)
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

REPLY = "<think>\n2 + 3 = 5\n</think>\n\n<answer>\n5\n</answer>"


def reward_fn(prompt: str, response: str) -> float:
    """The share of letters before n, which any policy can learn."""
    return sum(letter < "n" for letter in response) / max(1, len(response))


def make(**settings: Any) -> GRPOTrainer:
    tokenizer = tiny_tokenizer().hf
    return GRPOTrainer(
        policy_model=tiny_model("llama"),
        ref_model=tiny_model("llama"),
        tokenizer=tokenizer,
        reward_fn=reward_fn,
        **{"group_size": 4, "max_length": 12, **settings},
    )


# ------------------------------------------------------------------------------ the trainer


def test_the_trainer_has_the_printed_arguments_and_attributes() -> None:
    policy, reference, tokenizer = tiny_model("llama"), tiny_model("llama"), tiny_tokenizer().hf
    trainer = GRPOTrainer(policy, reference, tokenizer, reward_fn, 8, 0.2, 0.04, 2048, 0.8)
    assert trainer.policy is policy
    assert trainer.ref_policy is reference
    assert trainer.tokenizer is tokenizer
    settings = (trainer.group_size, trainer.clip_epsilon, trainer.kl_coef, trainer.max_length)
    assert settings == (8, 0.2, 0.04, 2048)
    assert trainer.temperature == 0.8
    [group, *_] = trainer.optimizer.param_groups
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert (group["betas"], trainer.config.learning_rate) == ((0.9, 0.95), 5e-6)
    trainer.close()


def test_the_printed_step_runs_by_hand_and_the_engine_follows_it() -> None:
    trainer = make(learning_rate=1e-2)
    groups = trainer.generate_groups(["ab", "cde"])
    keys = {"prompt", "prompt_ids", "responses", "response_ids", "rewards", "advantages"}
    assert all(keys < group.keys() for group in groups)
    total_loss: Any = 0
    for group_data in groups:
        loss, metrics = trainer.compute_loss(group_data)
        total_loss += loss
        assert metrics.keys() == {"pg_loss", "kl_penalty", "clip_fraction", "mean_reward"}
        assert metrics["clip_fraction"] == 0  # nothing has moved since these were sampled
    total_loss /= len(groups)
    trainer.optimizer.zero_grad()
    total_loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.policy.parameters(), 1.0)
    for parameters in trainer.optimizer.param_groups:
        parameters["lr"] = 0.05
    trainer.optimizer.step()
    assert trainer.compute_loss(groups[0])[1]["kl_penalty"] > 0
    [fresh] = trainer.generate_groups(["ab"])
    assert abs(trainer.compute_loss(fresh)[1]["pg_loss"]) < 1e-5  # sampled with the new weights: ratio 1
    trainer.close()


def test_a_training_step_is_one_call() -> None:
    trainer = make()
    avg_metrics = trainer.train_step(["ab", "cde"])
    assert avg_metrics["loss"] == pytest.approx(avg_metrics["pg_loss"] + avg_metrics["kl_penalty"])
    assert {"clip_fraction", "mean_reward"} < avg_metrics.keys()
    trainer.close()


async def test_in_an_event_loop_the_same_calls_are_awaited() -> None:
    async with make() as trainer:
        with pytest.raises(ConfigurationError, match=r"write \(await train_step\(\.\.\.\)\)\['loss'\]"):
            trainer.train_step(["ab"])["loss"]
        with pytest.raises(ConfigurationError, match=r"write await generate_groups\(\.\.\.\)"):
            [*trainer.generate_groups(["ab"])]
        assert (await trainer.train_step(["ab"]))["skipped"] == 0


def test_a_controller_and_a_scheduler_set_what_the_next_step_takes() -> None:
    trainer = make()
    controller, scheduler = AdaptiveKLController(), TemperatureScheduler()
    trainer.kl_coef = controller.update(0.02)
    trainer.temperature = scheduler.step(0.9)
    [group] = trainer.generate_groups(["ab"])
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.mul_(1.1)
    once = trainer.compute_loss(group)[1]["kl_penalty"]
    trainer.kl_coef = 2 * trainer.kl_coef
    assert trainer.compute_loss(group)[1]["kl_penalty"] == pytest.approx(2 * once, rel=1e-4)
    assert (trainer.kl_coef, trainer.temperature) == (pytest.approx(0.12), 0.995)
    without = GRPOTrainer(tiny_model("llama"), None, tiny_tokenizer().hf, reward_fn, kl_coef=0.0)
    with pytest.raises(ConfigurationError, match=r"kl_coef must be 0 in a training that began with 0, got"):
        without.kl_coef = 0.1
    for each in (trainer, without):
        each.close()


# ------------------------------------------------------------------------------ the details


def test_an_array_of_rewards_is_normalised_to_an_array() -> None:
    normalized = normalize_rewards_per_group(np.array([1.0, 0.0, 0.0, 1.0]))
    assert isinstance(normalized, np.ndarray)
    assert normalized == pytest.approx([1.0, -1.0, -1.0, 1.0])
    assert normalize_rewards_per_group(np.array([1.0] + [0.0] * 19)).max() == 3.0  # clipped
    assert normalize_rewards_per_group([[1.0, 0.0], [2.0]]) == [pytest.approx([1.0, -1.0]), [0.0]]


def test_responses_are_sampled_in_batches_and_grouped_by_prompt() -> None:
    model, tokenizer, prompts = tiny_model("llama"), tiny_tokenizer().hf, ["ab", "cde"]
    grouped_responses = batch_generate_responses(
        model, tokenizer, prompts, group_size=8, batch_size=32, max_length=12
    )
    assert [len(responses) for responses in grouped_responses] == [8, 8]
    assert all(isinstance(response, str) for responses in grouped_responses for response in responses)


def test_the_kl_controller_moves_its_coefficient_as_printed() -> None:
    controller = AdaptiveKLController(target_kl=0.01, horizon=10000)
    assert controller.kl_coef == 0.04
    assert controller.update(0.02) == controller.kl_coef == pytest.approx(0.06)  # error 1
    assert controller.update(0.012) == pytest.approx(0.06)  # error .2
    assert controller.update(0.001) == pytest.approx(0.04)  # error -.9
    for _ in range(20):
        controller.update(1.0)
    assert controller.kl_coef == 1.0
    slow = AdaptiveKLController(target_kl=0.01, horizon=1000)
    assert slow.update(1.0, num_episodes=100) == pytest.approx(0.04 * (1 + 0.2 * 0.1))  # the horizon's effect
    with pytest.raises(ConfigurationError, match="target kl must be positive, got 0"):
        AdaptiveKLController(target_kl=0)


def test_the_temperature_follows_the_reward_as_printed() -> None:
    scheduler = TemperatureScheduler(initial_temp=1.0, min_temp=0.3, decay_rate=0.995)
    assert scheduler.step(0.9, target_reward=0.7) == scheduler.current_temp == 0.995
    assert scheduler.step(0.1) == 1.0  # 1 % warmer, and at most the first
    assert TemperatureScheduler(1.0, 0.3, 0.1).step(mean_reward=0.9) == 0.3


@pytest.mark.parametrize(("difficulty", "size"), [("easy", 6), ("medium", 8), ("hard", 12), ("?", 8)])
def test_a_group_s_size_follows_the_label(difficulty: str, size: int) -> None:
    assert adaptive_group_size(problem_difficulty=difficulty, base_size=8) == size
    assert adaptive_group_size(difficulty) == size


def test_three_stages_have_the_printed_weights_and_steps() -> None:
    stages: list[dict[str, Any]] = [
        {"until": 5_000, "weights": {"format": 0.5, "answer": 0.1}},
        {"until": 15_000, "weights": {"format": 0.2, "answer": 0.8}, "difficulty": "easy"},
        {"weights": {"format": 0.1, "answer": 1.0}},
    ]
    config = TrainingConfig(max_steps=20_000, stages=stages)
    assert [stage.weights for stage in config.stages] == [stage["weights"] for stage in stages]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_one_process_is_set_up_as_printed() -> None:
    processes = setup_distributed_grpo(world_size=1, local_rank=0)
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    trainer = GRPOTrainer(model, None, tiny_tokenizer().hf, reward_fn, 4, max_length=12, processes=processes)
    assert trainer.config.gradient_checkpointing is True
    assert trainer.train_step(["ab"])["skipped"] == 0
    trainer.close()


# ------------------------------------------------------------------------------ rewards


def test_a_reply_in_the_format_is_one_thought_and_one_answer() -> None:
    reasoned = read_reasoned(Message(role="assistant", content=REPLY))
    assert reasoned is not None
    assert (reasoned.thinking.strip(), reasoned.answer.strip()) == ("2 + 3 = 5", "5")
    swapped = "<answer>5</answer><think>2 + 3 = 5</think>"
    assert read_reasoned(Message(role="assistant", content=swapped)) is None


def test_the_truth_comes_from_data_and_a_line_says_where_to_give_it() -> None:
    reward = DeepSeekRewardFunction()
    with pytest.raises(ConfigurationError) as refused:
        reward.compute_reward("2 + 3?", REPLY)
    assert str(refused.value) == (
        "what is right comes from your data, not from the prompt: write compute_reward(prompt, response, "
        'truth=answer), or give GRPOTrainer Scenario(id=..., opening=prompt, context={"answer": ...}) in the '
        "place of the prompt"
    )
    assert reward.compute_reward("2 + 3?", REPLY, 5) == 1.1
    assert reward.compute_reward("2 + 3?", REPLY, truth=6) == 0.1


# ------------------------------------------------------------------------------ caches and teachers


class Generator:
    """Anything with `generate`."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def generate(self, prompt: str, **kwargs: Any) -> str:
        self.asked.append((prompt, kwargs))
        return f"reply {len(self.asked)}"


def test_a_cache_stands_before_anything_that_generates() -> None:
    cache, model = ResponseCache(max_size=100000), Generator()
    first = cache.get_or_generate("2 + 3?", model, temperature=0.1)
    assert cache.get_or_generate("2 + 3?", model, temperature=0.1) == first == "reply 1"
    assert cache.get_or_generate("2 + 3?", model, temperature=0.2) == "reply 2"
    assert cache.get_or_generate("2 + 3?", Generator(), temperature=0.1) == "reply 1"  # its own first
    model.version = 1
    assert cache.get_or_generate("2 + 3?", model, temperature=0.1) == "reply 3"
    assert len(cache) == 4
    with pytest.raises(ConfigurationError, match="give an agent, or an object with generate"):
        cache.get_or_generate("2 + 3?", object())


def test_a_cache_knows_a_module_s_weights_and_refuses_one_in_training() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def generate(self, prompt: str, **kwargs: Any) -> float:
            return float(self.weight.detach())

    cache, model = ResponseCache(), Model().eval()
    assert cache.get_or_generate("a", model) == cache.get_or_generate("a", model) == 0.0
    with torch.no_grad():
        model.weight += 1
    assert cache.get_or_generate("a", model) == 1.0
    with pytest.raises(ConfigurationError, match=r"being trained .* call model\.eval\(\) first"):
        cache.get_or_generate("a", model.train())
    with pytest.raises(
        ConfigurationError, match="a question must be text and its settings plain JSON values"
    ):
        cache.get_or_generate(torch.zeros(1), model.eval())


def test_a_teacher_s_traces_train_a_student(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    teacher = MultiTurnAgent(AgentConfig(chat_template="plain"), backend=ScriptedBackend(lambda _: REPLY))
    student = make_agent()
    distillation = ReasoningDistillation(teacher_model=teacher, student_model=student)
    prompts = ["2 + 3?", "1 + 4?"]
    distillation_data = distillation.generate_distillation_data(prompts)
    assert "nothing says what is right for 2 texts" in caplog.text
    assert len(distillation_data) == 2
    for data, prompt in zip(distillation_data, prompts, strict=True):
        assert data["prompt"] == prompt
        assert (data["thinking"].strip(), data["answer"].strip()) == ("2 + 3 = 5", "5")
        assert data["reward"] is None  # nothing verified it
    distilled = distillation.train_student(
        distillation_data, max_steps=2, output_dir=str(tmp_path), validation_share=0.0, progress=False
    )
    assert distilled.agent is student
    assert (distilled.model_folder / "model.safetensors").is_file()
    distillation.close()


# ------------------------------------------------------------------------------ directions


def test_a_problem_without_a_picture_is_processed_as_text() -> None:
    settings = {"group_size": 2, "max_length": 48, "kl_coef": 0.0}
    trainer = MultiModalGRPO(tiny_vlm(), None, tiny_processor(), reward_fn, **settings)
    group = trainer.process_problem("say", None)
    assert len(group["responses"]) == 2
    assert "<image>" not in group["prompt"]
    assert "pixels" not in group
    trainer.trainer.close()


def test_a_new_domain_is_learned_from_data(tmp_path: Path) -> None:
    new_data = [{"problem": f"{number} + 1?", "answer": number + 1} for number in range(4)]
    continual = ContinualGRPO(base_model=make_agent(max_new_tokens=4), memory_size=10000)
    config = TrainingConfig(
        max_steps=1, num_generations=2, beta=0.0, save_steps=0, progress=False, output_dir=str(tmp_path)
    )
    learned = continual.learn_new_domain(new_data, config=config)
    assert learned.domain == "domain 1"
    num_held_out = learned.after["domain 1"].n
    assert num_held_out > 0
    assert 0 < len(continual.memory) <= len(new_data) - num_held_out
    assert continual.model.is_running
    continual.close()


# ------------------------------------------------------------------------------ the project


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    done = run(
        "scripts/train_grpo.py",
        *("--config", "configs/grpo_math.yaml", "--output-dir", str(tmp_path / "grpo_math_experiment")),
        *("--wandb-project", "grpo-experiments"),
        folder=ROOT / "examples" / "grpo_math",
    )
    assert done.returncode == 1
    assert done.stderr.strip() == 'error: reporting to wandb needs it installed: pip install "wandb>=0.22"'


@pytest.mark.long
def test_the_printed_commands_train_and_evaluate(tmp_path: Path) -> None:
    project, out = ROOT / "examples" / "grpo_math", tmp_path / "grpo_math_experiment"
    settings = ("--config", "configs/grpo_math.yaml", "--output-dir", str(out), "--max-steps", "2")
    assert "model: " in run("scripts/train_grpo.py", *settings, folder=project).stdout
    evaluated = ("--model-path", str(out / "final"), "--dataset-path", "data/math_problems.json")
    done = run("scripts/evaluate.py", *evaluated, "--output-dir", str(tmp_path / "results"), folder=project)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "evaluation.json").is_file()


def test_the_project_has_the_printed_files() -> None:
    project = ROOT / "examples" / "grpo_math"
    files = {
        "grpo": ["__init__.py", "trainer.py", "rewards.py", "data.py", "utils.py"],
        "scripts": ["train_grpo.py", "evaluate.py", "distill.py"],
        "configs": ["grpo_math.yaml", "grpo_code.yaml"],
        "data": ["math_problems.json", "code_problems.json"],
    }
    for folder, names in files.items():
        assert all((project / folder / name).is_file() for name in names), folder
    assert (project / "README.md").is_file()


def test_a_group_s_mean_is_a_noisy_baseline_by_one_over_its_size() -> None:
    rng = np.random.default_rng(0)
    for size in (4, 16):
        means = rng.normal(size=(20_000, size)).mean(axis=1)
        assert means.var() == pytest.approx(1 / size, rel=0.05)
        gains = [normalize_rewards_per_group(row)[0] for row in rng.normal(size=(200, size))]
        assert max(map(abs, gains)) <= math.sqrt(size - 1) + 1e-6
