"""Reads what a text says as true: statements, values with a type, mentions, false claims."""
