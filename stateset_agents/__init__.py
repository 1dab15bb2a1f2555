"""Train multi-turn conversational agents with group-relative policy optimisation."""
