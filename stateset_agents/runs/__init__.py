"""The life of any training: lifecycle, callbacks, trackers, checkpoint files, the optimiser."""
