"""Rows as people publish them: files of rows, the shapes of rows, messages and schemas in them."""
