"""One rank of the announcement's script under a launcher: `seed_worker.py <directory>`.

The script's two names are found on the disk, and completions are short.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_grpo_colocate.py"


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    os.chdir(directory)
    rows = datasets.Dataset.from_dict({"prompt": [f"{n} plus {n} is" for n in range(6)]})
    datasets.load_dataset = lambda name, split: rows
    for auto in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        original = auto.from_pretrained
        auto.from_pretrained = lambda name, *_, load=original, **options: load("model", **options)
    options = ["use_cpu=True", 'save_strategy="no"', 'output_dir="run"']
    code = EXAMPLE.read_text().replace('    output_dir="Qwen2-0.5B-GRPO",\n', "")
    code = code.replace("max_completion_length=1024", "max_completion_length=8")
    code = code.replace("    report_to=None\n", "".join(f"    {option},\n" for option in options))
    namespace: dict = {}
    exec(compile(code, str(EXAMPLE), "exec"), namespace)
    trainer = namespace["trainer"]
    record = {
        "num_processes": trainer.accelerator.num_processes,
        "kind": trainer.accelerator.distributed_type.value,
        "steps": trainer.state.global_step,
        "bf16": trainer.args.bf16,
        "shard": trainer.args.shard,
        "offload_optimizer": trainer.args.offload_optimizer,
        "deepspeed": [name for name in sys.modules if name.split(".")[0] == "deepspeed"],
        "environment": [name for name in os.environ if "DEEPSPEED" in name or name.startswith("FSDP_")],
    }
    Path(f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
