"""The plan of the next step, on which ranks agree, and which they make smaller when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from colocate.memory.recovery import Recovery, Remedy, Result
from colocate.memory.train_plan import TrainPlan, most_cautious
from colocate.parallel.verdict import Peers, first_line
from colocate.types import Sample

UNREPEATABLE_ADVICE = (
    "With FSDP2 a pass that has failed on one rank cannot be repeated. Lower max_tokens_per_microbatch, "
    "max_completion_length or max_prompt_length, or set gradient_checkpointing=True."
)
OUT_OF_MEMORY_ADVICE = (
    "The engine has given everything back, layers keep nothing and a micro-batch is one sequence. Lower "
    "max_completion_length or max_prompt_length, set use_peft or load_in_4bit, or free memory on the device."
)


class StepPlan:
    """The plan by which the next step is cut, and the longest sequence that it was made for.

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


class RepeatedWork:
    """Work of a step that ranks repeat together, with more memory or a smaller plan, when memory runs out.

    Args:
        plan: made smaller, on all ranks of the work, when no remedy is left.
        remedies: ways in which a rank frees memory by itself, tried first.
        can_repeat_passes: False with FSDP2, where a pass that fails on one rank leaves the others in it.
    """

    def __init__(self, plan: StepPlan, remedies: Sequence[Remedy], *, can_repeat_passes: bool) -> None:
        self._plan, self._remedies, self._can_repeat_passes = plan, remedies, can_repeat_passes

    def run(self, work: Callable[[], Result], peers: Peers, *, has_passes: bool = True) -> Result:
        """Run `work` on this rank while `peers` run theirs, until all have succeeded, and return its result.

        Args:
            peers: all ranks for an update; for log-probs only those that share the weights, if any, since
                others may compute them less often.
            has_passes: whether the work makes forward passes.

        Raises:
            torch.OutOfMemoryError: nothing is left to try.
            RuntimeError: memory has run out in a pass that cannot be repeated.
            PeerError: the work of another rank has failed with something else.
        """
        if self._can_repeat_passes or not has_passes:
            shrink = partial(self._plan.shrink, peers)
            recovery = Recovery(self._remedies, OUT_OF_MEMORY_ADVICE, joint_remedies=[shrink], peers=peers)
            return recovery.run(work)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"{first_line(error).rstrip('.')}. {UNREPEATABLE_ADVICE}") from error
