"""Every example runs as its first lines say, from any folder."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository_paths import ROOT

from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.numeric.acquisition.rules import RULES
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment, make_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import load_experiment
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.curriculum.state import CurriculumState
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

pytestmark = pytest.mark.docs

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Beside other test workers, more threads than cores only wait for one another."""


def run_script(name: str, *arguments: str, folder: Path, fails: bool = False) -> str:
    """What `python name arguments` prints, run in `folder`; `fails`: what it says of the failure instead."""
    done = subprocess.run(
        [sys.executable, str(ROOT / name), *arguments],
        cwd=folder,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr if fails else done.stdout


def test_quickstart_trains_and_answers(tmp_path: Path) -> None:
    *_, answer, folder = run_script("examples/quickstart.py", folder=tmp_path).strip().splitlines()
    assert answer
    assert folder.startswith("run folder:")
    run = tmp_path / "runs" / "0001-quickstart"
    assert (run / "checkpoints").is_dir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 1


def test_the_complete_example_measures_trains_saves_and_talks(tmp_path: Path) -> None:
    printed = run_script(
        "examples/complete_grpo_training.py", "--steps", "2", "--episodes", "12", folder=tmp_path
    )
    assert re.search(r"before: \d+\.\d% \[.*\] of 12\nafter: ", printed)
    assert re.search(r"user:  \w.*\nagent: .*\w", printed)
    run = tmp_path / "runs" / "0001-complete"
    assert (run / "checkpoints" / "step-000002" / "model" / "model.safetensors").is_file()
    assert (run / "agent" / "model.safetensors").is_file()


def test_short_memory_sums_up_and_trains(tmp_path: Path) -> None:
    printed = run_script("examples/short_memory.py", "--steps", "1", folder=tmp_path)
    assert len(re.findall(r"^\d+% of 128 talks come out right$", printed, re.MULTILINE)) == 2


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/grpo_in_one_file.py, imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("grpo_in_one_file")


def desk_agent(*, max_new_tokens: int) -> MultiTurnAgent:
    config = AgentConfig(model_name="embedded:desk", max_new_tokens=max_new_tokens, device="cpu")
    return MultiTurnAgent(config)


def test_the_one_file_learns(tmp_path: Path) -> None:
    printed = run_script("examples/grpo_in_one_file.py", "--steps", "12", folder=tmp_path)
    found = re.findall(r"^(before|after): \S+ \[(\S+)%, (\S+)%\] of 300", printed, re.MULTILINE)
    (before, _, highest), (after, lowest, _) = found
    assert (before, after) == ("before", "after")
    assert float(lowest) > float(highest)  # 15 % to about 41 %, with seeds 0 to 3
    assert len(re.findall(r"^step +\d+  reward [+-]", printed, re.MULTILINE)) == 12


async def test_the_one_file_samples_the_engine_s_conversations(one_file: ModuleType) -> None:
    desk = RetailDesk()
    scenarios = desk.scenarios("train")[:4]
    async with desk_agent(max_new_tokens=12) as agent:  # so few that some turns are cut and closed
        by_hand = await one_file.roll_out(agent, desk, scenarios, seed=3, step=1)
        engine = ComputationalEngine(agent, desk, EnvironmentReward(), num_generations=8)
        expected = await engine.rollout(scenarios, seed=3, step=1)
    assert [group.rewards for group in by_hand] == [group.rewards for group in expected]
    continued = [turn for group in by_hand for member in group.trajectories for turn in member.turns[:-1]]
    assert {turn.completion.finish_reason for turn in continued} == {"stop", "length"}
    for group, other in zip(by_hand, expected, strict=True):
        for trajectory, twin in zip(group.trajectories, other.trajectories, strict=True):
            assert trajectory.token_ids == twin.token_ids
            assert trajectory.action_mask == twin.action_mask
            assert trajectory.logprobs == twin.logprobs  # one clock, so the same batches: bit for bit
            assert (trajectory.member, trajectory.status) == (twin.member, twin.status)
            assert trajectory.outcome == twin.outcome


@pytest.mark.parametrize("beta", [0.0, 0.01])
async def test_the_one_file_s_loss_and_gradient_are_the_trainer_s(
    beta: float, one_file: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_file, "BETA", beta)
    desk = RetailDesk()
    config = TrainingConfig(
        max_steps=2,
        beta=0.01,
        clip_ratio=one_file.CLIP,
        num_iterations=one_file.NUM_ITERATIONS,
        output_dir=str(tmp_path),
        progress=False,
    )
    async with MultiTurnGRPOTrainer(
        desk_agent(max_new_tokens=48), desk, EnvironmentReward(), config
    ) as trainer:
        reference = trainer.agent.backend.master_model()
        groups = await trainer.generate_trajectories(desk.scenarios("train")[:4])
        await trainer.training_step(groups)  # now ratios differ from 1, some are clipped, and there is a KL
        if beta:
            members = [trajectory for group in groups for trajectory in group.trajectories]
            expected = await trainer.compute_enhanced_grpo_loss(members, beta=beta)
        else:
            expected = await trainer.compute_grpo_loss(groups)
        policy = trainer.learner.policy.model
        batches, denominators = one_file.make_batches(groups, reference)
        losses = [one_file.grpo_loss(policy, batch, denominators).loss for batch in batches]
        gradient, expected_gradient = (
            torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(policy.parameters()))])
            for loss in (torch.stack(losses).sum(), expected["total_loss"])
        )
    assert len(batches) > 1
    assert expected["clip_fraction"].item() > 0
    # The trainer packs rows behind one another and the example pads them: the same sums in another order, in
    # fp32. Advantages are of the order of 1 and cancel to a loss of .02: 3e-8 of it was seen, and 1e-6 of the
    # gradient's length.
    assert sum(losses).item() == pytest.approx(expected["total_loss"].item(), rel=0, abs=1e-6)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


