"""The format of a push of weights, and the half of it that every server has."""
