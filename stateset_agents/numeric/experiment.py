"""A numeric training from one YAML file (`kind: control`): measure, train, measure again, report.

The command line's verbs call this; in a program, use `ControlTrainer` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from stateset_agents.numeric.cloning import Cloned, clone
from stateset_agents.numeric.credit import ESTIMATORS
from stateset_agents.numeric.environments.base import BatchedEnvironment, Ruled, Traced
from stateset_agents.numeric.evaluation import (
    ControlEvaluation,
    against,
    evaluate,
    evaluate_rule,
)
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import TaskPolicy, ValueNormalization, policy_for
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.runs.checkpoint_files import best_checkpoint, load_checkpoint
from stateset_agents.runs.checkpoints import checkpoint_at
from stateset_agents.runs.experiment import BaseExperiment, OnProgress, read_experiment
from stateset_agents.runtime.named_code import check_arguments, registered
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.yaml_files import absolute_paths, settings_from
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import Stage
from stateset_agents.tracking.windows import Trace, Window
from stateset_agents.types.errors import CheckpointError, ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import Settings

ENVIRONMENTS: Mapping[str, str] = {
    "cart_pole": "stateset_agents.numeric.environments.classic:BatchedCartPole",
    "acrobot": "stateset_agents.numeric.environments.classic:BatchedAcrobot",
    "autoscaling": "stateset_agents.numeric.autoscaling.baselines:autoscaling",
    "causal_acquisition": "stateset_agents.numeric.acquisition.environment:linear_acquisition",
    "mix": "stateset_agents.numeric.environments.suites:mix",
}
"""Name -> "package.module:Class", or a function, that gives a `BatchedEnvironment`."""


class PolicyConfig(Settings):
    """The network. It has a critic where `training.advantage_estimator` is gae."""

    clone: str | None = None
    """A rule of the environment, by its name, as which the policy learns to act before it is trained; unset:
    it begins at random."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the layers of tanh."""
    normalize_observations: bool = False
    """Subtract each observed number's running mean and divide by its deviation, which are saved with the
    weights: for numbers that are far from 1."""
    value_normalization: ValueNormalization | None = None
    """task: the critic has an output for each task, in that task's own units; unset: so where the environment
    has several."""

    @field_validator("hidden")
    @classmethod
    def _have_a_width(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value, default=1) < 1:
            raise ValueError(f"every width must be at least 1, got {list(value)}")
        return value


class MeasurementConfig(Settings):
    """The measurement before and after training, by the likeliest action of each step."""

    episodes: int = Field(default=100, ge=1)
    """Starts, which no training plays and no eval_steps sees."""
    seed: int = Field(default=0, ge=0)
    """Of these starts; not the training seed."""


