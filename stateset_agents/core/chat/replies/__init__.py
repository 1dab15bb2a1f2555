"""Readers of sampled replies: thoughts, words and tool calls."""
