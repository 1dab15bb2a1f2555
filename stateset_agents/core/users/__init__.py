"""Who speaks to the agent: a scripted user, or a model."""