class ControlFile(Settings):
    """The settings of a YAML file of `kind: control`."""

    kind: Literal["control"] = "control"
    """Numeric, not of conversations."""
    environment: Mapping[str, Any]
    """A name, `gymnasium: ID`, or "package.module:Class"; and its arguments."""
    policy: PolicyConfig = PolicyConfig()
    """The network's sizes."""
    training: ControlConfig = ControlConfig()
    """How it is trained, for how long, and what the run writes."""
    evaluation: MeasurementConfig | None = None
    """Unset: no measurement around training."""

    @field_validator("environment", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def new_policy(self, environment: BatchedEnvironment) -> MlpPolicy | TaskPolicy:
        """Untrained, with weights that follow from `training.seed`."""
        network: dict[str, Any] = {
            "hidden": self.policy.hidden,
            "normalize_observations": self.policy.normalize_observations,
            "seed": self.training.seed,
        }
        value_normalization = self.policy.value_normalization
        if ESTIMATORS[self.training.advantage_estimator].credit is None:
            return policy_for(environment, value_normalization=value_normalization, **network)
        if value_normalization is not None:
            raise ConfigurationError(
                f"policy.value_normalization is of a critic, and {self.training.advantage_estimator} has "
                "none: set training.advantage_estimator to gae, or leave it out"
            )
        return MlpPolicy(environment.spec, **network)


_SECTIONS: Mapping[str, type[Settings]] = {
    "training": ControlConfig,
    "policy": PolicyConfig,
    "evaluation": MeasurementConfig,
}


_OTHERS = {
    "program": "{path} is of a run that a program made and names only its classes: go on in that "
    "program, with `await trainer.load_checkpoint({run!r})`"
}
"""Maker of a run that no YAML file describes -> how to go on with such a run."""


def _resolve_paths(data: dict[str, Any], base: Path) -> None:
    data["environment"] = absolute_paths(data.get("environment"), base)


def load_control(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ControlFile:
    """Read a YAML file of `kind: control`, or a run folder's; `overrides` are dotted names.

    Texts in `environment` that start with ./ or ../, and names of code beside the file, start from the file's
    folder, in `overrides` from the working directory. Raises ConfigurationError naming the file and what is
    wrong in it.
    """
    path, data = read_experiment(path, overrides, resolve=_resolve_paths, others=_OTHERS)
    example = "add a line such as `environment: cart_pole`, or `environment: module:Class` of your own"
    return settings_from(data, ControlFile, of=path, sections=_SECTIONS, required={"environment": example})


def make_environment(spec: Mapping[str, Any]) -> BatchedEnvironment:
    """{"name": "cart_pole", "horizon": 200} or {"gymnasium": "LunarLander-v3"} -> the environment.

    Raises ConfigurationError for a name that leads nowhere, for arguments that it does not take, and for
    something else than a BatchedEnvironment.
    """
    arguments = dict(spec)
    if "gymnasium" in arguments:
        from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch

        return GymnasiumBatch(arguments.pop("gymnasium"), **arguments)
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"environment must be {', '.join(ENVIRONMENTS)}, `gymnasium: ID` or module:Class, got {name!r}"
        )
    make = registered("environment", ENVIRONMENTS, name)
    if not callable(make):
        raise ConfigurationError(
            f"environment {name!r} is a {type(make).__name__}: name a class or a function"
        )
    check_arguments(f"environment {name!r}", make, arguments)
    named_environment = make(**arguments)
    if not isinstance(named_environment, BatchedEnvironment):
        raise ConfigurationError(
            f"environment {name!r} gave a {type(named_environment).__name__}: name a BatchedEnvironment, see "
            "docs/control.md; one of Gymnasium is `gymnasium: ID`"
        )
    return named_environment


def held_out_seeds(config: MeasurementConfig | None) -> list[int]:
    """The starts of a measurement; by default those of `MeasurementConfig()`."""
    config = config or MeasurementConfig()
    return [derive(config.seed, "test", index) for index in range(config.episodes)]


# ------------------------------------------------------------------------------ who plays


def load_policy(path: str | Path, environment: BatchedEnvironment) -> MlpPolicy | TaskPolicy:
    """The policy of a checkpoint, or of a run folder: the weights that its training ended with.

    Raises ConfigurationError where it is not of these observations and actions, or of a run that a program
    made, whose network only that program knows.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist: give a run folder or a checkpoint")
    run = path if (path / "checkpoints").is_dir() else path.resolve().parents[1]
    config = load_control(run)
    best = best_checkpoint(run / "checkpoints") if config.training.load_best_at_end and run == path else None
    try:
        weights = load_checkpoint(best or checkpoint_at(path)).weights
        policy = config.new_policy(environment)
        policy.load_state_dict(dict(weights))
    except CheckpointError as error:
        raise ConfigurationError(str(error)) from error
    except RuntimeError as error:
        raise ConfigurationError(
            f"{path} is of other observations or actions than {environment.spec.name}: evaluate it on "
            f"{config.environment.get('gymnasium', config.environment.get('name'))}"
        ) from error
    return policy


def rule_names(environment: BatchedEnvironment) -> tuple[str, ...]:
    """Names of the rules that an environment offers beside a policy."""
    return tuple(environment.rules()) if isinstance(environment, Ruled) else ()


def measured(
    player: MlpPolicy | TaskPolicy | str, environment: BatchedEnvironment, seeds: Sequence[int]
) -> ControlEvaluation:
    """A policy's, or a rule's, episodes from these starts. Blocking."""
    if not isinstance(player, str):
        return evaluate(player, environment, seeds)
    assert isinstance(environment, Ruled)  # it named the rule
    return evaluate_rule(environment.rules()[player], environment, seeds)


def _windows(
    players: Mapping[str, MlpPolicy | TaskPolicy | str],
    environment: Traced,
    evaluations: Mapping[str, ControlEvaluation],
) -> list[Window]:
    """The starts that went worst, median and best for the first player, against the second where there is
    one; each is played again for its trace."""
    first, *others = evaluations.values()
    baseline = others[0].returns if others else (0.0,) * len(first.returns)
    pairs = zip(first.seeds, first.returns, baseline, strict=True)
    gains = sorted((a - b, seed) for seed, a, b in pairs if a is not None and b is not None)
    places = {"worst": 0, "median": len(gains) // 2, "best": len(gains) - 1}
    windows = []
    for name, place in places.items() if gains else ():
        seed = gains[place][1]
        traces: dict[str, Trace] = {}
        returns: dict[str, float] = {}
        for player_name, player in players.items():
            assert isinstance(environment, BatchedEnvironment)
            returns[player_name] = measured(player, environment, [seed]).returns[0] or 0.0
            traces[player_name] = environment.trace(0)
        windows.append(Window(name=name, seed=seed, returns=returns, traces=traces))
    return windows


# ------------------------------------------------------------------------------ the run


class ControlExperiment(BaseExperiment[ControlFile, ControlTrainer]):
    """One run folder's life: new from a file of `kind: control`, or resumed from the folder."""

    def _make_trainer(self, run: RunFolder | None, callbacks: Sequence[object]) -> ControlTrainer:
        config = self.config
        environment = make_environment(config.environment)
        self.policy = config.new_policy(environment)
        return ControlTrainer(
            self.policy,
            environment,
            config.training,
            run=run,
            description=config.model_dump(mode="json", exclude={"kind", "training"}),
            callbacks=callbacks,
        )

    async def initialize(self) -> None:
        """Check everything, and have the policy act as a rule does where one is named; a resumed run goes on
        from its checkpoint."""
        if (rule := self.config.policy.clone) is not None:
            cloned = await in_thread(self._clone, rule)
            self.summary["cloned"] = {
                "rule": rule,
                "agreement": cloned.agreement,
                "commonest": cloned.commonest,
            }
        await super().initialize()

    def _clone(self, rule: str) -> Cloned:
        """A resumed run does so, too: which run it is follows from the policy that it began with."""
        environment = make_environment(self.config.environment)
        names = rule_names(environment)
        if rule not in names:
            has = f"one of {', '.join(names)}" if names else "left out, as this environment has no rules"
            raise ConfigurationError(f"policy.clone must be {has}, got {rule!r}")
        assert isinstance(environment, Ruled)  # it named its rules
        return clone(self.policy, environment.rules()[rule], environment, seed=self.config.training.seed)

    def _forget_after(self) -> None:
        self.summary.pop("rules", None)
        super()._forget_after()
        self.run.drop_stage("after", self.trainer.step_number)

    async def _measure(self, stage: Stage, on_progress: OnProgress | None) -> dict[str, Any]:
        """Play all starts at once, in one call; after training those of the environment's rules, too."""
        trainer = self.trainer
        ours = await trainer.evaluate(held_out_seeds(self._evaluation))
        if trainer.config.log_episodes:
            # a kill between this line and summary.json leaves them there, and they are played again
            self.run.drop_stage(stage, trainer.step_number)
            trainer.tracker.log_episodes(trainer.step_number, ours.rollout.episodes(), stage=stage)
        if stage == "before":
            return {stage: ours.summary()}
        rules, windows = await trainer.call(lambda: self._beside(ours))
        self.run.write_windows(windows)
        return {"rules": rules, stage: ours.summary()}

    def _beside(self, ours: ControlEvaluation) -> tuple[dict[str, Any], list[Window]]:
        """The environment's rules from the same starts, and what happened in three of them."""
        environment = self.trainer.validation
        names = rule_names(environment)
        evaluations = {"policy": ours}
        evaluations |= {name: measured(name, environment, ours.seeds) for name in names}
        comparisons = {name: against(ours, evaluations[name]) for name in names}
        if not isinstance(environment, Traced):
            return comparisons, []
        seats: dict[str, MlpPolicy | TaskPolicy | str] = {
            "policy": self.policy,
            **{name: name for name in names[:1]},
        }
        return comparisons, _windows(seats, environment, evaluations)
