"""One rank of the runs in test_data_parallel.py: `grpo_worker.py <directory> <case> ...`.

Trains each case in `<directory>/<case>` and leaves its parameters there, or what ended it.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from small_runs import ends_with_the_first_step, make_model, make_trainer, share_of_early_letters

from colocate.checkpoints import snapshot
from colocate.checkpoints.sealed import CheckpointError
from colocate.experience import ranks
from colocate.experience.judge import RankShare
from colocate.parallel.mesh import Mesh
from colocate.policy.policy import Policy
from colocate.weights.weight_parts import whole_tensor

# The global batch: `dapo` has one group of four per rollout, split over two ranks; `grpo` three, of which the
# second is split.
CASES: dict[str, dict[str, Any]] = {
    "dapo": dict(loss_type="dapo", num_iterations=2, gradient_accumulation_steps=1, beta=0.1),
    "grpo": dict(loss_type="grpo", gradient_accumulation_steps=3),
}
# Adam's first step divides a gradient by its own size: with the usual 1e-8 a value whose gradient is all but
# nothing goes where rounding says, and processes round in other orders (measured: 5e-6 apart, now 5e-7).
EPSILON = 1e-4


def often_dull(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward of which every third group or so has but one value."""
    return [float(ids[0] % 4 == 0) for ids in completion_ids]


CASES["refill"] = CASES["grpo"] | {"reward_funcs": often_dull, "max_refill_rounds": 3}
# All rows are there at once and some completion of each rank has all its tokens, so both ranks are as far.
CASES["carry_over"] = CASES["grpo"] | {"engine": "native", "max_policy_lag": 1}
# Split weights, of which each rank gathers the rest to decode alone, at its own pace.
CASES["gathered"] = CASES["carry_over"] | {"shard": 2, "decode_shard": 1}
CASES["split"] = CASES["dapo"] | {"save_strategy": "steps", "save_steps": 3, "shard": 2}
SPLIT_CASES = ("gathered", "split")
CASES["accelerate"] = CASES["grpo"]


