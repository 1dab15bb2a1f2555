"""Safe deployment: shadow, gradual, full, rolled back, by evidence that may be looked at all the time."""
