"""Group-relative policy optimisation on problems with a right answer, as a project might lay it out.

Everything here is a few lines over `stateset_agents`: what to train on (`data`), what is paid (`rewards`),
the training (`trainer`), and what the replies look like (`utils`).
"""
