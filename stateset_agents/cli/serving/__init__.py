"""`stateset-agents serve`, and `deploy`, `status`, `promote` and `rollback` of what it serves."""
