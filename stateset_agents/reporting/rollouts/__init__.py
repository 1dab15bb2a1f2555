"""What a run's growing files say of its rollouts: conversations, distributions, timeline."""
