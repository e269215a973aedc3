"""The decoder layers of a packed model, and the weights that they read."""
