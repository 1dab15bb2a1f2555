"""Verbs that write pages: the report of runs, and pages to learn from."""
