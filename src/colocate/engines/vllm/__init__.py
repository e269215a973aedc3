"""vLLM as the rollout engine: in the trainer's process on the trainer's GPUs. Imports without vLLM."""
