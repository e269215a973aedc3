"""How the ranks of a run share weights, masters and work."""
