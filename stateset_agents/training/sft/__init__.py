"""Supervised fine-tuning on conversations: a warm start before reinforcement."""
