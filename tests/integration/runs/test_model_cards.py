"""What is saved carries a model card that huggingface_hub reads, with the run's own figures and no path."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from tiny_desk import write_desk
from tiny_training import make_agent, make_trainer

from stateset_agents import MultiTurnAgent
from stateset_agents.core.model_card import Origin, model_card
from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.checkpoint_files import load_checkpoint
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.experiment import Experiment, load_experiment

MEASURED = {
    "evaluation.split": "validation",
    "evaluation.tries": 3,
    "training.lora.rank": 4,
    "training.learning_rate": 0.05,
    "training.eval_steps": 1,
    "training.run_name": "desk",
}


class StopAfter(Callback):
    """Asks for an end after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    async def on_train_begin(self, trainer: Any) -> None:
        self.trainer = trainer

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step:
            self.trainer.request_stop()


async def run_of(folder: Path, *, steps: tuple[int, ...] = (2,), **overrides: Any) -> RunFolder:
    """The run of a desk in this folder; `steps`: after which it is stopped, and gone on with."""
    if not (folder / "run.yaml").exists():
        write_desk(folder)
    run: RunFolder | None = None
    for last in steps:
        settings = {**MEASURED, "training.output_dir": str(folder / "runs"), **overrides}
        config, stop = load_experiment(folder / "run.yaml", settings), StopAfter(last)
        async with Experiment(config, run=run, callbacks=[stop]) as experiment:
            await experiment.before()
            await experiment.train()
            if last == steps[-1]:
                await experiment.after()
        run = experiment.run
    assert run is not None
    return run


def table(card: ModelCard) -> dict[str, list[str]]:
    """The cells of each row of its tables, by the first one's text."""
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.fixture(autouse=True)
def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))


async def test_the_cards_of_a_run_are_read_by_the_hub_s_library_and_say_what_the_run_says(tmp_path):
    run = await run_of(tmp_path)
    summary = RunLog(run).summary()
    last = run.checkpoints / "step-000002"
    card, adapter = (ModelCard.load(last / part / "README.md") for part in ("model", "adapter"))
    assert (card.data.library_name, adapter.data.library_name) == ("transformers", "peft")
    for one in (card, adapter):
        assert one.data.pipeline_tag == "text-generation"
        assert {"stateset_agents", "reinforcement-learning", "grpo", "lora"} <= set(one.data.tags)
        assert one.data.base_model is None  # a folder here has no name there
        assert one.data.model_name == f"{run.path.name}, step 2"
        listed = {result.metric_type: result.metric_value for result in one.data.eval_results}
        assert listed == {"mean_reward": round(summary["after"]["mean_reward"], 4)}
        rows = table(one)
        for column, when in enumerate(("before", "after")):
            told = summary[when]
            bounds = told["reward_interval"]  # None where the two conversations were paid alike
            interval = f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""
            assert rows["reward on validation, sampled"][column] == (
                f"{told['mean_reward']:.3f}{interval}, n {told['num_scored']}"
            )
        assert (rows["learning_rate"], rows["lora.rank"], rows["loss_type"]) == (["0.05"], ["4"], ["grpo"])
        assert "a model of our own, `model`" in one.text
        assert "reward `cli_parts:even_share`" in one.text
    assert "PeftModel.from_pretrained" in adapter.text
    assert "MultiTurnAgent.from_pretrained" in card.text
    (earlier,) = set(run.checkpoints.glob("step-*")) - {last}
    unmeasured = table(ModelCard.load(earlier / "model" / "README.md"))
    assert unmeasured["reward on validation, sampled"] == [rows["reward on validation, sampled"][0], "-"]
    for step, told in ((1, unmeasured), (2, rows)):
        values = [line.values for line in RunLog(run).metrics() if line.step == step]
        (reward,) = [found["eval/reward"] for found in values if "eval/reward" in found]
        assert told["reward on validation while it was trained"] == ["-", f"{reward:.3f}"]
    for checkpoint in (earlier, last):
        load_checkpoint(checkpoint)  # every file's sum is right
    for file in [*last.rglob("*.json"), *last.rglob("*.md"), *last.rglob("*.jinja")]:
        if file.name not in ("state.json", "adapter_config.json"):
            assert str(tmp_path) not in file.read_text(), file


@pytest.mark.long
async def test_a_resumed_run_writes_the_same_cards_byte_by_byte(tmp_path):
    found = []
    for name, steps in (("whole", (2,)), ("parts", (1, 2))):
        output = {"training.output_dir": str(tmp_path / name)}
        run = await run_of(tmp_path, steps=steps, **output)
        files = sorted((run.checkpoints / "step-000002").rglob("README.md"))
        files += sorted((run.checkpoints / "step-000002").rglob("adapter_config.json"))
        found.append([file.read_bytes() for file in files])
    assert len(found[0]) == 3
    assert found[0] == found[1]


class SavesAtTheEnd(Callback):
    """Saves the agent before anything is measured of it."""

    async def on_train_end(self, trainer: Any) -> None:
        await trainer.agent.save_pretrained(trainer.run.path / "saved")


