"""The native engine as a rollout server: it takes a trainer's weights, and draws what the trainer wants."""
