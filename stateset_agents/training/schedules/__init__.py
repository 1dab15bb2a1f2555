"""What changes from step to step: the order of scenarios, the temperature."""
