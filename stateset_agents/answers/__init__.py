"""Answers to maths problems, compared by value."""
