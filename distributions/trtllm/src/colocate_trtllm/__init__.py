"""TensorRT-LLM on the ranks' GPUs, taking turns with the trainer.

    rank ─ engine.py ── Ray ──▶ server.py ── AsyncLLM ──▶ weight_worker.py in each GPU worker
             └ shared_memory.py: handles of a buffer on each rank's GPU ──▶ ┘

Only `server.py`, `sampling.py`, `memory_tags.py` and `weight_worker.py` run where TensorRT-LLM is installed.
They import nothing but the standard library, torch and that package, which pins older releases of others than
a run needs.
"""
