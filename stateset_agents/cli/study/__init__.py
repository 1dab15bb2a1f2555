"""Many trainings compared: the verb `study`."""
