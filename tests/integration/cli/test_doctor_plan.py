"""`doctor --plan`: the memory of a training on a GPU that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository_paths import ROOT
from tiny_models import odd_model
from transformers import LlavaConfig, Qwen3Config

from stateset_agents.cli.main import main
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.training import trainer as trainer_module
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.training.memory_plan import MemoryPlan, plan_memory, plan_training
from stateset_agents.types.errors import ConfigurationError

FILE = str(ROOT / "examples" / "desk_with_lora.yaml")


def test_a_plan_names_each_phase_and_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", FILE, "--gpu-memory", "24GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan["phases"]) == ["start", "rollouts", "update", "hand-over"]
    assert plan["fits"] is True
    assert plan["settings"] == {
        "gradient_checkpointing": False,
        "micro_batch_tokens": 32768,
        "max_cached_tokens": 262144,
    }


def test_what_does_not_fit_exits_with_1_and_the_settings_that_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--plan", FILE, "--gpu-memory", "1.13GB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (update,) = [line for line in lines if line.lstrip().startswith("update")]
    assert "GB too much: rollout_sleep: true, gradient_checkpointing: true, " in update or (
        "GB too much: rollout_sleep: true, " in update and "recomputed" in update
    )
    assert "or take a smaller model, or lora.quantization 4bit" in update


@pytest.mark.long
def test_a_run_keeps_what_the_plan_chose_and_what_its_file_says() -> None:
    config = load_experiment(FILE, {"training.micro_batch_tokens": 4096})
    plan = plan_training(config.agent, config.training, total=24 * 2**30)
    agent, adopted = plan.adopted(config.agent, config.training)
    assert agent.max_cached_tokens == plan.max_cached_tokens
    assert adopted.micro_batch_tokens == 4096
    assert adopted.gradient_checkpointing is False
    assert TrainingConfig(**adopted.model_dump()) == adopted


@pytest.mark.long
async def test_a_training_plans_before_it_loads_and_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "gpu_memory", lambda device: (24 * 2**30, 0))
    changes = {"training.output_dir": str(tmp_path), "training.progress": False, "agent.device": "cpu"}
    trainer = Experiment(load_experiment(FILE, changes)).trainer
    await trainer.initialize()
    assert trainer.memory_plan is not None
    assert trainer.config.micro_batch_tokens == trainer.memory_plan.micro_batch_tokens
    assert trainer.agent.config.max_cached_tokens == trainer.memory_plan.max_cached_tokens
    kept = (trainer.run.path / "config.yaml").read_text()
    assert f"micro_batch_tokens: {trainer.memory_plan.micro_batch_tokens}" in kept
    metrics = await trainer.step()
    assert metrics["memory/gpu/predicted_peak_mib"] == pytest.approx(trainer.memory_plan.peak / 2**20)
    await trainer.close()


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "gpu_memory", lambda device: (int(1.13 * 2**30), 0))
    trainer = Experiment(load_experiment(FILE, {"training.output_dir": str(tmp_path)})).trainer
    with pytest.raises(ConfigurationError, match=r"update takes .* usable GB: rollout_sleep"):
        await trainer.initialize()
    assert trainer.agent.loads_model
    assert files(tmp_path) == []
    await trainer.close()


def test_a_model_that_cannot_be_simulated_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd_model("rwkv").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    file = tmp_path / "train.yaml"
    file.write_text("agent: {model_name: ./model}\nenvironment: retail_desk\n")
    assert main(["doctor", "--plan", str(file), "--gpu-memory", "24GB"]) == 1
    error = capsys.readouterr().err
    assert "a rwkv cannot be planned" in error
    assert error.count("\n") == 1


def refused(settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line in which a plan of these settings is refused."""
    file = tmp_path / "train.yaml"
    file.write_text(f"environment: retail_desk\n{settings}\n")
    capsys.readouterr()
    assert main(["doctor", "--plan", str(file), "--gpu-memory", "24GB"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("trl: {}", "the memory of a training by TRL is TRL's own, and is not planned"),
        (
            "training: {num_processes: 2, parallelism: fsdp2}",
            "the memory of shards (parallelism fsdp2) cannot be planned: set micro_batch_tokens",
        ),
        ("agent: {model_name: 'embedded:desk', engine: plain}", "the memory of the engine plain cannot be"),
        ("agent: {model_name: 'embedded:desk', device: cpu}", "agent.device is cpu, which takes nothing"),
        ("agent: {model_name: scripted}", "a scripted agent has no weights to train"),
        ("agent: {model_name: 'vllm:http://127.0.0.1:9'}", "is a server, and a model's own folder"),
        ("agent: {model_name: 'embedded:dsk'}", "no embedded model 'embedded:dsk'; shipped: embedded:desk"),
        ("agent: {model_name: ./none.gguf}", "does not exist; give a GGUF file's path, or a folder"),
        ("agent: {model_name: ./nothing}", "does not exist; give a folder written by save_pretrained"),
        ("agent: {model_name: ./empty}", "it has no config.json"),
        (
            "agent: {model_name: ./small}\ntraining: {lora: {target_modules: [query]}}",
            "stateset-agents: lora.target_modules: 'query' names no linear layer: use",
        ),
        ("agent: {model_name: ./pictures}", "the memory of a llava, which reads pictures, cannot be planned"),
        (
            "agent: {model_name: 'embedded:desk'}\ntraining: {distillation: {teacher: 'embedded:dsk'}}",
            "no embedded model 'embedded:dsk'",
        ),
    ],
)
def test_what_is_not_planned_is_said_in_one_line(
    settings: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    LlavaConfig().save_pretrained(tmp_path / "pictures")
    MODEL.save_pretrained(tmp_path / "small")
    settings = settings if "agent" in settings else f"agent: {{model_name: 'embedded:desk'}}\n{settings}"
    assert line in refused(settings, tmp_path, capsys)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--plan", FILE], "there is no GPU here to plan for: say how large one is, --gpu-memory 24GB"),
        (["--plan", FILE, "--gpu-memory", "lots"], "a GPU's memory is given as 24GB, got 'lots'"),
        (["--plan", FILE, "--gpu-memory", "24b"], "a GPU's memory is given as 24GB, got '24b'"),
        (
            ["--plan", FILE, "--gpu-memory", "0.5GB"],
            "of the GPU's 0.5 GB others have 0.0, and CUDA takes 1.2",
        ),
        (["--gpu-memory", "24GB"], "--gpu-memory is of a plan: give --plan FILE, too"),
        (["--plan", str(ROOT / "examples" / "cartpole.yaml")], "--plan is for trainings of language models"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", *options]) == 1
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


MODEL = Qwen3Config(
    **{"vocab_size": 20_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    max_position_embeddings=512,
)


def followed(mend: str, agent: AgentConfig, training: TrainingConfig) -> tuple[AgentConfig, TrainingConfig]:
    """The settings with the first of those that the plan's line names."""
    first = mend.split(", ")[0].removeprefix("or ")
    tokens = training.micro_batch_tokens or 0
    changes: dict[str, dict[str, object]] = {
        "rollout_sleep: true": {"rollout_sleep": True},
        "gradient_checkpointing: true": {"gradient_checkpointing": True},
        "lower micro_batch_tokens": {"micro_batch_tokens": tokens // 2},
        "lower gradient_accumulation_steps": {
            "gradient_accumulation_steps": training.gradient_accumulation_steps // 2
        },
        "train an adapter (lora)": {"lora": {"rank": 4}},
    }
    if first == "lower agent.max_context_tokens":
        return agent.model_copy(update={"max_context_tokens": (agent.max_context_tokens or 0) // 2}), training
    return agent, TrainingConfig(**{**training.model_dump(exclude_unset=True), **changes[first]})


@pytest.mark.long
@pytest.mark.parametrize(
    ("free", "settings", "steps"),
    [
        # Cache, activations, then the size of a pass.
        (
            0.25,
            {"lora": {"rank": 4}, "micro_batch_tokens": 4096},
            ["rollout_sleep", "gradient_checkpointing"],
        ),
        # Weights and their moments are too many, however small a pass is.
        (0.30, {"micro_batch_tokens": 256, "rollout_sleep": True}, ["train an adapter"]),
        # What a critic keeps of a long step.
        (
            0.60,
            {
                "advantage_estimator": "token_gae",
                "gradient_accumulation_steps": 64,
                "micro_batch_tokens": 512,
            },
            ["lower gradient_accumulation_steps"],
        ),
    ],
)
def test_settings_that_a_plan_names_make_it_fit(
    free: float, settings: dict[str, object], steps: list[str]
) -> None:
    agent = AgentConfig(model_name="small", max_context_tokens=512, max_cached_tokens=4096)
    training = TrainingConfig(
        **{"beta": 0.0, "gradient_checkpointing": False, "num_generations": 8, **settings}
    )

    def plan() -> MemoryPlan:
        return plan_memory(MODEL, agent, training, name="small", total=int(1.2e9 + free * 1e9 / 0.92))

    mends = []
    while (made := plan()).too_large:
        assert len(mends) < 12, mends
        mends.append(made.too_large[0].mend)
        agent, training = followed(mends[-1], agent, training)
    for step in steps:
        assert any(mend.startswith(step) for mend in mends), mends


def test_a_pass_beyond_all_memory_is_planned_without_being_laid_out() -> None:
    agent = AgentConfig(model_name="small", max_context_tokens=512, max_cached_tokens=4096)
    training = TrainingConfig(micro_batch_tokens=10**9, gradient_checkpointing=True)
    (phase,) = plan_memory(MODEL, agent, training, name="small", total=24 * 2**30).too_large
    assert phase.name == "update"
    assert phase.mend.startswith(
        "lower micro_batch_tokens" if "rollout_sleep" not in phase.mend else "rollout"
    )
