"""Causal Bayesian optimisation: a Gaussian process per exploration set, expected improvement per cost.

After Aglietti and others (https://arxiv.org/abs/2005.11741, algorithm 1). Where we differ: mechanisms are
fitted to the observational data variable by variable and simulated under do(), which leaves hidden
confounders out; the deviation of that estimate is that of refits to bootstrap samples, each with its
mechanisms moved within their own posterior; and nothing is observed on the way.

`scripts/acquisition_policy.py` has it as a rival (`play_cbo`), and `scripts/beside_botorch.py` compares its
process with BoTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scripts.rivals.causal_models import CausalModel, Intervention
from stateset_agents.numeric.acquisition.campaign import CampaignOutcome, play_watching
from stateset_agents.numeric.acquisition.families import Tasks
from stateset_agents.numeric.acquisition.graphs import CausalGraph
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.rules import Situation, expected_improvement, improvement_over
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

# ------------------------------------------------------------------------------------------ Gaussian process
#
# The causal prior of Aglietti and others (https://arxiv.org/abs/2005.11741, equations 2 to 4): before the
# first experiment the effect of do(X = x) is believed to be m(x), give or take s(x), both by observational
# data, and
#
#     k(x, x') = variance exp(-|x - x'|^2 / (2 length^2)) + s(x) s(x')

CausalPrior = Callable[[Array], tuple[Array, Array]]
"""[n, k] values of the k variables -> [n] prior means and [n] prior deviations of the effect."""


def flat_prior(points: Array) -> tuple[Array, Array]:
    """Mean 0 and no causal deviation: plain Bayesian optimisation."""
    return np.zeros(len(points)), np.zeros(len(points))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """Effects at points [n, k], measured with noise. Raises ConfigurationError for a singular covariance."""

    points: Array  # [n, k]
    outcomes: Array  # [n]
    lengths: Array  # [k]
    """Length scale of each variable, in the variable's unit."""
    variance: float = 1.0
    noise: float = 1e-4
    """Variance of an outcome around its effect."""
    prior: CausalPrior = flat_prior

    def __post_init__(self) -> None:
        for name, value in (
            ("variance", self.variance),
            *((f"lengths[{i}]", x) for i, x in enumerate(self.lengths)),
        ):
            expect_that(value > 0, name, "be above 0", value)
        is_finite = bool(np.isfinite(self.points).all() and np.isfinite(self.outcomes).all())
        hint = "leave the failed ones out"
        expect_that(is_finite, "points and outcomes", "be finite", self.outcomes.tolist(), hint)
        expect_that(self.noise >= 0, "noise", "be at least 0", self.noise)

    def with_outcome(self, point: Sequence[float], outcome: float) -> GaussianProcess:
        """The process after one more experiment."""
        return replace(
            self,
            points=np.concatenate([self.points, np.array([point], dtype=np.float64)]),
            outcomes=np.append(self.outcomes, outcome),
        )

    def posterior(self, points: Array) -> tuple[Array, Array]:
        """[m] means and [m] deviations of the effect itself at [m, k] points."""
        mean, deviation = self.prior(points)
        own_variance = self.variance + deviation**2
        if not len(self.points):
            return mean, np.sqrt(own_variance)
        root, missed = self._whitened()
        beside = np.linalg.solve(root, self._kernel(self.points, points))  # [n, m]
        left = own_variance - (beside**2).sum(axis=0)
        return mean + beside.T @ missed, np.sqrt(np.maximum(left, 0.0))

    def log_likelihood(self) -> float:
        """Log-likelihood of the outcomes, the effects integrated out."""
        root, missed = self._whitened()
        half_determinant = float(np.log(np.diag(root)).sum())
        return -0.5 * float(missed @ missed) - half_determinant - 0.5 * len(missed) * math.log(2 * math.pi)

    def fitted(self, limits: Sequence[tuple[float, float]]) -> GaussianProcess:
        """The process with the likeliest lengths and variance of a grid: lengths from a fiftieth to a
        half of each range, the present variance or a quarter or four times of it."""
        if len(self.points) < 2:
            return self
        spread = np.array([high - low for low, high in limits])
        tries = [
            replace(self, lengths=share * spread, variance=times * self.variance)
            for share in (0.02, 0.04, 0.08, 0.15, 0.3, 0.5)
            for times in (0.25, 1.0, 4.0)
        ]
        return max(tries, key=GaussianProcess.log_likelihood)

    def _kernel(self, ones: Array, others: Array) -> Array:
        """[n, m]"""
        apart = (ones[:, None, :] - others[None, :, :]) / self.lengths
        near: Array = self.variance * np.exp(-0.5 * (apart**2).sum(axis=-1))
        return near + self.prior(ones)[1][:, None] * self.prior(others)[1][None, :]

    def _whitened(self) -> tuple[Array, Array]:
        """The covariance's Cholesky root, and outcomes minus the prior mean divided by it."""
        covariance = self._kernel(self.points, self.points) + self.noise * np.eye(len(self.points))
        try:
            root = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
        except np.linalg.LinAlgError:
            raise ConfigurationError(
                f"the posterior is singular: {len(self.points)} outcomes at equal or nearly equal points "
                f"with noise {self.noise:g}; raise noise"
            ) from None
        missed = np.linalg.solve(root, self.outcomes - self.prior(self.points)[0])
        return root, np.asarray(missed, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Trial:
    """One experiment."""

    intervention: Intervention
    outcome: float
    """Mean of the target over the experiment's samples."""
    cost: float


def optimize(
    model: CausalModel,
    *,
    sets: Sequence[Sequence[str]],
    budget: float,
    observations: Mapping[str, Array] | None = None,
    samples: int = 1000,
    points: int = 200,
    random: np.random.Generator,
) -> list[Trial]:
    """Experiments until the budget pays no further one; the target's mean is to be low.

    `sets`: which variables may be set together; `observations`: [n] values of what is seen, for the causal
    prior, plain when absent; `samples`: of the target in each experiment; `points`: candidates of each set, a
    grid for one variable and random ones for several. What is tried does not depend on the target's unit or
    zero. Raises ConfigurationError for observations that lack a variable or are no finite numbers.
    """
    model.check_budget(budget)
    if not sets:
        raise ConfigurationError("sets must have at least one exploration set, got none: give [['X'], ['Z']]")
    processes = [_Process.begun(model, names, observations, samples, points, random) for names in sets]
    trials: list[Trial] = []
    errors: list[float] = []
    left = budget
    while True:
        units = _Units()  # the causal prior is in the target's own
        if observations is None:
            units = _Units.of([trial.outcome for trial in trials], errors, samples)
        best = min((units.standardised(trial.outcome) for trial in trials), default=math.inf)
        values = []
        for process in processes:
            believed = units.believed(process.process).fitted(process.limits)
            mean, deviation = believed.posterior(process.candidates)
            gain = improvement_over(-mean, deviation, -best) if trials else deviation
            values.append(np.where(process.costs <= left + 1e-9, gain / process.costs, -math.inf))
        index = int(np.argmax([value.max() for value in values]))
        place = int(values[index].argmax())
        if values[index][place] == -math.inf:
            return trials
        chosen = processes[index]
        point = chosen.candidates[place].tolist()
        intervention = dict(zip(chosen.names, point, strict=True))
        outcome, error = model.effect(intervention, samples, random)
        errors.append(error)
        trials.append(Trial(intervention, outcome, float(chosen.costs[place])))
        processes[index] = replace(chosen, process=chosen.process.with_outcome(point, outcome))
        left -= trials[-1].cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Zero and unit in which outcomes are counted, so that a process of variance 1 around 0 fits any
    target."""

    zero: float = 0.0
    scale: float = 1.0
    noise: float | None = None
    """Variance of a standardised outcome around its effect; None: as the process has it."""

    @classmethod
    def of(cls, outcomes: Sequence[float], errors: Sequence[float], samples: int) -> _Units:
        """Counted from the worst outcome so far, in the target's deviation: that of the outcomes from there
        and that of its samples within an experiment together. What was not tried yet is believed to be as bad
        as the worst; from the mean, few outcomes look like a flat function, and nothing else is tried.

        `errors`: standard errors of the outcomes, which a single sample does not have.
        """
        if not outcomes:
            return cls()
        zero = max(outcomes)
        error = float(np.mean(np.square(errors))) if samples > 1 else 0.0
        scale = math.sqrt(float(np.mean(np.square(np.subtract(outcomes, zero)))) + samples * error)
        if scale <= 1e-12 * max(map(abs, outcomes)):  # nothing differs but by rounding
            return cls(zero=zero)
        return cls(zero=zero, scale=scale, noise=error / scale**2 if samples > 1 else None)

    def standardised(self, outcome: float) -> float:
        return (outcome - self.zero) / self.scale

    def believed(self, process: GaussianProcess) -> GaussianProcess:
        """The process in these units."""
        noise = process.noise if self.noise is None else self.noise
        return replace(process, outcomes=(process.outcomes - self.zero) / self.scale, noise=noise)


def _checked(graph: CausalGraph, observations: Mapping[str, Array]) -> dict[str, Array]:
    """The columns of what can be seen, as numbers.

    Raises ConfigurationError for one that is missing, has another length or holds what is no finite number.
    """
    columns: dict[str, Array] = {}
    for name in graph.order():
        if name in graph.hidden:
            continue
        if name not in observations:
            raise ConfigurationError(f"observations have no {name}, a variable that is seen: add its column")
        try:
            values = np.asarray(observations[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"observations of {name} must be numbers: {error}") from error
        if values.ndim != 1 or len(values) < 2:
            raise ConfigurationError(
                f"observations of {name} must be a row of two numbers or more, got the shape {values.shape}"
            )
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ConfigurationError(
                f"observations of {name} must be finite, got {values[place]} in row {place}: drop the row"
            )
        columns[name] = values
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise ConfigurationError(f"observations must have a value of each variable in every row, got {shown}")
    return columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Process:
    """An exploration set: what is believed of it, and where it can be tried."""

    names: tuple[str, ...]
    limits: Sequence[tuple[float, float]]
    candidates: Array  # [m, k]
    costs: Array  # [m]
    process: GaussianProcess

    @classmethod
    def begun(
        cls,
        model: CausalModel,
        names: Sequence[str],
        observations: Mapping[str, Array] | None,
        samples: int,
        points: int,
        random: np.random.Generator,
    ) -> _Process:
        """The exploration set before its first experiment."""
        candidates, limits = _candidates(model, names, points, random)
        tried = candidates.tolist()
        prior: CausalPrior = flat_prior
        target_variance = 1.0
        if observations is not None:
            observations = _checked(model.graph, observations)
            target_variance = float(np.var(observations[model.graph.target]))
            prior = causal_prior(model.graph, observations, names, random=random)
        return cls(
            names=tuple(names),
            limits=limits,
            candidates=candidates,
            costs=np.array([model.cost(dict(zip(names, point, strict=True))) for point in tried]),
            process=GaussianProcess(
                points=candidates[:0],
                outcomes=np.empty(0),
                lengths=np.array([0.1 * (high - low) for low, high in limits]),
                noise=target_variance / samples,
                variance=target_variance,
                prior=prior,
            ),
        )


def causal_prior(
    graph: CausalGraph,
    observations: Mapping[str, Array],
    names: Sequence[str],
    *,
    random: np.random.Generator,
    num_fits: int = 8,
    particles: int = 32,
) -> CausalPrior:
    """E[target | do(names = x)] and its deviation, from observations alone.

    Each of `num_fits` bootstrap samples (an even number) gives every variable a kernel regression on its
    visible parents, moved by as many of its posterior deviations as chance says, so that far from the data
    refits disagree; under do(), `particles` are sent through these with resampled residuals. Raises
    ConfigurationError for observations that lack a variable or are no finite numbers.
    """
    observations = _checked(graph, observations)
    signs = random.standard_normal((num_fits // 2, len(graph.names)))
    fits = [_Fit(graph, observations, moves, random) for moves in np.concatenate([signs, -signs])]

    estimates: dict[bytes, tuple[Array, Array]] = {}  # the same points are asked for again and again

    def prior(points: Array) -> tuple[Array, Array]:
        if points.tobytes() not in estimates:
            estimates[points.tobytes()] = estimate(points)
        return estimates[points.tobytes()]

    def estimate(points: Array) -> tuple[Array, Array]:
        means = np.stack([fit.effect(names, points, particles) for fit in fits])
        return means.mean(axis=0), means.std(axis=0, ddof=1)

    return prior


def play_cbo(tasks: Tasks, *, length: float = 0.5, variance: float = 4.0, seed: int = 0) -> CampaignOutcome:
    """CBO on thousands of tasks with menus: one process per set of variables that are set together, and the
    highest expected improvement per cost.

    It sees the target alone, as CBO does, and begins with the best causal prior that there can be: the exact
    mean and deviation of each effect by what is observed at the start. `length` is in half ranges of a
    variable, `variance` in mean squares of these deviations; an outcome's noise is known. In the end the
    exact posterior recommends, as for every rule.
    """
    processes = _MenuProcesses(tasks, length, variance)
    return play_watching(processes.choose, tasks, told=processes.learn, seed=seed)


class _MenuProcesses:
    """Gaussian processes over the menus of B tasks, as joint distributions of A effects."""

    def __init__(self, tasks: Tasks, length: float, variance: float) -> None:
        self.mean, deviation = tasks.belief.effect_moments()
        self.noise = tasks.belief.outcome_variances()
        menu = tasks.menu
        reach = np.abs(menu.values).max(axis=1)[:, None, None] + 1e-12
        apart = ((menu.values[:, :, None] - menu.values[:, None]) / reach / length) ** 2
        together = (menu.is_set[:, :, None] == menu.is_set[:, None]).all(axis=-1)
        spread = variance * (deviation**2).mean(axis=1)[:, None, None]
        near = spread * np.exp(-0.5 * apart.sum(axis=-1))
        self.covariance: Array = np.where(together, near + deviation[:, :, None] * deviation[:, None, :], 0.0)

    def choose(self, situation: Situation) -> Ints:
        """[B] experiments."""
        deviation = np.sqrt(np.maximum(np.diagonal(self.covariance, axis1=1, axis2=2), 0.0))
        return situation.best(expected_improvement(self.mean, deviation) / situation.costs)

    def learn(self, actions: Ints, outcomes: Array) -> None:
        """`actions`: [B], -1 where nothing was done."""
        rows = np.flatnonzero(actions >= 0)
        of, outcome = actions[rows], outcomes[rows]
        beside = self.covariance[rows, of]  # [B, A]
        within = self.covariance[rows, of, of] + self.noise[rows, of]
        gain = beside / within[:, None]
        self.mean[rows] += gain * (outcome - self.mean[rows, of])[:, None]
        self.covariance[rows] -= gain[:, :, None] * beside[:, None, :]


class _Fit:
    """Mechanisms that were fitted to one bootstrap sample of the observations."""

    _RIDGE = 0.1
    """Variance of the noise over that of the function, both of standardised values."""

    def __init__(
        self,
        graph: CausalGraph,
        observations: Mapping[str, Array],
        moves: Array,
        random: np.random.Generator,
    ) -> None:
        self._graph = graph
        size = len(observations[graph.target])
        rows = random.integers(0, size, size)
        self._seed = int(random.integers(1 << 62))
        self._data = {name: observations[name][rows] for name in graph.order() if name not in graph.hidden}
        self._parents = {
            name: [parent for parent in graph.parents[name] if parent not in graph.hidden]
            for name in self._data
        }
        self._moves = dict(zip(graph.names, moves.tolist(), strict=True))
        self._inverses: dict[str, Array] = {}
        self._weights: dict[str, Array] = {}
        self._residuals: dict[str, Array] = {}
        for name, values in self._data.items():
            if self._parents[name]:
                kernel = self._kernel(name, {parent: self._data[parent] for parent in self._parents[name]})
                centred = values - values.mean()
                inverse = np.linalg.inv(kernel + self._RIDGE * np.eye(size))
                self._inverses[name] = np.asarray(inverse, dtype=np.float64)
                self._weights[name] = self._inverses[name] @ centred
                self._residuals[name] = centred - kernel @ self._weights[name]
            else:
                self._residuals[name] = values - values.mean()

    def effect(self, names: Sequence[str], points: Array, particles: int) -> Array:
        """[n] mean of the target under do(names = points [n, k])."""
        random = np.random.default_rng(self._seed)  # the same function at every call
        values_of: dict[str, Array] = {}
        for name, values in self._data.items():
            residuals = np.tile(random.choice(self._residuals[name], particles), len(points))
            if name in names:
                values_of[name] = np.repeat(points[:, list(names).index(name)], particles)
            elif self._parents[name]:
                kernel = self._kernel(name, values_of)
                left = 1.0 - ((kernel @ self._inverses[name]) * kernel).sum(axis=1)
                moved = self._moves[name] * values.std() * np.sqrt(np.maximum(left, 0.0))
                expected: Array = values.mean() + kernel @ self._weights[name]
                values_of[name] = expected + moved + residuals
            else:
                values_of[name] = values.mean() + residuals
        means: Array = values_of[self._graph.target].reshape(len(points), particles).mean(axis=1)
        return means

    def _kernel(self, name: str, at: Mapping[str, Array]) -> Array:
        """[m, size] between values of the parents and those of the sample."""
        total: Array | float = 0.0
        for parent in self._parents[name]:
            sample = self._data[parent]
            total = total + ((at[parent][:, None] - sample[None, :]) / (sample.std() + 1e-9)) ** 2
        return np.exp(-0.5 * np.asarray(total))


def _candidates(
    model: CausalModel, names: Sequence[str], number: int, random: np.random.Generator
) -> tuple[Array, list[tuple[float, float]]]:
    limits = []
    for name in names:
        within = model.variables[name].limits if name in model.variables else None
        if within is None:
            model.check({name: 0.0})  # says what is wrong with it
        else:
            limits.append(within)
    if len(limits) == 1:
        return np.linspace(*limits[0], number)[:, None], limits
    low, high = np.array(limits).T
    return random.uniform(low, high, size=(number, len(limits))), limits
