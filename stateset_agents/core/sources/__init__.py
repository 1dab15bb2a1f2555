"""Scenarios from files, datasets and chat logs."""
