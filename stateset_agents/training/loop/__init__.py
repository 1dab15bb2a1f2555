"""The training loop: rollouts, the step, weight sync, checkpoints, resuming."""
