"""What `trainer.config = ...` changes between two steps, and what it refuses."""

from __future__ import annotations

import pytest
import yaml
from control_toys import Signals
from full_disk import files_of_at_most
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, make_trainer

from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.reasoning.trainer import GRPOTrainer
from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.training.trl_grpo_trainer import TrlGRPOTrainer
from stateset_agents.types.errors import ConfigurationError

CHATS = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
    for word in ("ada", "bob", "cat", "dog")
]


def changed(trainer, **settings):
    trainer.config = trainer.config.model_copy(update=settings)


def written(trainer, section="training"):
    return yaml.safe_load(trainer.run.config.read_text())[section]


async def sft_trainer(folder):
    config = SFTConfig(max_steps=2, output_dir=str(folder), progress=False)
    return SFTTrainer(make_agent(), CHATS, config)


async def control_trainer(folder):
    environment = Signals()
    config = ControlConfig(
        total_steps=768, num_groups=8, group_size=8, output_dir=str(folder), progress=False
    )
    return ControlTrainer(MlpPolicy(environment.spec, hidden=(8,)), environment, config)


async def grpo_trainer(folder):
    return make_trainer(folder, max_steps=2, advantage_normalization="none")


@pytest.mark.parametrize("make", [grpo_trainer, sft_trainer, control_trainer])
async def test_what_a_trainer_was_made_with_is_refused_by_name_and_config_yaml_stays(tmp_path, make):
    trainer = await make(tmp_path)
    await trainer.initialize()
    before = trainer.config
    text = trainer.run.config.read_text()
    for name, value in {
        "learning_rate": 0.5,
        "clip_ratio": 0.4,
        "advantage_estimator": "group" if isinstance(before, ControlConfig) else "branch",
        "num_generations": 8,
        "entropy_coef": 0.1,
        "per_device_train_batch_size": 3,
        "report_to": ("tensorboard",),
        "seed": 3,
    }.items():
        if name in type(before).model_fields:
            refused = rf"cannot change {name} from .* to .*: make another"
            with pytest.raises(ConfigurationError, match=refused):
                changed(trainer, **{name: value})
    with pytest.raises(ConfigurationError, match="save_steps: input should be greater than or equal to 0"):
        changed(trainer, save_steps=-1)
    assert trainer.config is before
    assert trainer.run.config.read_text() == text
    await trainer.stop()


@pytest.mark.parametrize("make", [grpo_trainer, sft_trainer, control_trainer])
async def test_settings_that_cannot_be_written_are_not_used(tmp_path, make):
    async with await make(tmp_path) as trainer:
        before, text = trainer.config, trainer.run.config.read_text()
        is_numeric = isinstance(before, ControlConfig)
        length = "total_steps" if is_numeric else "max_steps"
        optimization = (trainer._parts.checkpoints if is_numeric else trainer.learner).optimization
        planned = optimization.length
        with files_of_at_most(100), pytest.raises(ConfigurationError, match=r"cannot write .*config.yaml"):
            changed(trainer, **{length: 1500, "save_total_limit": 7})
        assert trainer.config is before
        assert trainer.run.config.read_text() == text
        assert (optimization.length, trainer._parts.checkpoints.limit) == (planned, before.save_total_limit)
        changed(trainer, **{length: 1500, "save_total_limit": 7})
        assert (trainer.config.save_total_limit, trainer._parts.checkpoints.limit) == (7, 7)
        assert optimization.length >= 1500


