"""Hard and wrong inputs in a whole training: what a stranger gets wrong, what breaks, hangs, or is huge."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import bare
from command_line import contents, the_line, without_warnings
from engines import make_engine
from full_disk import files_of_at_most
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, make_trainer
from warm_python import warm_python

from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import EnvironmentReward, reward_function
from stateset_agents.runs.checkpoint_files import latest_checkpoint, load_checkpoint
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import ConfigurationError, StatesetError, TrainingStopped

# ------------------------------------------------------------------------------ the wrong thing in a place

SETTINGS = {"model_name": "tiny"}

WRONG = {
    "a model's name for the config": (
        lambda: MultiTurnAgent("embedded:desk"),  # type: ignore[arg-type]  # the mistake under test
        "config must be an AgentConfig, got str 'embedded:desk': write AgentConfig(model_name=",
    ),
    "a dict for the agent's config": (
        lambda: MultiTurnAgent(SETTINGS),  # type: ignore[arg-type]  # the mistake under test
        "config must be an AgentConfig, got dict {'model_name': 'tiny'}: write AgentConfig(",
    ),
    "the training's config for the agent": (
        lambda: MultiTurnAgent(TrainingConfig()),  # type: ignore[arg-type]  # the mistake under test
        "config must be an AgentConfig, got TrainingConfig",
    ),
    "a class for the config": (
        lambda: MultiTurnAgent(AgentConfig),  # type: ignore[arg-type]  # the mistake under test
        "config must be an AgentConfig, got the class AgentConfig: write AgentConfig(",
    ),
    "a dict for the training's config": (
        lambda: MultiTurnGRPOTrainer(make_agent(), make_environment(), even_share, {"beta": 0.1}),  # type: ignore[arg-type]  # the mistake under test
        "config must be a TrainingConfig, got dict {'beta': 0.1}: write TrainingConfig(",
    ),
    "reward and environment swapped": (
        lambda: MultiTurnGRPOTrainer(make_agent(), EnvironmentReward(), make_environment()),  # type: ignore[arg-type]  # the mistake under test
        "must have local, scenarios(split) and start(scenario, seed), got a EnvironmentReward without",
    ),
    "an environment for the reward": (
        lambda: MultiTurnGRPOTrainer(make_agent(), make_environment(), make_environment()),  # type: ignore[arg-type]  # the mistake under test
        "a reward must be a RewardFunction or a function, got ConversationEnvironment",
    ),
    "a class for the environment": (
        lambda: MultiTurnGRPOTrainer(make_agent(), ConversationEnvironment, even_share),  # type: ignore[arg-type]  # the mistake under test
        "environment must be an object, got the class: write ConversationEnvironment(...)",
    ),
    "a model's name for the agent": (
        lambda: ComputationalEngine("gpt2", make_environment(), even_share),  # type: ignore[arg-type]  # the mistake under test
        "agent must be a MultiTurnAgent, got str 'gpt2': write MultiTurnAgent(AgentConfig(...))",
    ),
    "one scenario for a list": (
        lambda: ConversationEnvironment(scenarios={"topic": "refund"}),
        "scenarios must be a list of scenarios, got one mapping: [{'topic': 'refund'}]",
    ),
    "a text as a setting": (
        lambda: TrainingConfig(learning_rate="fast"),  # type: ignore[arg-type]  # the mistake under test
        "learning_rate: input should be a valid number",
    ),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_wrong_thing_in_a_place_is_named_with_what_belongs_there(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ texts of every kind

TEXTS = {
    "unicode": "Grüße 🧾 \u202eabc\u202c \u0000 \ud83d e\u0301 你好",
    "blank": "   ",
    "control tokens": "<|end|><|assistant|>done<|end|>",
    "one long word": "x" * 150,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
async def test_texts_of_every_kind_go_through_a_whole_step(tmp_path: Path, text: str) -> None:
    scenarios = [{"opening": text, "context": {"script": [text[:20], ""]}}]
    trainer = make_trainer(
        tmp_path,
        environment=make_environment(scenarios=scenarios, max_turns=3),
        max_steps=1,
        gradient_accumulation_steps=1,
    )
    await trainer.train()
    await trainer.close()
    rollouts = list(RunLog(trainer.run).rollouts())
    assert len(rollouts) == 4
    assert all(one.status in ("terminated", "truncated") for one in rollouts)
    assert all(one.reward is not None for one in rollouts)


async def test_an_opening_beyond_the_context_fails_alone_and_says_what_to_do(tmp_path: Path) -> None:
    scenarios = [{"opening": "hi"}, {"opening": "x" * 100_000}]
    trainer = make_trainer(tmp_path, environment=make_environment(scenarios=scenarios), max_steps=1)
    await trainer.train()
    await trainer.close()
    [line] = RunLog(trainer.run).metrics()
    assert (line.values["rollout/failed"], line.values["group/dropped"]) == (4, 1)
    assert line.values["optimizer/skipped"] == 0
    failed = [one.error for one in RunLog(trainer.run).rollouts() if one.status == "failed"]
    assert failed[0].startswith("EnvironmentFailure: the opening leaves no room for a reply: ")


async def test_only_openings_beyond_the_context_stop_the_run_with_that_line(tmp_path: Path) -> None:
    environment = make_environment(scenarios=[{"opening": "x" * 100_000}])
    trainer = make_trainer(tmp_path, environment=environment, max_steps=1)
    with pytest.raises(TrainingStopped) as caught:
        await trainer.train()
    await trainer.close()
    assert "8 of 8 conversations failed" in str(caught.value)
    assert "shorten the scenario" in str(caught.value)


async def test_an_empty_opening_is_the_users_to_make(tmp_path: Path) -> None:
    environment = make_environment(scenarios=[{"opening": "", "topic": "refund"}])
    trainer = make_trainer(tmp_path, environment=environment, max_steps=1)
    await trainer.train()
    await trainer.close()
    first = next(iter(RunLog(trainer.run).rollouts()))
    assert "refund" in first.messages[0].content


# ------------------------------------------------------------------------------ rewards that are none


@reward_function
def nan(trajectory: Any) -> float:
    return float("nan")


@reward_function
def text(trajectory: Any) -> Any:
    return "good"


@reward_function
def constant(trajectory: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (nan, "reward nan: score must be a finite number or None, got nan"),
        (text, "reward text: score must be a finite number or None, got 'good'"),
    ],
)
async def test_a_reward_that_is_no_number_stops_the_first_step_and_names_it(
    tmp_path: Path, reward: Any, said: str
) -> None:
    trainer = make_trainer(tmp_path, reward=reward, max_steps=1)
    with pytest.raises(TrainingStopped) as caught:
        await trainer.train()
    await trainer.close()
    assert said in str(caught.value)
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == 1  # type: ignore[arg-type]  # there is one


async def test_a_constant_reward_is_told_of_while_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, reward=constant, max_steps=4, beta=0.0)
    await trainer.train()
    await trainer.close()
    told = [record.getMessage() for record in caplog.records if "nothing is learned" in record.getMessage()]
    assert len(told) == 1


# ------------------------------------------------------------------------------ a tool in a training

_CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


def huge() -> str:
    """Give everything."""
    return "x" * 10_000_000


def lost() -> str:
    """Look in a place that is not there."""
    raise KeyError("K27")


@pytest.mark.parametrize(
    ("tool", "status", "said"),
    [
        (huge, "truncated", None),
        (
            lost,
            "failed",
            "tool lost failed: KeyError: 'K27'; mend it, or raise ToolError for what the agent may correct",
        ),
    ],
)
async def test_what_a_tool_does_wrong_costs_its_conversation_at_most(
    tool: Any, status: str, said: str | None
) -> None:
    agent = MultiTurnAgent(AgentConfig(max_context_tokens=60_000), backend=_scripted(_CALL % tool.__name__))
    await agent.initialize()
    environment = ConversationEnvironment([{"opening": "hi"}], tools=[tool], max_turns=2)
    engine = make_engine(agent, environment, even_share, num_generations=2, episode_retries=0)
    [group] = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    first = group.trajectories[0]
    assert first.status.value == status
    if said is None:
        shown = first.turns[0].feedback[0].content
        assert len(shown) < 10_100
        assert shown.endswith("\n[cut here: 9990000 more characters were left out]")
    else:
        assert said in bare(first.error)


def _scripted(reply: str) -> Any:
    from stateset_agents.backends.scripted import ScriptedBackend

    return ScriptedBackend(lambda request: reply)


# ------------------------------------------------------------------------------ on the command line

_PARTS = """
import asyncio, os, time
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.users.simulated_user import ScriptedUser

