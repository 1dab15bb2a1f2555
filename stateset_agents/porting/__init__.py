"""Scripts of other libraries, brought as they are: TRL, TextArena and Inspect (docs/bring-your-script.md).

A companion: nothing below imports it.
"""
