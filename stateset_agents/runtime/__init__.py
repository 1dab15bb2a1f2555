"""What everything runs on: tasks and time limits, retries, threads, devices, logs, the HTTP guard."""
