"""Advantage estimators, a file each, and the registry that the settings read; no torch."""
