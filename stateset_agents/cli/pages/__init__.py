"""Verbs that show runs and deployments."""
