"""Recipes of the small models that ship: what each is shown, for how long, and its card."""
