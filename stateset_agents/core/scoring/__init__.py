"""Computes rewards: their base, plain functions as rewards, and the transcript that a reward reads."""
