"""Verbs that write or show pages: of runs, deployments, studies and papers."""
