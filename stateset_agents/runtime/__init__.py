"""The ground that everything runs on: tasks and time limits, retries, threads, devices, the HTTP guard."""
