"""Scenarios, conversations, agents, environments, rewards: what happens before any training."""
