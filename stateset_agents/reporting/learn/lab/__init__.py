"""GRPO on a run of one's own: its recorded rewards and log-probs under other settings."""