@reward_function
def even_share(trajectory):
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)

@reward_function
def stuck(trajectory):
    time.sleep(1000)

@reward_function
def mistyped(trajectory):
    return trajectry.reward

def no_user(scenario, seed):
    return ScriptedUser(scenario.context["lines"])

class NoUser(ConversationEnvironment):
    def __init__(self, **options):
        super().__init__(user=no_user, **options)
"""
_RUN: dict[str, Any] = {
    "agent": {"model_name": "./model", "chat_template": "plain", "max_new_tokens": 3},
    "environment": {"name": "conversation", "scenarios": "calls.jsonl", "max_turns": 2},
    "reward": "hard_parts:even_share",
    "training": {"max_steps": 2, "num_generations": 2, "gradient_accumulation_steps": 1, "save_steps": 1},
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, scenarios, parts of its own and run.yaml, which works as it stands."""
    folder = tmp_path_factory.mktemp("desk")
    tiny_model("gpt2").save_pretrained(folder / "model")
    tiny_tokenizer().hf.save_pretrained(folder / "model")
    (folder / "calls.jsonl").write_text('{"opening": "hi"}\n{"opening": "hello"}\n')
    (folder / "hard_parts.py").write_text(_PARTS)
    (folder / "run.yaml").write_text(yaml.safe_dump(_RUN))
    return folder


