"""What a journal tells: its history, the page of runs and deployments, metrics, how conversations ended."""
