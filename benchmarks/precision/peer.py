"""A rollout of one case by vLLM with weights, and keys and values, in 8 bits.

    python -m benchmarks.precision.peer 7b_256seq --out record.json

vLLM quantises the weights as it loads them; here it draws them itself, since speed does not depend on their
values. Its settings are those of the rollout benchmark. Of keys and values in 8 and in 16 bits the faster
counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.random_model import config_of
from benchmarks.common.results import origin
from benchmarks.precision.cases import KV_CACHES, SPEED_CASES, tiny
from benchmarks.rollout.run import VARIANTS, Vllm, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=SPEED_CASES)
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="fp8")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="the case made tiny, to try the script")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    case = tiny(SPEED_CASES[options.case]) if options.tiny else SPEED_CASES[options.case]
    record: dict[str, Any] = {"kind": "peer", **origin(), "case": options.case, "kv_cache": options.kv_cache}
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(case.model)
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(directory)
        engine = Vllm(
            Path(directory),
            [case],
            VARIANTS[0],
            quantization="fp8",
            kv_cache_dtype=KV_CACHES[options.kv_cache],
            load_format="dummy",
            skip_tokenizer_init=True,
        )
        record |= vars(case) | measure(engine, case, options.repetitions)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
