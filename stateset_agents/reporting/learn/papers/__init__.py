"""Papers as pages: GRPO, gradient surgery, soft modularization, an infinite mixture of Gaussian processes."""
