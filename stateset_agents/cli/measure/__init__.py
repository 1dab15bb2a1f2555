"""`stateset-agents evaluate`, `compare`, `audit` and `rescore`."""
