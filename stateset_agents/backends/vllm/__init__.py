"""Sampling by a vLLM server, with weights sent to it."""
