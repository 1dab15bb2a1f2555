"""A vLLM server as backend, with weight sync."""
