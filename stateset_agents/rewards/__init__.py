"""Rewards made of rewards, and rewards beyond the ready ones of core: gates, shaping, judges."""
