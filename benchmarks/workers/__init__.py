"""One module for each thing that is timed; each runs in a process and a virtual environment of its own."""
