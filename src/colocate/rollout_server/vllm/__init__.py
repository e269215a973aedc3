"""vLLM as a rollout server: how it is started, and the parts that run within it."""
