"""Linear layers: who multiplies, from which copy of the weights, and how exactly."""
