"""The small default model: its recipe, its weights, its card."""
