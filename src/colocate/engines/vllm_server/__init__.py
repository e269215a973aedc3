"""Rollouts by a vLLM server: the trainer's side, and what stands around vLLM in the server."""
