"""Full calls: a caller who must be verified and asked before every write, against the whole policy."""
