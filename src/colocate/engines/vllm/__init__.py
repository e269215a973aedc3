"""vLLM as the rollout engine, in the trainer's process on the trainer's GPUs.

These modules can be imported without vLLM. `vllm_server` uses those about versions, arguments, requests,
log-probs and internals.
"""
