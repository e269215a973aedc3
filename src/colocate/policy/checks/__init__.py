"""Checks before a run: what is trained computes what transformers computes."""