async def test_a_longer_training_follows_its_own_schedule_and_writes_its_settings(tmp_path, caplog):
    trainer = make_trainer(tmp_path, max_steps=2, lr_scheduler_type="linear", warmup_ratio=0.0)
    await trainer.train()
    assert trainer.summary()["deterministic"]
    changed(trainer, max_steps=4, save_steps=1, save_total_limit=3)
    assert "the run was planned for 2 steps and is for 4 now" in caplog.text
    await trainer.train()
    lines = RunLog(trainer.run).metrics()
    rates = [line.values["optimizer/learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])  # of 2 steps, then of 4
    assert (written(trainer)["max_steps"], written(trainer)["save_steps"]) == (4, 1)
    assert len(list(trainer.run.checkpoints.glob("step-*"))) == 3
    assert trainer.summary()["deterministic"] is False
    [event] = [event for event in RunLog(trainer.run).events() if event["event"] == "settings changed"]
    assert (event["step"], event["changes"]) == (2, {"max_steps": 4, "save_steps": 1, "save_total_limit": 3})
    await trainer.stop()
    again = make_trainer(tmp_path, run=trainer.run, max_steps=4, lr_scheduler_type="linear", warmup_ratio=0.0)
    await again.load_checkpoint()
    assert again.step_number == 4
    await again.close()


class Lengthens(Callback):
    """Gives the trainer other settings as its first step ends."""

    def __init__(self, **settings):
        self.settings = settings

    def on_train_begin(self, trainer):
        self.trainer = trainer

    def on_step_end(self, step, metrics):
        if self.settings:
            changed(self.trainer, **self.settings)
            self.settings = {}


async def test_conversations_beside_the_update_go_on_where_a_callback_lengthens_the_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, max_staleness=1)
    trainer.callbacks.append(Lengthens(max_steps=4))
    await trainer.train()
    assert (trainer.state, trainer.step_number) == ("finished", 4)
    await trainer.close()


async def test_a_fine_tuning_and_a_numeric_training_go_on_longer(tmp_path):
    async with await sft_trainer(tmp_path) as trainer:
        trainer.callbacks.append(Lengthens(max_steps=3))
        await trainer.train()
        assert (trainer.step_number, written(trainer, "sft")["max_steps"]) == (3, 3)
        assert trainer.learner.optimization.length == 3
    async with await control_trainer(tmp_path) as numeric:
        numeric.callbacks.append(Lengthens(total_steps=1500))
        await numeric.train()
        assert numeric.step_number >= 1500
        assert written(numeric)["total_steps"] == 1500


async def test_a_value_of_another_type_is_refused_though_it_could_be_read_as_one(tmp_path):
    trainer = await grpo_trainer(tmp_path)
    await trainer.initialize()
    with pytest.raises(ConfigurationError, match="save_steps must be 5, got '5'"):
        changed(trainer, save_steps="5")
    await trainer.close()


async def test_before_a_trainer_is_ready_everything_but_its_trackers_can_change(tmp_path):
    trainer = await control_trainer(tmp_path)
    changed(trainer, num_groups=2, learning_rate=0.5)
    async with trainer:
        await trainer.train()
    assert written(trainer)["learning_rate"] == 0.5
    first, *_ = RunLog(trainer.run).metrics()
    assert first.values["rollout/episodes"] == 2 * 8
    other = make_trainer(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot change report_to"):
        changed(other, report_to=("tensorboard",))
    with pytest.raises(ConfigurationError, match="config must be a TrainingConfig, got dict"):
        other.config = {"max_steps": 3}
    await other.close()


@pytest.mark.long
async def test_trl_and_live_objects_keep_the_length_that_they_were_made_with(tmp_path):
    config = TrainingConfig(max_steps=2, num_generations=4, output_dir=str(tmp_path), progress=False)
    trainer = TrlGRPOTrainer(make_agent(), make_environment(), even_share, config)
    await trainer.initialize()
    with pytest.raises(ConfigurationError, match="TRL was made for 2 steps and cannot go on to 3"):
        changed(trainer, max_steps=3)
    assert (trainer.config.max_steps, written(trainer)["max_steps"]) == (2, 2)
    changed(trainer, save_steps=1)
    assert written(trainer)["save_steps"] == 1
    await trainer.close()
    async with GRPOTrainer(tiny_model(), None, tiny_tokenizer().hf, even_share) as live:
        with pytest.raises(ConfigurationError, match="cannot change learning_rate from"):
            changed(live, learning_rate=0.5)