def noting_prompts(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that leaves the prompts of each rollout in `NOTED`."""
    NOTED.append(list(prompts))
    return share_of_early_letters(completion_ids)


@contextmanager
def rank_0_waits_for_rank_1() -> Iterator[None]:
    """Let rank 1 score half a second longer than rank 0, counted from when rank 0 stands and waits."""
    store, rank = torch.distributed.distributed_c10d._get_default_store(), int(os.environ["RANK"])
    gather, numbers = ranks.of_all_ranks, itertools.count()

    def of_all_ranks(told: list[Any]) -> list[Any]:
        if isinstance(told[0], RankShare):
            moment = f"rollout {next(numbers)} is scored by rank 0"
            if rank == 0:
                store.set(moment, "")
            else:
                store.wait([moment])
                time.sleep(0.5)
        return gather(told)

    with mock.patch.object(ranks, "of_all_ranks", of_all_ranks):
        yield


CASES["waiting"] = CASES["grpo"] | {"max_steps": 2}
NOTED: list[list[str]] = []
# Three of ten rows in each step: the second step of the three that follow begins an epoch.
CASES["rows"] = CASES["grpo"] | {"save_strategy": "steps", "save_steps": 2, "reward_funcs": noting_prompts}
CASES["resumed"] = CASES["dapo"] | {"save_strategy": "steps", "save_steps": 3}


def even_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even tokens, also of those that the tokenizer does not know."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


IN_8_BITS = {"optim": "adamw_bnb_8bit", "offload_optimizer": True}
WIDE_CASES: dict[str, dict[str, Any]] = {
    "offloaded": {"shard": 2, "offload_optimizer": True},
    "8bit rows": {"shard": 1, **IN_8_BITS},
    "8bit parts": {"shard": 2, **IN_8_BITS},
}
"""Runs of a model that is wide enough for moments in 8 bits. Half of its vocabulary is a block of the
sampler, so that draws do not depend on the parts."""


def build_wide(directory: Path, case: str, num_ranks: int) -> Any:
    options = WIDE_CASES[case] | {
        "reward_funcs": even_tokens,
        "max_steps": 3,
        "beta": 0.1,
        "engine": "native",
        "save_strategy": "no",
    }
    if num_ranks == 1:
        options["shard"] = "auto"
    # Half of each matrix has 4,096 values or more, below which bitsandbytes keeps 32 bits.
    sizes = dict(hidden_size=128, intermediate_size=128, num_key_value_heads=4, vocab_size=512)
    model = make_model("llama", **sizes)
    return build(directory, case, num_ranks, model=model, gradient_accumulation_steps=1, **options)


def moments_of(trainer: Any) -> dict[str, list[torch.Tensor]]:
    """By name what the rank has of both moments, of those that have 8 bits."""
    from bitsandbytes.functional import dequantize_blockwise

    optimizer, found = trainer.policy.optimizer, {}
    for name, leaf in optimizer.named_leaves.items():
        state = optimizer.optimizer.state[leaf]
        if state["state1"].dtype == torch.uint8:
            found[name] = []
            for n in (1, 2):
                scales = dict(absmax=state[f"absmax{n}"], code=state[f"qmap{n}"], blocksize=256)
                found[name].append(dequantize_blockwise(state[f"state{n}"], **scales))
    return found


def build(directory: Path, case: str, num_ranks: int, **options: Any) -> Any:
    """The trainer of one of `num_ranks` ranks."""
    defaults = {"max_steps": 5, "learning_rate": 3e-3, "adam_epsilon": EPSILON}
    options = defaults | CASES.get(case, CASES["resumed"]) | options
    if num_ranks == 1 and case == "gathered":
        options |= {"shard": "auto", "decode_shard": None}
    return make_trainer(directory / case, per_device_train_batch_size=4 // num_ranks, **options)


class StopAfterThreeSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def main() -> None:
    directory, cases = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for case in cases:
        if case in ENDINGS:
            trainer = build(directory, case, int(os.environ["WORLD_SIZE"]), **OPTIONS_OF.get(case, {}))
            try:
                ENDINGS[case](trainer, directory)
            except (CheckpointError, SystemExit) as end:
                file = directory / f"{case}{trainer.accelerator.process_index}.json"
                file.write_text(json.dumps([type(end).__name__, str(end), trainer.state.global_step]))
            continue
        resume = case == "resumed"
        if resume:
            build(directory, case, 2, callbacks=[StopAfterThreeSteps]).train()
        trainer = build(directory, case, 2)
        assert trainer.accelerator.num_processes == 2
        with rank_0_waits_for_rank_1() if case == "waiting" else nullcontext():
            trainer.train(resume_from_checkpoint=resume)
        if case in SPLIT_CASES:
            trainer.save_model()
            continue
        rank = trainer.accelerator.process_index
        torch.save(dict(trainer.model.named_parameters()), directory / case / f"params{rank}.pt")


def load_checkpoint_of_one(trainer: Any, directory: Path) -> None:
    trainer.load_checkpoint(directory / "one" / "resumed" / "checkpoint-3")
    save_state(trainer, directory / "from_one")


def load_checkpoint_of_parts(trainer: Any, directory: Path) -> None:
    """Two ranks with whole weights go on from two with a part each."""
    trainer.load_checkpoint(directory / "split" / "checkpoint-3")
    save_state(trainer, directory / "from_parts")


def load_checkpoint_of_parts_and_save(trainer: Any, directory: Path) -> None:
    """Four ranks, two with each half of the weights, go on from two with a half each, and save at once."""
    trainer.load_checkpoint(directory / "split" / "checkpoint-3")
    trainer.save_checkpoint()


def go_on_with_parts(trainer: Any, directory: Path) -> None:
    """What "split" trains in one go, interrupted after its checkpoint, in the middle of a rollout."""
    trainer.journal.handler.add_callback(StopAfterThreeSteps())
    trainer.train()
    build(directory, "split_again", 2, **CASES["split"]).train(resume_from_checkpoint=True)


def end_with_the_best(trainer: Any, directory: Path) -> None:
    """Runs of bf16 weights, split and whole, that end with the weights of their first step."""
    for parts in (1, 2):
        model = make_model("llama").to(torch.bfloat16)
        best = build(directory, f"best{parts}", 2, model=model, shard=parts, **ends_with_the_first_step())
        best.train()
        best.save_model()
        # Groups stay until the process ends, so each trainer's own would add up.
        assert best.run.mesh is Mesh.of("cpu", parts)


def go_on_from_one(trainer: Any, directory: Path) -> None:
    """Five steps of two ranks, and the last three of five of which one process took the first two."""
    for case, checkpoint in (("rows", None), ("rows_of_one", directory / "one" / "rows" / "checkpoint-2")):
        NOTED.clear()
        options = CASES["rows"] | {"num_iterations": 1, "beta": 0.0}
        two = build(directory, case, 2, **options)
        two.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        (directory / f"{case}{two.accelerator.process_index}.json").write_text(json.dumps(NOTED))


def go_on_from_parts(trainer: Any, directory: Path) -> None:
    """Two ranks with whole weights go on from two with a part each, in the middle of a rollout."""
    trainer.train(resume_from_checkpoint=str(directory / "split" / "checkpoint-3"))


def train_wide(trainer: Any, directory: Path) -> None:
    """The cases of `WIDE_CASES`; the first one is evaluated, as `evaluate` does."""
    for case in WIDE_CASES:
        wide = build_wide(directory, case, 2)
        wide.train()
        wide.save_model()
        rank = wide.accelerator.process_index
        if case == "offloaded":
            results = [wide.evaluate(wide.train_dataset.select(range(n))) for n in (3, 1)]
            (directory / f"{case}{rank}.json").write_text(json.dumps(results))
        if case == "8bit rows":
            torch.save(moments_of(wide), directory / f"{case}{rank}.pt")


def split_4_bits(trainer: Any, directory: Path) -> None:
    """What is said of 4-bit weights that `shard` asks to split."""
    from peft import LoraConfig
    from quantized_models import make_4bit_model

    told = ""
    options = {"peft_config": LoraConfig(target_modules=["q_proj"]), "engine": "native"}
    try:
        build(directory, "4 bits", 2, model=make_4bit_model("llama", vocab_size=32), shard=2, **options)
    except ValueError as error:
        told = str(error)
    kept = build(directory, "4 bits", 2, model=make_4bit_model("llama", vocab_size=32), **options)
    said = [told, kept.run.mesh.num_weight_parts]
    (directory / f"4bits{trainer.accelerator.process_index}.json").write_text(json.dumps(said))


def load_checkpoint_of_four(trainer: Any, directory: Path) -> None:
    trainer.load_checkpoint(directory / "of_four" / "checkpoint-3")
    save_state(trainer, directory / "from_four")


def load_checkpoint_of_another_temperature(trainer: Any, directory: Path) -> None:
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    changed = build(directory, "changed", 2, temperature=0.5)
    logging.getLogger("colocate").addHandler(handler)
    changed.load_checkpoint(directory / "resumed" / "checkpoint-3")
    logging.getLogger("colocate").removeHandler(handler)
    (directory / f"told{trainer.accelerator.process_index}.json").write_text(json.dumps(told))


def save_state(trainer: Any, path: Path) -> None:
    tensors = {name: whole_tensor(x) for name, x in trainer.policy.optimizer.tensors().items()}
    torch.save(tensors, f"{path}{trainer.accelerator.process_index}.pt")


def fill_disk_of_rank_1(trainer: Any, directory: Path) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank1.pt")

    original = snapshot.save_rank_state
    snapshot.save_rank_state = write if trainer.accelerator.process_index == 1 else original
    try:
        trainer.train()
    finally:
        snapshot.save_rank_state = original


def terminate_rank_1(trainer: Any, directory: Path) -> None:
    class Terminate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer.journal.handler.add_callback(Terminate())
    trainer.train()


def evaluate(trainer: Any, directory: Path) -> None:
    """Three prompts, of which rank 0 has two; and a single one, which leaves rank 1 without any."""
    results = [trainer.evaluate(trainer.train_dataset.select(range(n))) for n in (3, 1)]
    if trainer.accelerator.is_main_process:
        (directory / "evaluated.json").write_text(json.dumps(results))


class Waits(TorchDispatchMode):
    """Counts, by phase of a run's second step, collectives and scalars that the host waits for."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.counts: dict[str, dict[str, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = "scalars" if func is torch.ops.aten._local_scalar_dense.default else func.name()
        if self._trainer.state.global_step == 1 and kind.startswith(("c10d", "scalars")):
            (phase,) = self._trainer.run.timeline._open[-1:] or ["between phases"]
            counts = self.counts.setdefault(phase, {})
            counts[kind] = counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def count_waits(trainer: Any, directory: Path) -> None:
    """A run with micro-batches of several sequences, and one with a micro-batch for each."""
    options = dict(gradient_accumulation_steps=3, num_iterations=1, max_steps=3, save_strategy="no")
    accumulate = Policy._accumulate
    results = []
    for tokens in (None, 1):
        trainer = build(directory / str(tokens), "counted", 2, **options)
        policy = trainer.policy
        policy.planner = None
        policy._step_plan.plan = replace(policy.plan, tokens_per_microbatch=tokens)
        counted = mock.patch.object(Policy, "_accumulate", autospec=True, side_effect=accumulate)
        with Waits(trainer) as waits, counted as microbatches:
            trainer.train()
        results.append([microbatches.call_count, waits.counts])
    if trainer.accelerator.is_main_process:
        (directory / "counted.json").write_text(json.dumps(results))


OPTIONS_OF = {
    **{case: CASES["split"] for case in ("of_four", "from_four", "split_again")},
    "rows_of_parts": CASES["split"] | {"shard": 1},
}
"""The options of cases among `ENDINGS` that are not those of "resumed"."""

ENDINGS = {
    "4_bits": split_4_bits,
    "best": end_with_the_best,
    "changed": load_checkpoint_of_another_temperature,
    "counted": count_waits,
    "evaluated": evaluate,
    "from_four": load_checkpoint_of_four,
    "from_one": load_checkpoint_of_one,
    "from_parts": load_checkpoint_of_parts,
    "full_disk": fill_disk_of_rank_1,
    "of_four": load_checkpoint_of_parts_and_save,
    "rows_of_one": go_on_from_one,
    "rows_of_parts": go_on_from_parts,
    "split_again": go_on_with_parts,
    "terminated": terminate_rank_1,
    "wide": train_wide,
}


if __name__ == "__main__":
    main()
