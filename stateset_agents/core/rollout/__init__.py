"""One conversation played: the episode, its forks, its state, its time limits."""
