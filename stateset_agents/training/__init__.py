"""From scored groups to better weights."""
