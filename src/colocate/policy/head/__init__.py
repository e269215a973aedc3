"""Log-probabilities from the last hidden states."""
