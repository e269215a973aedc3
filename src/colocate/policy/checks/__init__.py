"""Checks before a run: the trained model computes the same as transformers."""
