"""Which experiment to pay for next: causal models, beliefs, rules that choose, and an environment."""
