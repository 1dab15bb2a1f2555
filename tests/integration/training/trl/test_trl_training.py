"""Training by TRL from start to end: it learns, with an adapter or without, and the run folder is ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_desk import step_of_example
from tiny_training import even_share, make_agent, make_environment, plain_logprobs

from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import load_experiment
from stateset_agents.training.trl_grpo_trainer import TrlGRPOTrainer, TrlSettings, train_with_trl_grpo
from stateset_agents.types.errors import ConfigurationError


def config(folder: Path, **settings) -> TrainingConfig:
    base = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    base |= {"learning_rate": 0.02, "lr_scheduler_type": "constant", "beta": 0.01, "max_steps": 3}
    return TrainingConfig(**{**base, "output_dir": str(folder), **settings})


class Heard(Callback):
    def __init__(self) -> None:
        self.moments: list[str] = []
        self.rewards: list[float] = []

    def on_train_begin(self, trainer) -> None:
        self.moments.append("begin")

    async def on_step_end(self, step, metrics) -> None:
        self.moments.append(f"step {step}")
        self.rewards.append(metrics["reward/mean"])

    def on_evaluate(self, step, evaluation) -> None:
        self.moments.append(f"evaluated {step}")

    def on_checkpoint(self, step, path) -> None:
        self.moments.append(f"checkpoint {step}")

    def on_train_end(self, trainer) -> None:
        self.moments.append(f"end {trainer.state}")


async def test_an_adapter_of_trl_stands_on_the_agent_s_own_weights(tmp_path):
    agent = make_agent()
    trainer = TrlGRPOTrainer(
        agent, make_environment(), even_share, config(tmp_path, max_steps=2, lora={"rank": 8})
    )
    await trainer.initialize()
    base, trained = agent.backend.model, trainer.learner.model
    before = {name: value.clone() for name, value in base.state_dict().items()}
    speaker = {id(part) for part in base.parameters()}
    assert speaker < {id(part) for part in trained.parameters()}
    adapter = sum(part.nbytes for part in trained.parameters() if part.requires_grad)
    assert sum(part.nbytes for part in trained.parameters() if id(part) not in speaker) == adapter
    await trainer.step()
    assert agent.backend.has_adapter
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())
    await trainer.close()


@pytest.mark.long
async def test_an_adapter_learns_and_the_agent_speaks_with_it(tmp_path):
    agent, heard = make_agent(), Heard()
    await agent.initialize()
    before = agent.backend.master_model().state_dict()
    settings = config(
        tmp_path, max_steps=10, lora={"rank": 8}, learning_rate=0.03, beta=0.0, eval_steps=10, eval_episodes=2
    )
    same = await train_with_trl_grpo(settings, agent, make_environment(), even_share, callbacks=[heard])
    assert same is agent
    assert sum(heard.rewards[-2:]) / 2 > sum(heard.rewards[:2]) / 2 + 0.2
    assert heard.moments[0] == "begin"
    assert heard.moments[-4:] == ["step 10", "evaluated 10", "checkpoint 10", "end finished"]
    after = agent.backend.master_model().state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    checkpoint = tmp_path / "latest" / "checkpoints" / "step-000010"
    assert (checkpoint / "adapter" / "adapter_model.safetensors").is_file()
    loaded = await type(agent).from_pretrained(checkpoint, chat_template="plain", max_new_tokens=3)
    weights = loaded.backend.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in after.items())
    await loaded.close()
    await agent.close()


async def test_a_run_by_trl_leaves_what_ours_leaves(tmp_path):
    agent, heard = make_agent(), Heard()
    trainer = TrlGRPOTrainer(
        agent,
        make_environment(),
        even_share,
        config(tmp_path, advantage_estimator="turn_gae", num_iterations=2, save_steps=2),
        callbacks=[heard],
    )
    async with trainer:
        await trainer.train()
        assert trainer.progress.step == 3
    assert heard.moments == [
        "begin",
        "step 1",
        "step 2",
        "checkpoint 2",
        "step 3",
        "checkpoint 3",
        "end finished",
    ]
    run = RunFolder.open(tmp_path / "latest")
    assert {path.name for path in run.path.iterdir()} >= {"config.yaml", "summary.json", "report.html"}
    lines = list(RunLog(run).metrics())
    assert [line.step for line in lines] == [1, 2, 3]
    assert {"loss/total", "optimizer/grad_norm", "loss/value", "reward/mean"} <= lines[0].values.keys()
    trained = [line for line in RunLog(run).rollouts() if line.stage == "train"]
    assert len(trained) == 3 * 16
    assert all(line.advantages is not None and len(line.advantages) == sum(line.mask) for line in trained)
    assert RunLog(run).summary()["ended"] == "finished"


@pytest.mark.parametrize(
    "changes",
    [{"lora": {"rank": 2}, "advantage_estimator": "turn_gae"}, pytest.param({}, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.long
async def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path, changes):
    found = []
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        run = None
        for last in steps:
            agent = make_agent()
            settings = config(tmp_path / name, max_steps=3, save_steps=2, num_iterations=2, **changes)
            trainer = TrlGRPOTrainer(agent, make_environment(), even_share, settings, run=run)
            await trainer.initialize()
            if run is not None:
                await trainer.load_checkpoint()
                assert trainer.step_number == 2
            while trainer.step_number < last:
                await trainer.step()
            await trainer.save_checkpoint()
            run = trainer.run
            await trainer.stop()
            found.append(agent.backend.master_model().state_dict())
            await agent.close()
    assert all(torch.equal(value, found[2][name]) for name, value in found[0].items())
    assert not all(torch.equal(value, found[1][name]) for name, value in found[0].items())


async def test_what_trl_cannot_follow_is_said_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigurationError, match=r"kl_controller 'adaptive' does not go with TRL"):
        TrlGRPOTrainer(
            make_agent(), make_environment(), even_share, config(tmp_path, kl_controller="adaptive")
        )
    with pytest.raises(ConfigurationError, match="write TrlSettings"):
        TrlGRPOTrainer(make_agent(), make_environment(), even_share, config(tmp_path), trl={"options": {}})
    assert not any(tmp_path.iterdir())


@pytest.mark.long
async def test_an_error_inside_trl_ends_the_training_and_is_told(tmp_path):
    agent = make_agent()
    trainer = TrlGRPOTrainer(agent, make_environment(), even_share, config(tmp_path))
    await trainer.initialize()

    def broken(*_, **__):
        raise RuntimeError("out of memory on the device")

    trainer.learner.trainer.compute_loss = broken
    with pytest.raises(RuntimeError, match="out of memory on the device"):
        await trainer.train()
    with pytest.raises(ConfigurationError, match="TRL's last update broke off: make a new trainer"):
        await trainer.train()
    await trainer.close()
    events = [event["event"] for event in RunLog(trainer.run).events()]
    assert "checkpoint" not in events  # half a step is not kept
    assert RunLog(trainer.run).summary()["ended"] == "failed"


async def test_where_all_are_equally_good_the_weights_stand_still(tmp_path):
    agent = make_agent()
    await agent.initialize()
    before = {name: value.clone() for name, value in agent.backend.model.state_dict().items()}
    await train_with_trl_grpo(
        config(tmp_path, beta=0.0, max_steps=1), agent, make_environment(), lambda replies: 1.0
    )
    after = agent.backend.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    await agent.close()


@pytest.mark.long
async def test_trl_s_own_generation_plays_the_same_kind_of_conversations(tmp_path):
    agent = make_agent()
    trainer = TrlGRPOTrainer(
        agent,
        make_environment(),
        even_share,
        config(tmp_path, lora={"rank": 2}, max_steps=2, temperature=0.8, advantage_estimator="turn_group"),
        trl=TrlSettings(generation="trl"),
    )
    sizes = []
    async with trainer:
        generate = trainer.learner.trainer._generate_single_turn

        def watched(prompts, *others):
            sizes.append(len(prompts))
            return generate(prompts, *others)

        trainer.learner.trainer._generate_single_turn = watched
        for _ in range(2):
            weights = trainer.learner.weights()
            model = agent.backend.master_model()
            model.load_state_dict(weights)
            groups = await trainer.generate_trajectories(trainer.environment.scenarios("train")[:2])
            for one in (trajectory for group in groups for trajectory in group.trajectories):
                assert one.status.value != "failed", one.error
                told = torch.tensor([value for turn in one.turns for value in turn.completion.logprobs])
                torch.testing.assert_close(told, plain_logprobs(model, one, 0.8), atol=1e-4, rtol=1e-4)
            assert len({tuple(t.token_ids) for group in groups for t in group.trajectories}) > 4
            await trainer.training_step(groups)
        assert sizes == [8, 8] * 2  # two turns of eight conversations, each turn in one call


@pytest.mark.long
async def test_the_desk_s_file_trains_an_adapter_and_its_checkpoint_is_a_model(tmp_path):
    run = await step_of_example("desk_with_trl.yaml", tmp_path)
    assert load_experiment(run.path).trl == TrlSettings()
    assert (run.checkpoints / "step-000001" / "adapter" / "adapter_config.json").is_file()
    assert run.report.is_file()
