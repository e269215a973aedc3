"""Rollouts by servers on other GPUs or machines: the trainer's side, and what both sides have in common."""
