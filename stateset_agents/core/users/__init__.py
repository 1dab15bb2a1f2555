"""Users that speak to the agent: scripted, by rules, or a model."""
