"""Agents behind OpenAI's chat-completions interface."""
