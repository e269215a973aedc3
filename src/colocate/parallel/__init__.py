"""The ranks of a run: how they share weights, masters and work."""
