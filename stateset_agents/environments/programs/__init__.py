"""Agents that are programs of their own: the endpoint they call and the process they run in."""
