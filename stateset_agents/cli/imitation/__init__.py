"""Verbs of imitation: `demonstrate` writes conversations, `sft` learns from them, `distill` does both."""
