"""Rollouts by a vLLM server: the trainer's side, and the parts that run in the server around vLLM."""
