"""The values that every room speaks of: errors, messages, scenarios, trajectories, timelines, seeds."""
