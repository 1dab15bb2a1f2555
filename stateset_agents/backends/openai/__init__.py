"""The OpenAI chat protocol, spoken as a client and read as a server."""
