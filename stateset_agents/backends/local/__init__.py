"""Generation in this process: requests, the scheduler, the batcher, prefix sharing."""
