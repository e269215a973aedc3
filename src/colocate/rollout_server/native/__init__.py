"""The native engine as a rollout server: it takes a trainer's weights, and draws completions for it."""
