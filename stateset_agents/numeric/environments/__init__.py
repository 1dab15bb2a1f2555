"""Environments of numbers, many rows at once: what one must have, the classic ones, those of Gymnasium."""
