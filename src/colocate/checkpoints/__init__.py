"""Sealed checkpoints, the state in them and their uploads; and the signals and locks of an orderly end."""
