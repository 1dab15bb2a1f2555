"""Who speaks to the agent: scripted, or played by a model."""
