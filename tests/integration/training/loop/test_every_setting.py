"""Every setting does something: each field is changed alone, and weights, metrics, files or an error differ.

A field that no table names fails the test, so a new field needs a line here. What a setting does has a test
of its own elsewhere; so most of this sweep, two trainings for each field, is for `make test-long`.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import SCENARIOS, Watched, even_share, make_agent, make_trainer

from stateset_agents.backends import linears as fast_linear
from stateset_agents.backends.linears import usable_precision
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import CompositeReward, RewardFunction, reward_function
from stateset_agents.runs.checkpoint_files import fingerprint
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, Experiment, ExperimentConfig
from stateset_agents.types.errors import StatesetError


class Change(NamedTuple):
    """One field's new value, what else holds before and after, and where the difference must show."""

    value: Any
    sees: str = "weights"
    """weights, metrics, files, error, or the name of something else that was watched."""
    given: Mapping[str, Any] = {}
    parts: str = "plain"


ONLY_HERE = {"rollout_sleep", "adam_beta1", "adam_beta2", "temperature", "max_new_tokens"}
"""Fields whose effect no other test sees, and a few that show that the sweep works."""
LONGER = {"max_steps": 3}
OFF_POLICY = {**LONGER, "num_iterations": 3, "learning_rate": 0.05, "beta": 0.0}
EVALUATED = {**LONGER, "eval_steps": 1}
CRITIC = {"advantage_estimator": "token_gae"}
COOLING = {"temperature_schedule": "adaptive", "temperature_target": 0.0, "temperature_decay": 0.5}
AWAY = {
    "breaker_failures": 3,
    "breaker_pause": 0.05,
    "episode_retries": 1,
    "retry_backoff": 0.01,
    "max_concurrent": 2,
    "max_steps": 2,
}
BY_SUCCESS = {"scenario_order": "success", "gradient_accumulation_steps": 2}
K1 = {"kl_estimator": "k1", "num_iterations": 2}

