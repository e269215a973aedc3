"""What it costs to hand memory and weights over between training and rollout, inside a real GRPO run.

    python -m benchmarks.memory.handover [--kv_gib 100] [--steps 6] [--shape qwen2.5-1.5b] [--hardware h200]

One run of `GRPOTrainer`, full fine-tuning in bf16 of random weights (speed does not depend on their values),
with the KV cache forced to `--kv_gib`. In every step the engine gives all of it back before training and
takes all of it again before the next rollout, both timed with the device synchronised before and after; so is
publishing. It is checked that no parameter moves, that each step changes what the engine reads and the run
what it generates. On a machine without git, COLOCATE_COMMIT states the commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.common.results import committed, write_result
from benchmarks.rollout.cases import SHAPES as MODELS
from colocate import GRPOConfig, GRPOTrainer
from colocate.engines.native.backends import default_sizes
from colocate.types import Prompt, SamplingParams
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fused_view

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {"qwen2.5-1.5b": MODELS["1.5b"], "tiny": MODELS["tiny"]}
WORK = dict(
    per_device_train_batch_size=32,
    num_generations=8,
    max_completion_length=64,
    max_num_seqs=32,
    # High enough for bf16 weights to change in one step.
    learning_rate=1e-4,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
PROMPT_TOKENS = 64


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocab_size)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_prompts(vocab_size: int) -> Dataset:
    words = torch.randint(2, vocab_size, (64, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in words.tolist()]})


def num_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group, so that there is a gradient."""
    return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def seconds(function: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


class Measured(GRPOTrainer):
    """Times the three hand-overs of each step."""

    def watch(self) -> None:
        """Before `train`: put the engine's sleep and wake-up under the clock."""
        self.repetitions: list[dict[str, Any]] = [{}]
        self.sent_bytes = 0
        engine: Any = self.engine
        wake_up, sleep, update_weights = engine.wake_up, engine.sleep, engine.update_weights

        def timed_wake_up() -> None:
            reserved = reserved_bytes()
            self.repetitions[-1]["wake_s"] = seconds(wake_up)
            self.repetitions[-1]["kv_cache_bytes"] = engine.kv_cache_bytes
            # Part of the time: unused blocks that PyTorch had to hand over first.
            self.repetitions[-1]["taken_from_pytorch_bytes"] = max(0, reserved - reserved_bytes())

        def timed_sleep(keep_bytes: int) -> None:
            # Everything, whatever the loop would let it keep.
            self.repetitions[-1]["sleep_s"] = seconds(lambda: sleep(keep_bytes=0))
            assert engine.kv_cache_bytes == 0, f"asleep the engine holds {engine.kv_cache_bytes} bytes"

        def counted_update(named_tensors: Any, version: int) -> None:
            tensors = list(named_tensors)
            self.sent_bytes += sum(tensor.nbytes for _, tensor in tensors)
            update_weights(tensors, version)

        engine.wake_up, engine.sleep, engine.update_weights = timed_wake_up, timed_sleep, counted_update
        self.addresses, self.weights_read = self.engine_addresses(), self.first_weights()

    def publish(self) -> None:
        allocated = allocated_bytes()
        repetition = self.repetitions[-1]
        repetition["weight_sync_s"] = seconds(super().publish)
        repetition["weight_sync_bytes"] = self.sent_bytes
        self.sent_bytes = 0
        assert allocated_bytes() == allocated, "publishing allocated memory"
        assert self.engine_addresses() == self.addresses, "a parameter has moved"
        self.repetitions.append({})
        before, self.weights_read = self.weights_read, self.first_weights()
        assert not torch.equal(before, self.weights_read), "the step did not change what the engine reads"

    def engine_addresses(self) -> list[int]:
        """Where the engine reads, which must be where the parameters are."""
        layout = layout_for(self.model)
        groups = [group for layer in layout.layers for group in layer.fused_groups()]
        fused = [fused_view([linear.weight for linear in group]).data_ptr() for group in groups]
        assert fused == [group[0].weight.data_ptr() for group in groups]
        return [*fused, *(parameter.data_ptr() for parameter in self.model.parameters())]

    def first_weights(self) -> torch.Tensor:
        """A copy of the first matrix that the engine reads."""
        group = next(iter(layout_for(self.model).layers[0].fused_groups()))
        return fused_view([linear.weight for linear in group]).clone()

    def probe(self) -> tuple[float, ...]:
        """Log-probs of a short completion, outside of the run and not under its clock."""
        engine: Any = self.engine
        type(engine).wake_up(engine)
        prompt = Prompt(tuple(range(2, 2 + PROMPT_TOKENS)), key=0)
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=8))
        type(engine).sleep(engine)
        return completion.logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv_gib", type=float, default=100)
    parser.add_argument("--steps", type=int, default=6, help="each is one repetition")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--hardware", default="h200", help="names the result")
    options = parser.parse_args()
    commit = committed()
    shape = SHAPES[options.shape]
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    on_gpu = torch.cuda.is_available()
    _, page_size = default_sizes("cuda" if on_gpu else "cpu")
    kv_bytes_per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_size
    kv_bytes_per_token *= 2 if on_gpu else 4
    num_pages = -(-int(options.kv_gib * GIB) // (kv_bytes_per_token * page_size))
    with torch.device("cuda" if on_gpu else "cpu"):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=1, pad_token_id=0))
    with tempfile.TemporaryDirectory() as directory:
        args = GRPOConfig(
            output_dir=directory, max_steps=options.steps, kv_cache_tokens=num_pages * page_size,
            use_cpu=not on_gpu, bf16=on_gpu, **WORK,
        )  # fmt: skip
        tokenizer = make_tokenizer(shape["vocab_size"])
        trainer = Measured(
            model, num_even, args, make_prompts(shape["vocab_size"]), processing_class=tokenizer
        )
        del model
        before = trainer.probe()
        trainer.watch()
        trainer.train()
        assert trainer.probe() != before, "training did not change what the engine generates"
    repetitions = [repetition for repetition in trainer.repetitions if repetition]
    assert len(repetitions) == options.steps >= 3
    if (smallest := min(r["kv_cache_bytes"] for r in repetitions)) < options.kv_gib * GIB:
        raise RuntimeError(
            f"--kv_gib {options.kv_gib:g} was asked for and memory allowed a cache of {smallest / GIB:.1f} "
            "GiB: ask for less, or run it on a GPU that nobody else uses."
        )
    medians = {
        name: statistics.median(r[name] for r in repetitions)
        for name in ("sleep_s", "wake_s", "weight_sync_s")
    }
    size = f"{options.kv_gib:g}gib"
    claims = {
        f"sleep_{size}_s": medians["sleep_s"],
        f"wake_{size}_s": medians["wake_s"],
        "weight_sync_s": medians["weight_sync_s"],
        "weight_sync_bytes": max(r["weight_sync_bytes"] for r in repetitions),
    }
    path = write_result(
        "handover", options.hardware, claims, repetitions, commit, shape=shape, work=WORK,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
    )  # fmt: skip
    print(json.dumps(claims, indent=1))
    print(path)


if __name__ == "__main__":
    main()
