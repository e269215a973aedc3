"""Load a model, start the native engine and complete one prompt; prints in JSON when each of these was done.

    python -m benchmarks.start.cold_start MODEL_DIR

`suite.py` runs it with empty caches of Triton, Inductor and the driver, and subtracts the time at which it
started the process.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from colocate.commands.import_ahead import importing_ahead

with importing_ahead():  # as `colocate train` does it, and `from colocate import GRPOTrainer`
    import torch
    from transformers import AutoModelForCausalLM

    from colocate.engines.native.engine import NativeEngine
    from colocate.types import Prompt, SamplingParams


def main() -> None:
    done = {"import": time.time()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="as the suite passes it on; nothing depends on it"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.bfloat16).to(device)
    done["load"] = time.time()
    engine = NativeEngine(model)
    engine.wake_up()
    (completion,) = engine.generate([Prompt(tuple(range(10, 266)), key=0)], SamplingParams(max_tokens=16))
    assert len(completion.token_ids) == 16, "no stop token was given"
    done["complete"] = time.time()
    print(json.dumps(done))


if __name__ == "__main__":
    main()
