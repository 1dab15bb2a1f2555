"""Sampling in this process: requests, the batch of them, the scheduler, shared prefixes."""
