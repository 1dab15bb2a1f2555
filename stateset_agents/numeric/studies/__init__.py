"""Several tasks and several seeds: PPO by parts, its critic, and the studies that compare them."""
