"""What both sides of a push of weights have in common."""