def test_the_reward_example_pays_help_most(tmp_path: Path) -> None:
    printed = run_script("examples/custom_reward.py", folder=tmp_path)
    paid = {line.split()[0]: float(line.split()[1]) for line in printed.splitlines()}
    assert paid.keys() == {"helps", "promises", "refuses", "stuffs"}
    assert paid["helps"] > 0.9
    assert max(paid["promises"], paid["refuses"], paid["stuffs"]) < 0.5


def test_a_model_of_ones_own_is_trained_and_loaded_by_plain_transformers(tmp_path: Path) -> None:
    printed = run_script("examples/own_model.py", folder=tmp_path)
    assert "37,344 parameters, 261 tokens, by transformers alone" in printed


def test_the_critic_s_figures_are_shown_step_by_step(tmp_path: Path) -> None:
    printed = run_script("examples/value_function_gae.py", "--steps", "2", folder=tmp_path)
    steps = re.findall(r"step +(\d+)  .*loss (\S+)  explained variance ([+-]\d\.\d\d)", printed)
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(float(loss) > 0 for _, loss, _ in steps)


def test_two_checkpoints_are_compared_scenario_by_scenario(tmp_path: Path) -> None:
    printed = run_script(
        "examples/compare_checkpoints.py", "--steps", "2", "--episodes", "12", folder=tmp_path
    )
    assert re.search(r"step-000001: \d+\.\d%   step-000002: \d+\.\d%", printed)
    won, lost, tied, played = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
    assert won + lost + tied == played == 12


def test_the_table_of_scripted_agents_is_as_documented(tmp_path: Path) -> None:
    printed = run_script("scripts/desk_agents.py", "--families", "learnable", folder=tmp_path)
    results = (ROOT / "docs" / "evidence" / "desk-trainings.md").read_text(encoding="utf-8")
    after = printed.partition("the right answer is no for")[2].splitlines()[1:]
    rows = [line.partition("both twins right")[0].rsplit(maxsplit=2) for line in after]
    assert len(rows) == 8
    for name, success, reward in rows:
        shown = reward.replace("-0.", "\u2212.").replace("0.", ".")
        share = f"{float(success.rstrip('%')):g} %"
        assert f"| {name.strip().replace('_', ' ')} | {share} | {shown} |" in results


