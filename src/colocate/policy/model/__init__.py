"""A model made ready for training: loading, precision, adapters and transformers' own forward pass."""