@pytest.mark.long
async def test_a_longer_run_s_card_has_no_figures_of_the_shorter_one(tmp_path):
    run = await run_of(tmp_path, steps=(1,), **{"training.max_steps": 1})
    assert "after" in RunLog(run).summary()
    longer = load_experiment(run.path, {"training.max_steps": 2})
    async with Experiment(longer, run=run, callbacks=[SavesAtTheEnd()]) as experiment:
        await experiment.train()
        assert "after" not in RunLog(run).summary()
        await experiment.after()
    saved, kept = (
        ModelCard.load(run.path / folder / "README.md")
        for folder in ("saved", "checkpoints/step-000002/model")
    )
    name = "reward on validation, sampled"
    assert table(saved)[name] == [table(kept)[name][0], "-"]
    assert table(kept)[name][1] != "-"


@pytest.mark.long
async def test_a_saved_agent_s_card_names_the_hub_s_model_through_any_number_of_trainings(tmp_path):
    agent = make_agent()
    agent.backend.model.name_or_path = "some-lab/small-llama"
    async with agent:
        await agent.save_pretrained(tmp_path / "untrained")
        trainer = make_trainer(tmp_path, agent=agent, max_steps=1, loss_type="dapo")
        await trainer.train()
        await agent.save_pretrained(tmp_path / "first")
        await trainer.stop()
    untrained, first = (ModelCard.load(tmp_path / name / "README.md") for name in ("untrained", "first"))
    assert untrained.data.base_model == first.data.base_model == "some-lab/small-llama"
    assert first.data.base_model_relation == "finetune"
    assert "without training" in untrained.text
    assert "dapo" in first.data.tags
    assert "dapo" not in untrained.data.tags

    again = await MultiTurnAgent.from_pretrained(tmp_path / "first", chat_template="plain", max_new_tokens=3)
    trainer = make_trainer(tmp_path, agent=again, max_steps=1)
    await trainer.train()
    await again.save_pretrained(tmp_path / "second")
    await trainer.close()
    second = ModelCard.load(tmp_path / "second" / "README.md")
    assert second.data.base_model == "some-lab/small-llama"
    assert str(tmp_path) not in second.content


async def test_a_card_of_somebody_else_s_stays_and_that_is_said(tmp_path, caplog):
    (tmp_path / "README.md").write_text("# Mine\n")
    async with make_agent() as agent:
        await agent.save_pretrained(tmp_path)
        assert (tmp_path / "README.md").read_text() == "# Mine\n"
        assert "README.md is not one of ours: it stays as it is" in caplog.text
        (tmp_path / "README.md").write_text("---\ntags: [oh\n---\n")
        await agent.save_pretrained(tmp_path)
        assert (tmp_path / "README.md").read_text().startswith("---\ntags: [oh")


async def test_an_agent_s_card_loads_it_with_what_it_reads_of_conversations(tmp_path):
    agent = make_agent(history="compact", compact_room=40, max_context_tokens=150, compact_prompt="Sum up.")
    agent.config = agent.config.model_copy(update={"max_new_tokens": 8})
    async with agent:
        await agent.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md").text
    (call,) = re.findall(r"MultiTurnAgent.from_pretrained\((.*)\)", card)
    assert call == '"FOLDER", history="compact", max_context_tokens=150, compact_room=40'
    assert "with a `compact_prompt`, to be given again" in card
    settings = {"history": "compact", "max_context_tokens": 150, "compact_room": 40}
    async with await MultiTurnAgent.from_pretrained(tmp_path, max_new_tokens=8, **settings) as loaded:
        assert (loaded.config.history, loaded.context_length) == ("compact", 150)
        await loaded.save_pretrained(tmp_path / "again")
    async with make_agent() as agent:
        await agent.save_pretrained(tmp_path / "plain")
    assert 'from_pretrained("FOLDER")' in (tmp_path / "plain" / "README.md").read_text()


def test_an_adapter_in_few_bits_by_trl_is_described_as_such(tmp_path):
    lora = {"rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"], "quantization": "4bit"}
    run = RunFolder.create(tmp_path)
    run.write_config(
        {
            "agent": {"max_new_tokens": 7, "system_prompt": "be brief"},
            "environment": {"name": "/home/somebody/desks:Desk"},
            "reward": {"name": "environment"},
            "trl": {},
            "training": {"loss_type": "gspo", "lora": lora},
        }
    )
    origin = Origin(base="some-lab/small", run=run.path, step=1)
    card, adapter = ModelCard(model_card(origin)), ModelCard(model_card(origin, adapter=True))
    assert adapter.data.base_model_relation == "adapter"
    assert {"trl", "lora", "gspo"} <= set(adapter.data.tags)
    assert "An adapter on [some-lab/small](https://huggingface.co/some-lab/small): 1 step of" in adapter.text
    assert "held in 4bit" in adapter.text
    assert 'AutoModelForCausalLM.from_pretrained("some-lab/small")' in adapter.text
    assert table(card)["lora.target_modules"] == ["q_proj, v_proj"]
    assert "trained with a `system_prompt`, to be given again" in card.text
    assert "somebody" not in card.content
    assert "be brief" not in card.content  # what it says may be nobody's business
    assert "How good" not in card.text
    assert json.loads(json.dumps(card.data.to_dict())) == card.data.to_dict()
