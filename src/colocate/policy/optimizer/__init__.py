"""The optimizer of a policy: its masters, state and hyperparameters."""
