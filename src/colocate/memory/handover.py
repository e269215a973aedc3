"""The memory (KV cache, weights of its own) that the engine may keep while the policy trains.

Mapping and unmapping cost time by the gigabyte, so the engine gives back what training needs and no more.
Training's need is estimated from its measured peak:

    keep = device - (in use at the peak of training, without the engine) - allowances
"""

from __future__ import annotations

from typing import Any, Protocol

MARGIN = 0.1
"""Share of the device left free at training's peak: the peak counts tensors, and an allocator has holes
between them. Mapping a tenth of a GPU anew takes hundredths of a second; running out ends the run."""

GROWTH = 0.5
"""Allowance for growth, as a share of the memory that a phase was seen to add: activations grow with the
tokens of a micro-batch, and completions may get longer than any before."""


class Sleeper(Protocol):
    """A rollout engine as the hand-over sees it; `RolloutEngine` documents these names."""

    @property
    def kv_cache_bytes(self) -> int: ...

    @property
    def rollout_weight_bytes(self) -> int: ...

    def sleep(self, keep_bytes: int = 0) -> None: ...


class Handover:
    """Learns from each step's record what memory the phases between rollouts need besides the engine's."""

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.keep_bytes = 0
        """Bytes that the engine may keep in its next sleep; 0 until a whole step has been seen, and on a
        CPU."""
        self._needed_bytes = 0
        self._may_keep = True

    def take_back(self) -> str | None:
        """Take from the sleeping engine all that it was allowed to keep, and let it keep nothing from now on.

        It is called when training has run out of memory, which shows that the estimate was wrong.

        Returns:
            A sentence that says what was given back; None if the engine kept nothing.
        """
        kept_bytes = self._engine.kv_cache_bytes + self._engine.rollout_weight_bytes
        if not kept_bytes:
            return None
        self.keep_bytes = 0
        self._may_keep = False
        self._engine.sleep()
        return f"The engine gave back {kept_bytes / 2**30:.2f} GiB"

    def learn(self, memory: dict[str, Any]) -> None:
        """Learn from the entry "memory" of a step's `Timeline.drain`."""
        # On a CPU free memory is not the run's alone: other processes take it, too.
        if memory["device"] == "cpu":
            return
        for span in memory["spans"]:
            if span["phase"] != "rollout":
                self._needed_bytes = max(self._needed_bytes, _needed_bytes(span))
        if self._needed_bytes and self._may_keep:
            available = (1 - MARGIN) * memory["limit_bytes"]
            self.keep_bytes = max(0, int(available) - self._needed_bytes)


def _needed_bytes(span: dict[str, Any]) -> int:
    """Bytes that a phase may have in use at its peak the next time, without the engine's own memory.

    Memory that PyTorch has reserved but does not use is left out, since training uses it before it asks for
    more. Memory that the phase leaves behind is counted: the first step allocates the optimizer's moments
    after its peak, so the peak of the second step comes on top of them.
    """
    before, after, peak = span["before_bytes"], span["after_bytes"], span["peak_bytes"]
    engine = sum(span["categories"].get(category, 0) for category in ("kv_cache", "rollout_weights"))
    return int(max(before, after) + (1 + GROWTH) * (peak - before)) - engine
