"""One page of runs and deployments: live over HTTP, or as a file; and Prometheus metrics."""
