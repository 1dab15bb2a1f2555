"""A surrogate of one's own believes, and a policy learns which experiment it needs next.

python examples/own_surrogate.py    # an ensemble of small networks; four minutes of one core
pip install botorch && python examples/own_surrogate.py --surrogate "Gaussian process"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from statistics import fmean

import torch
from torch import Tensor, nn

from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import RewardConfig
from stateset_agents.numeric.acquisition.functional.states import create_acquisition_state, create_random_scm
from stateset_agents.numeric.acquisition.functional.update import TrainingLoop, enhanced_grpo_training_loop
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.surrogates import Posterior, Surrogate
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule, evaluation_seeds

FAMILY = LinearFamily(num_variables=5, costs=(1.0, 20.0), budget=20.0)
SIZE = 2 * FAMILY.num_variables
"""Numbers of an intervention: which variables are set, and to what."""


def gaussian_process() -> Surrogate:
    """A process of BoTorch, as it is: an effect is a number of the model's, one of the variable's and a slope
    times the value. The variances are those of 5,000 models' effects; nothing is fitted."""
    try:
        from botorch.models import SingleTaskGP
        from gpytorch.kernels import ConstantKernel, LinearKernel
    except ImportError as error:
        raise SystemExit(f"{error}; install it with: pip install botorch") from error
    linear, constant = LinearKernel(ard_num_dims=SIZE).double(), ConstantKernel().double()
    linear.variance = torch.tensor([[0.4] * FAMILY.num_variables + [1.4] * FAMILY.num_variables])
    constant.constant = torch.tensor([0.65])
    nothing = torch.zeros(
        1, SIZE, dtype=torch.float64
    )  # BoTorch wants a first row: nothing set, nothing seen
    model = SingleTaskGP(nothing, nothing[:, :1], covar_module=linear + constant, outcome_transform=None)
    model.likelihood.noise = 1.0
    gp: Surrogate = model.eval().requires_grad_(False)
    return gp


class NeuralEnsemble(nn.Module):
    """Small networks, each of which stays near weights of its own and fits outcomes with noise of its own, so
    that they disagree as much as a posterior (Pearce and others, https://arxiv.org/abs/1810.05546)."""

    num_outputs = 1
    errors: Tensor

    def __init__(self, *, members: int = 8, hidden: int = 12, noise: float = 1.0, steps: int = 15) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(deviation: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(deviation * torch.randn(members, *shape, generator=generator))

        self.scales = (1.0, (3.5 / hidden) ** 0.5, 0.8)
        shapes = ((SIZE, hidden), (hidden, 1), (1, 1))
        self.weights = nn.ParameterList(map(normal, self.scales, *zip(*shapes, strict=True)))
        self.register_buffer("errors", noise**0.5 * torch.randn(members, 64, 1, generator=generator))
        self.noise, self.steps, self.fitted = noise, steps, list(self.weights)

    def predict(self, weights: list[Tensor], X: Tensor) -> Tensor:
        """[B, members, n, 1] effects of X [B, n, SIZE]."""
        first, second, bias = weights
        return torch.tanh(X.float()[:, None] @ first) @ second + bias

    def condition_on_observations(self, X: Tensor, Y: Tensor) -> NeuralEnsemble:
        """The ensemble after B campaigns' experiments."""
        targets = Y.float()[:, None] + self.errors[:, : Y.shape[1]]
        fitted = [each.detach().expand(len(X), *each.shape).clone().requires_grad_() for each in self.weights]
        optimizer = torch.optim.Adam(fitted, lr=0.1)
        for _ in range(self.steps):
            loss = ((self.predict(fitted, X) - targets) ** 2).sum() / self.noise
            for each, anchor, scale in zip(fitted, self.weights, self.scales, strict=True):
                loss = loss + ((each - anchor.detach()) ** 2).sum() / scale**2
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's has no types
            optimizer.step()
        return self._with(fitted)

    def _with(self, fitted: list[Tensor]) -> NeuralEnsemble:
        other = NeuralEnsemble.__new__(NeuralEnsemble)
        other.__dict__ = {**self.__dict__, "fitted": [each.detach() for each in fitted]}
        return other

    def posterior(self, X: Tensor) -> Posterior:
        """Mean and covariance over the members."""
        effects = self.predict(self.fitted, X)[..., 0].double()  # [B, members, A]
        mean = effects.mean(dim=1)
        apart = effects - mean[:, None]
        covariance = apart.mT @ apart / (effects.shape[1] - 1) + 1e-4 * torch.eye(X.shape[1])
        return Posterior(torch.distributions.MultivariateNormal(mean, covariance))


SURROGATES: Mapping[str, Callable[[], Surrogate]] = {
    "Gaussian process": gaussian_process,
    "neural ensemble": NeuralEnsemble,
}


def trained(surrogate: Surrogate, *, steps: int, seed: int, log: Callable[[str], None]) -> TrainingLoop:
    """A policy that is paid for the fall of the true regret, on 4,096 models that are simulated."""
    scms = create_random_scm(seed, FAMILY, number=4096)
    config = GRPOConfig(
        total_steps=steps,
        num_groups=32,
        group_size=16,
        num_iterations=8,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        entropy_coef=0.001,
        seed=seed,
    )
    return enhanced_grpo_training_loop(
        config,
        create_acquisition_state(scms, surrogate=surrogate),
        scms,
        policy_network=AcquisitionPolicyNetwork(seed=seed),
        reward_config=RewardConfig(weights={"regret": 1.0}, horizon="campaign"),
        log=log,
    )


def main() -> None:
    """Train, and compare with experiments at random on models that no training plays."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--surrogate", choices=SURROGATES, default="neural ensemble")
    arguments.add_argument("--steps", type=int, default=60_000, help="experiments of the training")
    arguments.add_argument("--tasks", type=int, default=500, help="held out")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    surrogate, policy = SURROGATES[chosen.surrogate](), AcquisitionPolicyNetwork()
    trained(surrogate, steps=chosen.steps, seed=0, log=print).load_into(policy)
    environment, held_out = AcquisitionEnv(FAMILY, surrogate=surrogate), evaluation_seeds(0, chosen.tasks)
    played = {
        "random": evaluate_rule(environment.rules()["random"], environment, held_out),
        "policy": evaluate(policy, environment, held_out),
    }
    for name, evaluation in played.items():
        regret, experiments = evaluation.components["regret"], fmean(evaluation.lengths)
        print(f"{name}: regret {regret:.3f} in the end, after {experiments:.1f} experiments")


if __name__ == "__main__":
    main()
