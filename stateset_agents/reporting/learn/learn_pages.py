"""`write_learn_pages` under its first documented path; its home is `reporting.learn_pages`."""

from stateset_agents.reporting.learn_pages import write_learn_pages as write_learn_pages
