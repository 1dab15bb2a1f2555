"""The page of campaigns of experiments: regret against budget, and one causal model with what is known of it."""
