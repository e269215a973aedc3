"""The plan of the next step, which ranks that work together join, and make smaller together."""

from __future__ import annotations

from collections.abc import Sequence

from colocate.memory.train_plan import TrainPlan, most_cautious
from colocate.parallel.verdict import Peers
from colocate.types import Sample


class StepPlan:
    """How the next step is cut and what it keeps, and the longest sequence that this is for.

    Args:
        plan: of the first step.
        has_layers: whether the model runs in layers that can keep less (`TrainPlan.smaller`).
    """

    def __init__(self, plan: TrainPlan, *, has_layers: bool) -> None:
        self.plan = plan
        self._has_layers = has_layers
        self._longest = 1

    def see(self, samples: Sequence[Sample]) -> None:
        """Plan for these samples from now on."""
        self._longest = max((sample.num_tokens for sample in samples), default=1)

    @property
    def budget(self) -> int:
        """The most tokens per micro-batch of the samples last seen."""
        return self.plan.budget(self._longest)

    def join(self, peers: Peers, flag: bool = False) -> bool:
        """Make the plan, and the longest sequence that it is for, the same on all of some ranks.

        Each rank plans by the prompts and the memory that it has seen. All wait for the slowest, so that a
        larger plan on some of them would gain nothing.

        Returns:
            Whether the `flag` of any of the ranks is set.
        """
        if not peers.are_several:
            return flag
        rows = peers.gather(int(flag), self._longest, *self.plan.to_numbers())
        self._longest = max(row[1] for row in rows)
        self.plan = most_cautious([TrainPlan.from_numbers(row[2:]) for row in rows], self._longest)
        return any(row[0] for row in rows)

    def shrink(self, peers: Peers) -> str | None:
        """Take the next smaller plan for the samples that the ranks have seen last, and describe it; None on
        all ranks if there is none."""
        self.join(peers)
        smaller = self.plan.smaller(self._longest, has_layers=self._has_layers)
        if smaller is None:
            return None
        self.plan = smaller
        return (
            f"Now with activation_policy={smaller.activation_policy!r}, micro-batches of "
            f"{smaller.budget(self._longest):,} tokens, {smaller.logprob_chunk_size:,} tokens' logits at "
            f"a time and the softmax {'kept' if smaller.keep_softmax else 'made again'}"
        )