def test_the_real_model_s_stages_are_kept_and_not_done_twice(tmp_path: Path) -> None:
    """With the embedded model in the place of the real one, which `make demo-llm` takes about an hour for."""
    (tmp_path / "small.yaml").write_text(
        "agent: {model_name: embedded:desk, max_new_tokens: 48}\n"
        "environment: {name: retail_desk}\nreward: environment\n"
        "training: {run_name: desk, max_steps: 1, save_steps: 1, learning_rate: 5.0e-4}\n"
        "evaluation: {split: test}\n"
    )
    small = ["--config", "small.yaml", "--episodes", "12", "--demonstrations", "24", "--output", "out"]
    example = "examples/warm_start_and_grpo.py"
    first = run_script(example, *small, folder=tmp_path)
    again = run_script(example, *small, folder=tmp_path)
    rows = [
        [line for line in said.splitlines() if " success " in line and "n = 12" in line]
        for said in (first, again)
    ]
    assert [row.split(" success")[0].strip() for row in rows[0]] == ["base", "warm start", "after GRPO"]
    assert rows[0] == rows[1]
    assert all("forbidden changes" in row for row in rows[0])
    shown = [
        json.loads(row)["messages"] for row in (tmp_path / "out" / "honest.jsonl").read_text().splitlines()
    ]
    openings = {next(one["content"] for one in chat if one["role"] == "user") for chat in shown}
    assert len(shown) == 24
    assert len(openings) > 12  # one of each pair of twins, who begin alike
    (run,) = (tmp_path / "out" / "grpo").glob("*-desk")
    before = RunLog.open(run).summary()["before"]  # the report shows the warm start beside what came of it
    assert f"warm start   success {before['success']:.1%}" in first
    refused = run_script(example, *small, "--sft-epochs", "3", folder=tmp_path, fails=True)
    assert refused == "out was begun with --sft-epochs 10, not 3: name another --output\n"
    shuffled = run_script(example, *small, "--shuffle", folder=tmp_path)
    assert "after GRPO" in shuffled
    (control,) = (tmp_path / "out" / "shuffled").glob("*-desk")
    played = [json.loads(row) for row in (control / "rollouts.jsonl").read_text().splitlines()[1:]]
    assert {row["error"] for row in played} == {None}
    assert all(row["reward"] is not None for row in played)


def test_four_in_five_steps_of_the_real_model_play_each_side_of_each_family() -> None:
    """Three in five of the desk's scenarios are of the side to act in, so the fifth step has no other."""
    experiment = load_experiment(ROOT / "examples" / "desk_with_smollm2.yaml", {})
    scenarios = make_environment(experiment.environment).scenarios("train")
    size = experiment.training.per_device_train_batch_size
    order = Curriculum(scenarios, experiment.training, {}).plan(0, CurriculumState()).order
    steps = [
        Counter((one.family, one.context["side"]) for one in order.take(size * step, size))
        for step in range(35)
    ]
    families = {family for family, _ in steps[0]}
    assert len(families) == 6
    both = [step for step in steps if step == Counter(itertools.product(families, ("base", "twin")))]
    acting = [step for step in steps if step == dict.fromkeys(itertools.product(families, ["base"]), 2)]
    assert (len(both), len(acting)) == (28, 7)


def test_the_maths_project_trains_keeps_its_model_and_tells_how_it_fails(tmp_path: Path) -> None:
    scripts = "examples/grpo_math/scripts"
    printed = run_script(
        f"{scripts}/train_grpo.py", "--output-dir", "out", "--max-steps", "2", folder=tmp_path
    )
    assert re.search(r"before +success \d.*\nafter +success \d.*\nmodel: out/final", printed)
    measured = run_script(
        f"{scripts}/evaluate.py", "--model-path", "out/final", "--output-dir", "out", folder=tmp_path
    )
    result = json.loads(measured)
    assert result == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert result["replies"] == 90
    assert sum(result["kinds"].values()) == pytest.approx(1)
    assert {"right", "wrong without thinking"} < set(result["kinds"])
    assert result["wrong"]["tokens"] > 3


def test_the_maths_project_s_settings_serve_the_command_line(tmp_path: Path) -> None:
    config = load_experiment(ROOT / "examples" / "grpo_math" / "configs" / "grpo_code.yaml", {})
    programs = make_environment(config.environment)
    assert [len(programs.scenarios(split)) for split in ("train", "validation", "test")] == [7, 1, 2]
    assert make_reward(config.reward).name == "code"
    math = ROOT / "examples" / "grpo_math" / "configs" / "grpo_math.yaml"
    cut = ("--max-steps", "1", "--no-eval", "--output-dir", str(tmp_path))
    assert main(["train", str(math), *cut]) == 0


