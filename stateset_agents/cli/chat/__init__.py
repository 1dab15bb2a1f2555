"""`stateset-agents chat`."""
