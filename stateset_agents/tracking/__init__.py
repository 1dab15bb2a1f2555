"""A run is a folder anyone can tail; this package writes and reads it."""
