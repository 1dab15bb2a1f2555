"""How much faster than what one would use instead: `make bench`, see docs/performance.md."""