TRAINING = {
    "profile": Change("aggressive"),
    "seed": Change(1),
    "num_episodes": Change(3, "metrics", {"max_steps": None, "num_episodes": 2}),
    "max_steps": Change(3, "metrics"),
    "num_generations": Change(3),
    "per_device_train_batch_size": Change(2),
    "gradient_accumulation_steps": Change(2),
    "num_processes": Change(2, "error"),
    "parallelism": Change("fsdp2", "error"),  # without others; test_several_processes.py has what it does
    "micro_batch_tokens": Change(40, "metrics"),
    "row_layout": Change("padded", "metrics"),
    "fast_linears": Change(False, "fast_products"),
    "rollout_sleep": Change(True, "slots"),
    "lora": Change({"rank": 4}),
    "learning_rate": Change(1e-3),
    "lr_scheduler_type": Change("constant", given=LONGER),
    "warmup_ratio": Change(0.9),
    "weight_decay": Change(0.5),
    "adam_beta1": Change(0.1),
    "adam_beta2": Change(0.5),
    "max_grad_norm": Change(1e-7),
    "num_iterations": Change(2),
    "precision": Change("bf16"),
    "gradient_checkpointing": Change(True, "layer_forwards"),
    "dropout": Change(True, parts="dropout"),
    "freeze_vision": Change(True, "error"),  # of a model without; test_pictures.py has what it does
    "loss_type": Change("reinforce", given=OFF_POLICY),
    "clip_ratio": Change(0.01, given=OFF_POLICY),
    "clip_ratio_high": Change(0.01, given=OFF_POLICY),
    "dual_clip": Change(1.01, given=OFF_POLICY),
    "importance": Change("none", given={"precision": "bf16"}),
    "importance_cap": Change(0.01, given={"precision": "bf16", "importance_cap": 1.0}),
    "loss_length": Change(3, "metrics", {"loss_type": "dr_grpo"}),
    "entropy_coef": Change(0.1),
    "advantage_estimator": Change("turn_group"),
    "gamma": Change(0.5, given={"advantage_estimator": "turn_group"}),
    "num_branches": Change(3, given={"advantage_estimator": "branch"}),
    "gae_lambda": Change(0.5, given=CRITIC),
    "bootstrap_truncated": Change(False, given=CRITIC, parts="cut after two turns"),
    "value_learning_rate": Change(0.1, given=CRITIC),
    "value_iterations": Change(1, given=CRITIC),
    "value_clip": Change(0.001, given=CRITIC),
    "value_dropout": Change(0.5, given=CRITIC),
    "baseline_type": Change("group_median"),
    "advantage_normalization": Change("none"),
    "multi_objective_aggregation": Change("normalize_then_sum", parts="a reward of two parts"),
    "reward_weights": Change({"even_share": 1.0}, parts="a reward of two parts"),
    "group_strategy": Change(
        "family",
        given={"advantage_normalization": "batch", "gradient_accumulation_steps": 4},
        parts="two families",
    ),
    "scenario_order": Change("stratified", parts="two families"),
    "strata": Change("difficulty", "metrics", {**BY_SUCCESS, "max_steps": 3}, "difficulties"),
    "difficulty": Change("hard", parts="difficulties"),
    "group_sizes": Change("difficulty", parts="difficulties"),
    "success_memory": Change(0.0, "metrics", {**BY_SUCCESS, "max_steps": 4}, "difficulties"),
    "track_success": Change(True, "metrics", parts="difficulties"),
    "replay_share": Change(0.5, parts="one of an earlier domain"),
    "stages": Change([{"until": 1}, {"difficulty": "hard"}], parts="difficulties"),
    "reward_clip": Change(0.3),
    "advantage_clip": Change(0.5),
    "advantage_skip": Change(0.8),
    "min_group_size": Change(4, "error", parts="three of four scored"),
    "beta": Change(0.5, given={"num_iterations": 2}),
    "use_reference_model": Change(False, given={"num_iterations": 2}),
    "kl_estimator": Change("k1", given={"num_iterations": 2}),  # of k2 and k3 the gradient is one
    "kl_placement": Change("reward", given=K1),
    "kl_controller": Change("adaptive", given={"num_iterations": 2}),
    "kl_target": Change(100.0, given={"kl_controller": "adaptive", "num_iterations": 2}),
    "kl_horizon": Change(10, given={"kl_controller": "ziegler", "num_iterations": 2}),
    "distillation": Change({"teacher": "other"}),
    "temperature": Change(0.7),
    "max_concurrent": Change(2, "peak"),
    "scheduling": Change("throughput", "files"),
    "episode_retries": Change(0, "metrics", parts="one conversation fails"),
    "turn_retries": Change(2, "metrics", {"episode_retries": 0}, "one conversation fails"),
    "reward_retries": Change(0, "error", {"retry_backoff": 0.0}, "each reward breaks once"),
    "retry_backoff": Change(0.6, "pauses", parts="one conversation fails"),
    "breaker_failures": Change(3, "files", {**AWAY, "breaker_failures": 0}, "away for a while"),
    "breaker_pause": Change(0.4, "pauses", AWAY, "away for a while"),
    "outage_patience": Change(0.0, "metrics", AWAY, "away for a while"),
    "turn_timeout": Change(0.5, "files", parts="one conversation is slow"),
    "reward_timeout": Change(0.2, "metrics", parts="one reward is slow"),
    "episode_timeout": Change(0.5, "files", parts="one conversation is slow"),
    "max_staleness": Change(1, "metrics"),
    "max_resamples": Change(2, "metrics", parts="all alike"),
    "max_failed_steps": Change(1, "error", {"breaker_failures": 0}, "all fail from step 2"),
    "output_dir": Change("elsewhere", "files"),
    "run_name": Change("other", "files"),
    "save_steps": Change(1, "files"),
    "save_total_limit": Change(1, "files", {"save_steps": 1}),
    "eval_steps": Change(1, "metrics", {"eval_episodes": 4}),
    "eval_episodes": Change(2, "metrics", {"eval_steps": 1, "eval_episodes": 4}),
    "lr_min_ratio": Change(0.5, given=LONGER),
    "temperature_schedule": Change("adaptive", given={**COOLING, "temperature_schedule": "none"}),
    "temperature_min": Change(0.9, given=COOLING),
    "temperature_decay": Change(0.6, given=COOLING),
    "temperature_target": Change(2.0, given=COOLING),
    "call_bias": Change(2.0, "error"),  # one without the other; loop/test_constrained_training.py has both
    "call_bias_steps": Change(2, "error"),
    "metric_for_best": Change("eval/success", "error", {"eval_steps": 1}),
    "early_stopping_patience": Change(1, "metrics", {**EVALUATED, "early_stopping_threshold": 10.0}),
    "early_stopping_threshold": Change(10.0, "metrics", {**EVALUATED, "early_stopping_patience": 1}),
    "load_best_at_end": Change(True, "agent", {**EVALUATED, "learning_rate": 0.1, "seed": 2}),
    "log_rollouts": Change(False, "files"),
    "log_learner_logprobs": Change(True, "error", {"log_rollouts": False}),
    "progress": Change(False, "lines"),
    "report_to": Change("tensorboard", "files" if find_spec("tensorboard") else "error"),
}

