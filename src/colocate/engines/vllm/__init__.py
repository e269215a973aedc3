"""vLLM as the rollout engine: in the trainer's process on the trainer's GPUs. Imports without vLLM.

`vllm_server` builds on what this room knows of vLLM: versions, arguments, requests, log-probs, internals.
"""
