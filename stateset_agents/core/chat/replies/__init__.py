"""What the agent sampled, read back: thoughts, words and tool calls."""
