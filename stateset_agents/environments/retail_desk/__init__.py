"""A small order desk on SQLite, with tools, a rule-based caller and gated grading."""
