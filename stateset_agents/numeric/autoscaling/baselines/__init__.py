"""What scales a cluster without learning: Kubernetes' autoscaler, constants, a plan, and one that knows."""
