"""Choice of the next experiment: causal models, beliefs, rules that choose, and an environment."""
