"""Load a model, start the native engine and complete one prompt; prints the time of day when that is done.

    python -m benchmarks.rollout.cold_start MODEL_DIR

`suite.py` runs it with empty caches of Triton, Inductor and the driver, and subtracts the time at
which it started the process.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from colocate.engines.native.engine import NativeEngine
from colocate.types import Prompt, SamplingParams

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).to(device)
engine = NativeEngine(model)
engine.wake_up()
(completion,) = engine.generate([Prompt(tuple(range(10, 266)), key=0)], SamplingParams(max_tokens=16))
assert len(completion.token_ids) == 16, "no stop token was given"
print(time.time())
