"""A run of two steps with empty caches: prints what was compiled, where, and the first step's metrics.

python compile_ahead_worker.py CACHE OUTPUT_DIR [--as-needed]
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # tiny

import torch
import triton

from colocate.kernels import compile_ahead
from tiny import make_model, make_trainer, sums

AHEAD, AS_NEEDED = "ahead", "as needed"


def main(cache: str, output_dir: str, *options: str) -> None:
    compiled: dict[str, list[str]] = {AHEAD: [], AS_NEEDED: []}
    captured: list[int] = []

    def note(*, src, **_):
        if src.fn.__module__.startswith("torch."):  # from 2.15 on PyTorch has some of its own
            return
        is_ahead = threading.current_thread().name.startswith("compile_ahead")
        compiled[AHEAD if is_ahead else AS_NEEDED].append(src.name)

    triton.knobs.cache.dir = cache
    triton.knobs.compilation.listener = note
    if "--as-needed" in options:
        compile_ahead.MAX_THREADS = 0
    # Groups of 16 share prompts of 300 tokens, too few for steps of 64 rows to read them once for all, and
    # nothing may be compiled for that.
    model = make_model("qwen2", hidden_size=256, intermediate_size=512)
    data = sums().map(lambda row: {"prompt": row["prompt"] * 50})
    trainer = make_trainer(
        output_dir, model=model, train_dataset=data, use_cpu=False, bf16=True, num_generations=16,
        per_device_train_batch_size=64, max_completion_length=24, gradient_checkpointing=False, seed=1,
    )  # fmt: skip
    capture = torch.cuda.CUDAGraph.capture_begin

    def counted(graph, *args, **kwargs):
        captured.append(1)
        return capture(graph, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = counted
    trainer.train()
    decoder = trainer.engine._decoder
    lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    result = {
        "compiled": compiled,
        "captured": len(captured),
        "kept": decoder.num_graphs,
        "first": {name: json.loads(lines[0])[name] for name in ("reward", "entropy", "loss", "grad_norm")},
    }
    trainer.engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
