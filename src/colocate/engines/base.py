"""The five methods by which the loop drives any rollout engine.

`tests/unit/test_engine_contract.py` holds every engine to what is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from colocate.memory.timeline import PooledBytes
from colocate.types import Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """A source of completions that takes turns with the trainer on the same device.

    An engine starts asleep. Only the training loop wakes it and puts it to sleep.
    """

    shares_weights: bool
    """True: the engine reads the trainer's own parameters, and publishing moves no byte."""
    policy_version: int
    """Version of the weights the next `generate` uses; stamped on every completion."""
    pooled_bytes: PooledBytes
    """The engine's share in what PyTorch's allocator counts, if it maps that memory itself; never changes."""
    num_restarts: int
    """How often what generates was lost and is back; only one that outlives the run can be."""

    @property
    def kv_cache_bytes(self) -> int:
        """Memory that the KV cache holds now; asleep what it was allowed to keep. 0 if it cannot tell."""
        ...

    @property
    def rollout_weight_bytes(self) -> int:
        """Memory that the engine holds now for weights of its own, beside the trainer's; likewise."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt; `sum(len(p.samples) for p in prompts)` completions, prompt by prompt.

        Raises:
            ValueError: a prompt is empty, its `max_tokens` do not go with its `samples` or with the rollout's
                `max_tokens`, or prompt + completion could exceed the engine's context.
            RuntimeError: the engine is asleep.
        """
        ...

    def sleep(self, keep_bytes: int = 0) -> None:
        """Give the KV cache's memory, and that of weights, back to the trainer. Sleeping twice is harmless.

        Up to `keep_bytes` of it may stay with the engine, to be taken again the faster; what was stored in
        it is lost all the same. Asked again while asleep, the engine gives back what is more than that.
        """
        ...

    def wake_up(self) -> None:
        """Take the KV cache's memory again; its contents are undefined. Waking twice is harmless."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Publish a policy version and forget everything computed with older ones (prefix pages).

        With `shares_weights` the tensors are already in place and `named_tensors` is empty.
        """
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...
