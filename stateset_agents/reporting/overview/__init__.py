"""Many runs on one page: a table, curves over one another, held-out results and how they differ."""