@pytest.fixture
def _at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("stateset_agents")
    before = logger.handlers[:], logger.propagate, logger.level
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def command(desk: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_python(), "-m", "stateset_agents.cli.main", *arguments],
        cwd=desk,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.long
def test_a_reward_that_hangs_in_a_thread_keeps_neither_the_run_nor_the_process(
    desk: Path, tmp_path: Path
) -> None:
    settings = ("--set", "training.reward_timeout=0.5", "--output-dir", str(tmp_path))
    done = command(desk, "train", "run.yaml", "--set", "reward=hard_parts:stuck", *settings)
    *warnings, last = done.stderr.splitlines()
    said = "reward stuck took longer than 0.5 s: mend what hangs, or raise reward_timeout"
    assert done.returncode == 1
    assert last.startswith("stateset-agents: step 1 has no group with 2 scored members")
    assert said in last
    assert "Traceback" not in done.stderr
    assert sum(said in line for line in warnings) == 2  # told once, and counted
    assert (tmp_path / "latest" / "checkpoints" / "step-000001" / "manifest.json").is_file()


@pytest.mark.usefixtures("_at_the_desk")
def test_a_mistake_in_a_users_own_function_comes_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(NameError, match="name 'trajectry' is not defined") as caught:
        main(["train", "run.yaml", "--set", "reward=hard_parts:mistyped", "--output-dir", str(tmp_path)])
    assert caught.traceback[-1].name == "mistyped"


@pytest.mark.usefixtures("_at_the_desk")
def test_a_user_that_cannot_be_made_is_told_before_anything_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            "train",
            "run.yaml",
            "--set",
            "environment.name=hard_parts:NoUser",
            "--output-dir",
            str(tmp_path / "r"),
        ]
    )
    said = the_line(code, capsys.readouterr().err)
    assert said.startswith("no user could be made for scenario ")
    assert said.endswith(": KeyError: 'lines' (at hard_parts.py:21)")
    assert not (tmp_path / "r").exists()


FULL = {
    1_000: "cannot write {run}/config.yaml: File too large; free or choose another disk",
    4_000: "cannot write checkpoint {run}/checkpoints/step-000001 (File too large",
    100_000: "cannot write checkpoint {run}/checkpoints/step-000001 (File too large",
}


@pytest.mark.usefixtures("_at_the_desk")
@pytest.mark.parametrize(("most", "message"), FULL.items())
def test_a_full_disk_is_one_line_and_leaves_no_torn_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int, message: str
) -> None:
    with files_of_at_most(most):
        code = main(["train", "run.yaml", "--output-dir", str(tmp_path)])
    run = tmp_path / "0001-run"
    assert the_line(code, without_warnings(capsys.readouterr().err)).startswith(message.format(run=run))
    assert not [path for path in run.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


@pytest.mark.long
@pytest.mark.usefixtures("_at_the_desk")
def test_a_disk_that_fills_up_keeps_what_is_there_and_the_run_goes_on_when_it_is_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "--output-dir", str(tmp_path), "--max-steps", "1"]) == 0
    run = tmp_path / "0001-run"
    kept = contents(run / "checkpoints" / "step-000001")
    capsys.readouterr()
    with files_of_at_most(100_000):
        code = main(["train", "--resume", str(run), "--max-steps", "2"])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stateset-agents: ")]
    assert code == 1
    assert lines[0].startswith(f"stateset-agents: cannot write checkpoint {run}/checkpoints/step-000002 (")
    assert lines[0].endswith("free the disk or choose another output_dir")
    assert contents(run / "checkpoints" / "step-000001") == kept
    assert main(["train", "--resume", str(run), "--max-steps", "2"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert steps == [1, 2]


async def test_logs_that_cannot_be_written_stop_the_run_with_its_work_kept(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    await trainer.initialize()
    size = trainer.run.rollouts.stat().st_size
    with files_of_at_most(size + 400), pytest.raises(StatesetError) as caught:
        await trainer.train()
    await trainer.close()
    assert str(caught.value).startswith("cannot write ")
    assert "free the disk" in str(caught.value)
    assert trainer.run.rollouts.stat().st_size == size
