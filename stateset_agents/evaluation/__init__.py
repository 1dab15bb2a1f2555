"""Evaluation of agents: rates with intervals, comparisons, audits."""
