"""Views of a journal: its history, the page of runs and deployments, metrics, how conversations ended."""
