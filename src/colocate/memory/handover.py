"""How much of its memory (the KV cache, weights of its own) the engine may keep while the policy trains.

Mapping and unmapping cost time by the gigabyte, so the engine gives back what training needs and no more.
What training needs is judged from what it was seen to need:

    keep = device - (in use at the peak of training, without the engine) - allowances
"""

from __future__ import annotations

from typing import Any, Protocol

MARGIN = 0.1
"""Share of the device left free at training's peak: the peak counts tensors, and an allocator has holes
between them. Mapping a tenth of a GPU anew takes hundredths of a second; running out ends the run."""

GROWTH = 0.5
"""Share by which what a phase adds may outgrow what was seen. Activations grow with the tokens of a
micro-batch, and a rollout may end in longer completions than any before."""


class Sleeper(Protocol):
    """What sleeps beside the training: a rollout engine, which documents these names."""

    @property
    def kv_cache_bytes(self) -> int: ...

    @property
    def rollout_weight_bytes(self) -> int: ...

    def sleep(self, keep_bytes: int = 0) -> None: ...


class Handover:
    """Learns from each step's record what the phases between rollouts need beside the engine's memory."""

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.keep_bytes = 0
        """What the engine may keep in its next sleep; 0 until a whole step has been seen, and on a CPU."""
        self._needed_bytes = 0
        self._may_keep = True

    def take_back(self) -> str | None:
        """Take from the sleeping engine all that it was allowed to keep, and let it keep nothing from now on.

        Training ran out of memory beside it, so the estimate was wrong.

        Returns:
            What was given back, in words; None if the engine kept nothing.
        """
        kept_bytes = self._engine.kv_cache_bytes + self._engine.rollout_weight_bytes
        if not kept_bytes:
            return None
        self.keep_bytes = 0
        self._may_keep = False
        self._engine.sleep()
        return f"The engine gave back {kept_bytes / 2**30:.2f} GiB"

    def learn(self, memory: dict[str, Any]) -> None:
        """Take in one step.

        Args:
            memory: the entry "memory" of `Timeline.drain`.
        """
        # On a CPU what is free is not the run's alone: other processes take it, too.
        if memory["device"] == "cpu":
            return
        for span in memory["spans"]:
            if span["phase"] != "rollout":
                self._needed_bytes = max(self._needed_bytes, _needed_bytes(span))
        if self._needed_bytes and self._may_keep:
            available = (1 - MARGIN) * memory["limit_bytes"]
            self.keep_bytes = max(0, int(available) - self._needed_bytes)


def _needed_bytes(span: dict[str, Any]) -> int:
    """What the phase may have in use at its peak when it comes again, beside the engine's own memory.

    Memory that PyTorch has reserved and does not use is not in it: training takes that before it asks for
    more. What the phase left behind is: the first step makes the optimizer's moments after its peak, and the
    second one has its peak on top of them.
    """
    before, after, peak = span["before_bytes"], span["after_bytes"], span["peak_bytes"]
    engine = sum(span["categories"].get(category, 0) for category in ("kv_cache", "rollout_weights"))
    return int(max(before, after) + (1 + GROWTH) * (peak - before)) - engine
