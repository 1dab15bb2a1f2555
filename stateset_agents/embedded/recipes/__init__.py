"""How the small models that ship are made: what each is shown, for how long, and its card."""
