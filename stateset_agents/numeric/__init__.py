"""Reinforcement learning of numeric policies: batched environments, groups of equal starts, a trainer."""
