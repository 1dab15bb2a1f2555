"""GRPO over experiments in functions: parameters, optimiser state and samples go in, new ones come out."""
