"""Models and tokenizers that transformers loads, from a folder or the hub."""