TEMPLATE = (
    "{{ bos_token or '' }}{{ strftime_now('%d %b %Y') }}{{ ' Be polite.' if polite else '' }}"
    "{% for m in messages %}"
    "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
COMPACT = {"history": "compact", "compact_prompt": "Sum up.", "max_context_tokens": 160, "max_new_tokens": 8}
AGENT = {
    "model_name": Change("other"),
    "persona": Change("Mia, a patient clerk"),
    "system_prompt": Change("Be brief."),
    "max_new_tokens": Change(2),
    "max_context_tokens": Change(50),
    "history": Change("slide", given={"max_context_tokens": 50}),
    "compact_room": Change(100, given=COMPACT, parts="four turns"),  # the third prompt has some 80 tokens
    "compact_prompt": Change("In one word?", given={**COMPACT, "compact_room": 100}, parts="four turns"),
    "context_window": Change("sliding", given={"max_context_tokens": 50}),
    "stop": Change(("\x00", *"aeiou"), given={"max_new_tokens": 40}),
    "constrain": Change("calls", given={"model_name": "roomy"}, parts="with a tool"),
    "temperature": Change(0.0, "said"),
    "top_k": Change(3),
    "top_p": Change(0.5),
    "chat_template": Change(TEMPLATE),
    "allow_hidden_tools": Change(True, "error", {"chat_template": TEMPLATE}, "with a tool"),
    "chat_template_kwargs": Change({"polite": True}, given={"chat_template": TEMPLATE}),
    "template_date": Change("2020-02-02", given={"chat_template": TEMPLATE}),
    "device": Change("tpu", "error"),
    "dtype": Change("bf16"),
    "engine": Change("general", "running"),
    "fast_linears": Change(False, "running"),
    "matmul_precision": Change("medium", "running"),
    "max_cached_tokens": Change(512, "metrics"),
    "seed": Change(1, "said"),
}

EVALUATION = {
    "split": Change("validation", "evaluated"),
    "episodes": Change(2, "evaluated"),
    "tries": Change(2, "evaluated"),
    "seed": Change(1, "evaluated"),
    "max_concurrent": Change(1, "peak"),
}

EXPERIMENT = {
    "agent": Change({"chat_template": "plain", "max_new_tokens": 2}),
    "environment": Change({"name": "tiny_training:Watched", "scenarios": SCENARIOS, "max_turns": 1}),
    "reward": Change("customer_service"),
    "training": Change({"max_steps": 2, "num_generations": 3, "learning_rate": 0.01}),
    "evaluation": Change(None, "evaluated"),
    "trl": Change({}, "weights"),
    "traces": Change({"teacher": "embedded:desk"}, "error"),  # a training refuses what distill reads
    "sft": Change({"max_steps": 1}, "error"),
}


@pytest.mark.parametrize(
    ("model", "table"),
    [
        (TrainingConfig, TRAINING),
        (AgentConfig, AGENT),
        (EvaluationConfig, EVALUATION),
        (ExperimentConfig, EXPERIMENT),
    ],
)
def test_every_field_has_a_line(model, table):
    assert set(table) == set(model.model_fields)


# ------------------------------------------------------------------------------ watching a run


@dataclass
class Seen:
    """What a run did."""

    weights: str = ""
    agent: str = ""
    """Its weights after the run."""
    metrics: list[Any] = field(default_factory=list)
    files: list[Any] = field(default_factory=list)
    error: str = ""
    peak: int = 0
    """Most conversations at once."""
    layer_forwards: int = 0
    """Of the trained model's first layer, those recomputed in the backward pass counted too."""
    fast_products: int = 0
    """In updates, where the machine is one that has them."""
    slots: int = 0
    """Of the rollouts' cache, after the last update."""
    said: str = ""
    """What the agent answers after the run."""
    running: str = ""
    """How its model is run."""
    pauses: list[float] = field(default_factory=list)
    """Seconds that work waited, of waits from .2 s on."""
    evaluated: Any = None
    lines: int = 0
    """Printed while it trained."""


@reward_function(name="even_share", local=True)
async def three_of_four(trajectory):
    return None if trajectory.member == 3 else await even_share._function(trajectory)


@reward_function(name="even_share", local=True)
async def three_in_time(trajectory):
    await asyncio.sleep(0.6 if trajectory.member == 3 else 0.0)
    return await even_share._function(trajectory)


class BreaksOnce(RewardFunction):
    """Each score comes at the second asking."""

    name = "even_share"
    local = True

    def __init__(self) -> None:
        self.asked: set[Any] = set()

    async def score(self, trajectory):
        if (first := tuple(trajectory.token_ids)) not in self.asked:
            self.asked.add(first)
            raise OSError("the judge is away")
        return await even_share.score(trajectory)


@reward_function(name="even_share", local=True)
async def all_alike(trajectory):
    return 1.0


def look(at: str) -> str:
    """Looks."""
    return f"nothing at {at}"


@reward_function(name="few_ones", local=True)
async def few_ones(trajectory):
    return -float(sum(token % 10 == 1 for turn in trajectory.turns for token in turn.completion.token_ids))


def is_even(messages: Any) -> bool:
    """A verdict that a random model gets by chance."""
    return len("".join(str(message.content) for message in messages)) % 2 == 0


PARTS: dict[str, dict[str, Any]] = {
    "two families": {
        "scenarios": [{**one, "family": "ab"[number % 4 == 3]} for number, one in enumerate(SCENARIOS)]
    },
    "difficulties": {
        "scenarios": [
            {**one, "context": {**one["context"], "difficulty": ("easy", "hard")[number % 2]}}
            for number, one in enumerate(SCENARIOS)
        ],
        "success": is_even,
    },
    "one of an earlier domain": {
        "scenarios": [
            {**one, "context": {**one["context"], "replayed": number == 0}}
            for number, one in enumerate(SCENARIOS)
        ]
    },
    "a reward of two parts": {"reward": CompositeReward([(even_share, 0.3), (few_ones, 0.7)])},
    "plain": {},
    "dropout": {"dropout": 0.5},
    "cut after two turns": {  # with words of the user left
        "scenarios": [{**scenario, "context": {"script": ["go on"] * 3}} for scenario in SCENARIOS],
    },
    "four turns": {
        "scenarios": [{**scenario, "context": {"script": ["go on"] * 3}} for scenario in SCENARIOS],
        "max_turns": 4,
    },
    "with a tool": {"tools": [look]},
    "all alike": {"reward": all_alike},
    "three of four scored": {"reward": three_of_four},
    "one conversation is slow": {"slow": lambda call: call == 3},
    "one reward is slow": {"reward": three_in_time},
    "one conversation fails": {"breaks": lambda call: call == 3},
    "each reward breaks once": {"reward": BreaksOnce},
    "away for a while": {"breaks": lambda call: 4 < call <= 8},
    "all fail from step 2": {"breaks": lambda call: call > 4},
}


def contents(root: Path) -> list[Any]:
    """Every file under `root`: lines of logs, the summary without its clock, of others just the name."""
    found: list[Any] = []
    for path in sorted(path for path in root.rglob("*") if path.is_file() and "latest" not in path.parts):
        detail: Any = None
        if path.suffix == ".jsonl":
            detail = len(path.read_text().splitlines())
        elif path.name == "summary.json":
            detail = {k: v for k, v in json.loads(path.read_text()).items() if k != "train_seconds"}
        found.append((str(path.relative_to(root)), detail))
    return found


def numbers(trainer: Any) -> list[Any]:
    clock = ("time/", "memory/", "tokens/per_second", "faults/waited")
    return [
        [(name, value) for name, value in line.values.items() if not name.startswith(clock)]
        for line in RunLog(trainer.run).metrics()
    ]


async def watch(trainer: Any, work: Any, root: Path) -> Seen:
    """Let it run, to whatever end, and note what it did."""
    seen = Seen()
    printed = io.StringIO()
    trainer.console = Console(file=printed)

    def count(*_: Any) -> None:
        seen.layer_forwards += 1

    def product(*arguments: Any, precision: str = "highest") -> Any:
        seen.fast_products += torch.is_grad_enabled()
        return torch.nn.functional.linear(*arguments)

    async def sleep(seconds: float) -> None:
        seen.pauses += [seconds] if seconds >= 0.2 else []
        await asyncio.sleep(min(seconds, 0.05))

    try:
        await trainer.initialize()
        trainer.engine.fault_tolerance._sleep = sleep
        trained = getattr(trainer.learner, "base", None) or trainer.learner.policy.model  # TRL's, or ours
        trained.model.layers[0].mlp.register_forward_pre_hook(count)
        available = patch.object(fast_linear, "is_available", lambda: True)
        with available, patch.object(fast_linear, "linear", product):
            await work()
    except StatesetError as error:
        seen.error = str(error)
    if trainer.is_ready:
        seen.weights = fingerprint(trainer.learner.weights())
        seen.agent = fingerprint(trainer.agent.backend.model.state_dict())
        seen.metrics = numbers(trainer)
        seen.slots = getattr(trainer.agent.backend.running.model, "num_slots", 0)
        seen.said = await trainer.agent.generate_response("hi")
        running = trainer.agent.backend.running
        seen.running = f"{running.name}, linears {running.linears}"
    seen.lines = len(printed.getvalue().splitlines())
    seen.peak = trainer.environment.peak
    seen.files = contents(root)
    await trainer.close()
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved tiny models, one with a context in which a tool fits, and room for runs."""
    root = tmp_path_factory.mktemp("settings")
    for name, seed, context in (("model", 0, 256), ("other", 1, 256), ("roomy", 0, 1024)):
        model = tiny_model(seed=seed)
        model.config.max_position_embeddings = context
        model.save_pretrained(root / name)
        tiny_tokenizer().hf.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def run_training(folder: Path) -> Any:
    @cache
    def once(text: str, parts: str) -> Seen:
        settings = json.loads(text)
        made = PARTS[parts]
        root = folder / f"run{len(list(folder.iterdir()))}"
        settings["output_dir"] = str(root / settings.get("output_dir", "runs"))
        if "distillation" in settings:
            settings["distillation"]["teacher"] = str(folder / settings["distillation"]["teacher"])
        base = {"gradient_accumulation_steps": 1, "save_steps": 0, "max_steps": 2}
        try:
            trainer = make_trainer(
                root,
                agent=make_agent(dropout=made.get("dropout", 0.0)),
                environment=Watched(
                    made.get("breaks"),
                    slow=made.get("slow"),
                    scenarios=made.get("scenarios", SCENARIOS),
                    success=made.get("success"),
                ),
                reward=reward() if isinstance(reward := made.get("reward", even_share), type) else reward,
                **{**base, **settings},
            )
        except StatesetError as error:
            return Seen(error=str(error))
        return asyncio.run(watch(trainer, trainer.train, root))

    return lambda settings, parts="plain": once(json.dumps(settings, sort_keys=True), parts)


def differs(before: Seen, after: Seen, sees: str) -> bool:
    if sees != "error":
        assert (before.error, after.error) == ("", "")
    return bool(getattr(before, sees) != getattr(after, sees))


def swept(table: Mapping[str, Change]) -> list[Any]:
    """Names of fields; all but those of `ONLY_HERE` are long."""
    return [name if name in ONLY_HERE else pytest.param(name, marks=pytest.mark.long) for name in table]


@pytest.mark.parametrize("name", swept(TRAINING))
def test_a_training_setting_changes_something(run_training, name):
    change = TRAINING[name]
    before = run_training(dict(change.given), change.parts)
    after = run_training({**change.given, name: change.value}, change.parts)
    assert differs(before, after, change.sees)


@pytest.fixture(scope="module")
def run_agent(folder: Path) -> Any:
    @cache
    def once(text: str, parts: str) -> Seen:
        settings = {"chat_template": "plain", "max_new_tokens": 3, "model_name": "model", **json.loads(text)}
        settings["model_name"] = str(folder / settings["model_name"])
        root = folder / f"run{len(list(folder.iterdir()))}"
        agent = MultiTurnAgent(AgentConfig(**settings))
        environment = Watched(**PARTS[parts])
        trainer = make_trainer(root, agent=agent, environment=environment, max_steps=2, save_steps=0)
        return asyncio.run(watch(trainer, trainer.train, root))

    return lambda settings, parts: once(json.dumps(settings, sort_keys=True), parts)


@pytest.mark.parametrize("name", swept(AGENT))
def test_an_agent_setting_changes_something(run_agent, name, caplog):
    change = AGENT[name]
    after = run_agent({**change.given, name: change.value}, change.parts)
    if name == "matmul_precision" and usable_precision("medium", torch.device("cpu")) == "highest":
        assert "matmul_precision medium stays at highest: this processor has no" in caplog.text
        return
    assert differs(run_agent(dict(change.given), change.parts), after, change.sees)


@pytest.fixture(scope="module")
def run_experiment(folder: Path) -> Any:
    @cache
    def once(text: str) -> Seen:
        root = folder / f"run{len(list(folder.iterdir()))}"
        settings = {
            "agent": {"chat_template": "plain", "max_new_tokens": 3},
            "environment": {"name": "tiny_training:Watched", "scenarios": SCENARIOS},
            "reward": "tiny_training:even_share",
            "training": {"max_steps": 1, "num_generations": 3, "learning_rate": 0.01},
            "evaluation": {},
            **json.loads(text),
        }
        settings["agent"]["model_name"] = str(folder / "model")
        settings["training"] |= {"output_dir": str(root), "save_steps": 0, "gradient_accumulation_steps": 1}
        experiment = Experiment(ExperimentConfig(**settings))

        async def work() -> None:
            await experiment.initialize()
            await experiment.before()
            await experiment.train()
            await experiment.after()

        seen = asyncio.run(watch(experiment.trainer, work, root))
        seen.evaluated = [experiment.summary.get(stage) for stage in ("before", "after")]
        return seen

    return lambda settings: once(json.dumps(settings, sort_keys=True))


@pytest.mark.parametrize("name", EVALUATION)
@pytest.mark.first(1)
def test_an_evaluation_setting_changes_something(run_experiment, name):
    change = EVALUATION[name]
    after = run_experiment({"evaluation": {name: change.value}})
    assert differs(run_experiment({}), after, change.sees)


@pytest.mark.parametrize("name", EXPERIMENT)
@pytest.mark.first(1)
def test_a_section_of_the_file_changes_something(run_experiment, name):
    change = EXPERIMENT[name]
    assert differs(run_experiment({}), run_experiment({name: change.value}), change.sees)
