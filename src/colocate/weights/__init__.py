"""Weights as layouts, parts, adapters and files."""
