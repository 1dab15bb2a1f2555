"""A conversation as text: the chat template, the system message, replies read back, outside text escaped."""
