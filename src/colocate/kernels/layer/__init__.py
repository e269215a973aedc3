"""Norms and rotary embeddings, for rollouts and training."""
