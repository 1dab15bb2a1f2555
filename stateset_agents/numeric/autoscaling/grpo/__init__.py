"""GRPO for infrastructure under its document's names, over `control`'s rollouts, update and trainer."""
