"""Pages one learns from: GRPO on a run of one's own, papers to play with, groupings of trajectories."""
