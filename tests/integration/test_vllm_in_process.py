"""Real vLLM in the trainer's process: sharing, tensor parallelism, whole runs, and a clean end.

In processes of their own, for what vLLM sets for its process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from peft import LoraConfig

from listening import kinds_of, said_of
from processes import TORCHRUN, run_python
from tiny import make_model, make_trainer
from vllm_unpacked import unpacked

pytestmark = pytest.mark.vllm


def run(directory: Path, *cases: str, num_processes: int = 1) -> list[dict]:
    """What each process found, by case; they must also end without an error, though the last engine was never
    closed."""
    worker = Path(__file__).with_name("vllm_worker.py")
    launcher = TORCHRUN if num_processes == 2 else ()
    run_python(*launcher, worker, directory, *cases, timeout_s=400, VLLM_LOGGING_LEVEL="ERROR")
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict]:
    """What one process found in all cases: to import vLLM takes longer than any of them."""
    (found,) = run(tmp_path_factory.mktemp("alone"), "in_place", "shared")
    return found


def test_shared_weights_need_no_publication(alone):
    found = {name: value for name, value in alone["shared"].items() if name not in ("found", "listens")}
    assert found == {"equal": [True] * 4, "shares": True, "published_bytes": 0, "outside": 0}


def test_it_listens_where_the_page_on_security_says(alone):
    assert kinds_of(map(tuple, alone["shared"]["listens"])) <= said_of("vLLM's workers")


def test_a_later_turn_tells_what_it_has_found_in_the_cache(alone):
    found = alone["shared"]["found"]
    assert found["told"] == found["whole"] and found["told"][1] > 0 == found["told"][0]


def test_copies_are_renewed_in_place(alone):
    found = alone["in_place"]
    assert found["equal"] == [True] * 3 and found["lora_equal"] == [True] * 2
    assert found["is_plain"] and found["lora_plain"]
    assert not found["shares"]
    assert "(128, 32) in vLLM and (97, 32) in the trainer" in found["reason"]
    assert "the policy has adapters, which are merged" in found["lora_reason"]
    assert found["published_bytes"] == found["model_bytes"]


@pytest.mark.own_vllm
def test_two_processes_run_one_engine(tmp_path):
    first, second = (found["tensor_parallel"] for found in run(tmp_path, "tensor_parallel", num_processes=2))
    assert first["equal"] == second["equal"] == [True] * 3
    assert first["group"] == second["group"] == 0
    assert first["num_alone"] == first["num_asked"] == 6
    assert second["num_alone"] == 0
    assert first["published_bytes"] > 0
    assert first["ranks"] == second["ranks"] == [0, 1]


@pytest.mark.parametrize("with_adapter", [False, True], ids=["full", "lora"])
def test_a_run_with_vllm_trains_on_policy(tmp_path, with_adapter):
    # A size of heads for which vLLM has attention on a CPU, and whole blocks of vocabulary.
    model = make_model(head_dim=32, vocab_size=64)
    config = LoraConfig(r=4, target_modules="all-linear") if with_adapter else None
    with unpacked():
        trainer = make_trainer(
            tmp_path,
            model=model,
            peft_config=config,
            engine="vllm",
            vllm_engine_kwargs={"enforce_eager": True},
            max_steps=3,
            learning_rate=0.1 if with_adapter else 0.01,
            beta=0.01,  # with adapters the reference is the base alone
        )
    trainer.train()
    assert trainer.engine.shares_weights != with_adapter
    trainer.engine.close()
    logs = [entry for entry in trainer.state.log_history if "sampling/sampling_logp_difference/max" in entry]
    assert len(logs) == 3
    # Weights one step old would be off by more than this: the learning rate is large.
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    assert all(math.isfinite(entry["loss"]) for entry in logs)