def test_an_own_batched_environment_is_learned_and_compared_with_its_rule(tmp_path: Path) -> None:
    printed = run_script("examples/own_batched_environment.py", folder=tmp_path)
    found = re.search(r"after \S+: (\S+) \[(\S+), \S+\]", printed)
    assert found is not None
    assert float(found[2]) > 0
    file = str(ROOT / "examples" / "own_batched_environment.yaml")
    cut = ("--max-steps", "3000", "--output-dir", str(tmp_path / "cut"), "--set", "evaluation.episodes=10")
    assert main(["train", file, *cut]) == 0
    log = RunLog.open(tmp_path / "cut" / "latest")
    assert set(log.summary()["rules"]) == {"below 20"}
    assert list(log.windows()[0].traces) == ["policy", "below 20"]


def test_cart_pole_is_learned(tmp_path: Path) -> None:
    printed = run_script("examples/cartpole.py", folder=tmp_path)
    found = re.search(r"return before (\d+), after (\d+) of 500", printed)
    assert found is not None
    assert int(found[2]) > int(found[1]) + 200
    assert (tmp_path / "runs" / "0001-control" / "episodes.jsonl").is_file()


def test_multi_task_trains_by_parts(tmp_path: Path) -> None:
    printed = run_script("examples/multi_task.py", "--steps", "2000", folder=tmp_path)
    assert [line.split(":")[0] for line in printed.splitlines() if line.startswith("group_strategy")] == [
        "group_strategy none",
        "group_strategy task",
    ]


def test_a_cluster_is_scaled_from_a_clone_on(tmp_path: Path) -> None:
    printed = run_script("examples/autoscaling.py", "--steps", "70000", "--workloads", "12", folder=tmp_path)
    rows = dict(re.findall(r"^\| ([\w %,]+) \| (-\d\.\d+) \|", printed, re.MULTILINE))
    assert rows.keys() == {"trained", "cloned", "HPA 60 %, 0 s", "HPA 70 %, 300 s"}
    assert -0.8 > float(rows["trained"]) > -2


def test_a_cluster_is_taken_over_by_a_trained_policy(tmp_path: Path) -> None:
    printed = run_script("examples/deploy_autoscaler.py", "--steps", "30000", folder=tmp_path)
    assert "trained: shadow 0% -> gradual 10% -> " in printed
    assert "gradual 90% -> full 100%\n" in printed
    assert "ruined: shadow 0%\n" in printed
    assert "unsafe actions; kept in shadow: the policy is worse in" in printed


def test_a_surrogate_of_one_s_own_chooses_experiments(tmp_path: Path) -> None:
    printed = run_script("examples/own_surrogate.py", "--steps", "1000", "--tasks", "100", folder=tmp_path)
    found = dict(re.findall(r"^(.+): regret (\d\.\d+) in the end", printed, re.M))
    assert found.keys() == {"random", "policy"}
    assert float(found["policy"]) < 1.5  # of the first intervention it is 1.65


def test_experiments_are_chosen_from_a_clone_on(tmp_path: Path) -> None:
    few = ["--steps", "20000", "--shown", "100", "--tasks", "200"]
    printed = run_script("examples/acquisition.py", *few, folder=tmp_path)
    found = {name: float(value) for name, value in re.findall(r"^(.+): regret (\d\.\d+) in", printed, re.M)}
    assert found.keys() == {"the policy", "EI per cost", "sd per cost", "random"}
    assert found["the policy"] < 0.8 * found["random"]
    assert (tmp_path / "campaigns.html").stat().st_size > 100_000
    file = str(ROOT / "examples" / "acquisition.yaml")
    few = [f"training.output_dir={tmp_path / 'yaml'}", "training.total_steps=2000", "evaluation.episodes=20"]
    assert main(["train", file, *(part for each in few for part in ("--set", each))]) == 0
    rules = RunLog.open(tmp_path / "yaml" / "latest").summary()["rules"]
    assert set(rules) == set(RULES)
