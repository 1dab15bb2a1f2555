"""Parts of a batch of trajectories: who is in which, advantages by part, weights of parts. Pure numpy."""
