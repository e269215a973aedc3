"""How completions are drawn for a rollout: single turns, episodes, agents, carry-over."""
