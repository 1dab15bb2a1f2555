"""The learning pages under the path that they were first documented with."""
