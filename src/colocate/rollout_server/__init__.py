"""Rollouts by servers on other GPUs or machines: the trainer's side, the wire, both kinds of server."""
