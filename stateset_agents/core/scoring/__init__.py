"""How rewards are computed: the base, terms, factories, answers, the transcript a reward reads."""
