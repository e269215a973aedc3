"""Rounding to 8 bits."""
