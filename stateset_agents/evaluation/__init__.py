"""How good is an agent: rates with intervals, comparisons, audits."""
