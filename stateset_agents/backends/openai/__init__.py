"""OpenAI's chat API, for a client and for servers."""
