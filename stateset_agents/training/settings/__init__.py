"""The sections of the configuration, and what is refused in them."""
