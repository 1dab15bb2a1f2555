"""`stateset-agents doctor` and `diagnose`, and the trial training they run."""
