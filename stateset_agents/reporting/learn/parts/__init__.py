"""Trajectories in parts as pages: how parts form, what they do to advantages, what a study of them found."""
