"""Tokenizers, incremental decoding of a turn, and text streams."""
