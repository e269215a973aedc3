"""The ways to draw completions for a rollout: single turns, episodes, agents, carry-over."""
