"""Tokens in, tokens and log-probs out."""
