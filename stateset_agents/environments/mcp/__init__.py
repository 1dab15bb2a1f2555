"""Tools of a Model Context Protocol server as an environment."""
