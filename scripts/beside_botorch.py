"""Is the posterior of control.acquisition's Gaussian process that of BoTorch? Prints the greatest difference.

    .venv/bin/python scripts/beside.py .venv-botorch botorch==0.18.1
    PYTHONPATH=. .venv-botorch/bin/python scripts/beside_botorch.py

Both get the same kernel (RBF plus s(x) s(x')), prior mean, noise and outcomes; nothing is fitted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scripts.rivals.causal_bo import GaussianProcess

LENGTHS, VARIANCE, NOISE = np.array([0.7, 1.5]), 2.0, 0.1


def prior(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the effect before any experiment."""
    return 2 * points[:, 0], 0.3 + np.abs(points[:, 0])


def theirs(points: np.ndarray, outcomes: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BoTorch's posterior means and deviations at `at`."""
    try:
        from botorch.models import SingleTaskGP
        from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
        from gpytorch.means import Mean
    except ImportError as error:
        raise SystemExit(f"{error}; install it with: pip install botorch") from error

    class Line(Mean):  # type: ignore[misc]  # their classes have no types
        def forward(self, x: Any) -> Any:
            return 2 * x[..., 0]

    class Causal(Kernel):  # type: ignore[misc]  # their classes have no types
        def __init__(self) -> None:
            super().__init__()
            self.near = ScaleKernel(RBFKernel(ard_num_dims=2))
            self.near.outputscale = VARIANCE
            self.near.base_kernel.lengthscale = torch.from_numpy(LENGTHS)[None]

        def forward(self, ones: Any, others: Any, diag: bool = False, **rest: Any) -> Any:
            first, second = 0.3 + ones[..., 0].abs(), 0.3 + others[..., 0].abs()
            if diag:
                return self.near(ones, others, diag=True) + first * second
            return self.near(ones, others).to_dense() + first[..., :, None] * second[..., None, :]

    model = SingleTaskGP(
        torch.from_numpy(points),
        torch.from_numpy(outcomes)[:, None],
        train_Yvar=torch.full((len(points), 1), NOISE),
        covar_module=Causal(),
        mean_module=Line(),
        outcome_transform=None,
    )
    with torch.no_grad():
        found = model.posterior(torch.from_numpy(at))
    return found.mean[:, 0].numpy(), found.variance[:, 0].sqrt().numpy()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    random = np.random.default_rng(0)
    for number in (1, 5, 20, 60):
        points, outcomes = random.uniform(-2, 2, (number, 2)), random.standard_normal(number)
        at = random.uniform(-3, 3, (50, 2))
        ours = GaussianProcess(
            points=points, outcomes=outcomes, lengths=LENGTHS, variance=VARIANCE, noise=NOISE, prior=prior
        ).posterior(at)
        worst = max(
            float(np.abs(mine - other).max())
            for mine, other in zip(ours, theirs(points, outcomes, at), strict=True)
        )
        print(f"{number} outcomes: means and deviations at 50 points differ by at most {worst:.1e}")


if __name__ == "__main__":
    main()
