"""One rank of the runs in test_gpu_data_parallel.py: `data_parallel_worker.py <directory> <case> ...`.

Trains each case in `<directory>/<case>` and leaves there, by rank, what it trained and where the engine read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from small_runs import make_model, make_trainer

ADAM_EPSILON = 1e-3
"""About the root mean square of a weight's gradient, which is clipped from a norm of 10 to 1. With Adam's own
1e-8 a weight with next to no gradient moves by the whole learning rate, whichever way its rounding points."""

CASES: dict[str, dict[str, Any]] = {
    "float32": {"bf16": False, "adam_epsilon": ADAM_EPSILON},
    "bfloat16": {"bf16": True},
    "lora": {"bf16": True, "lora": True},
}


def build(directory: Path, case: str, num_ranks: int) -> Any:
    """The trainer of one of `num_ranks` ranks; global batches of 4 groups of 4."""
    options = dict(CASES[case])
    if options.pop("lora", False):
        options["peft_config"] = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model = make_model(hidden_size=256)
    return make_trainer(
        directory / case, model=model.bfloat16() if options["bf16"] else model, use_cpu=False,
        per_device_train_batch_size=8 // num_ranks, max_steps=5, learning_rate=3e-3, engine="native",
        **options,
    )  # fmt: skip


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}


def main() -> None:
    directory, cases = Path(sys.argv[1]), sys.argv[2:]
    for case in cases:
        trainer = build(directory, case, 2)
        before = trained(trainer)
        addresses = [parameter.data_ptr() for parameter in trainer.model.parameters()]
        trainer.train()
        assert addresses == [parameter.data_ptr() for parameter in trainer.model.parameters()], (
            "weights moved"
        )
        rank = trainer.accelerator.process_index
        torch.save({"before": before, "after": trained(trainer)}, directory / case / f"rank{rank}.pt")
        trainer.engine.close()


if __name__ == "__main__":
    main()
