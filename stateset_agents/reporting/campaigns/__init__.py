"""The page of campaigns: regret against budget, and one causal model with what is known of it."""
