"""Attention over packed sequences, forward and backward."""
