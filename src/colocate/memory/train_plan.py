"""The part of the memory plan that a training step obeys: its cut into micro-batches and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

ActivationPolicy = Literal["keep", "selective", "full", "offload"]
ACTIVATION_POLICIES: tuple[ActivationPolicy, ...] = get_args(ActivationPolicy)
"""All activation policies, from the fastest to the one that takes least memory (`policy.stack.layer`)."""

ENOUGH_TOKENS = 8192
"""Micro-batches of this many tokens keep a GPU's matrix products at full speed. Cutting a larger micro-batch
down to this size therefore costs less than recomputing any activation."""
OVERHEAD_TOKENS = 512
"""The fixed cost of a micro-batch, as the number of tokens that could be computed in its time. For a 1.5B
model on an H200, reading all weights and adding to all float32 gradients takes as long as 230 tokens, and
launching the kernels takes about as long again."""


@dataclass(frozen=True)
class TrainPlan:
    """The cut of a step's samples into micro-batches, and the tensors that the forward keeps for the
    backward.

    A plan changes memory and time. It changes a gradient only by the order in which floats are added.
    """

    activation_policy: ActivationPolicy = "keep"
    tokens_per_microbatch: int | None = None
    """The most tokens in one forward and backward, a shared prompt counted once. None:
    `sequences_per_microbatch` times the step's longest sequence."""
    sequences_per_microbatch: int = 1
    logprob_chunk_size: int = 1024
    """Number of tokens whose logits [tokens, vocabulary] exist at the same time."""
    offload_optimizer: bool = False
    """Whether the optimizer's masters and moments are moved to the host while the engine generates."""
    keep_softmax: bool = False
    """Whether the forward pass of the log-probs keeps the part of the softmax that the head's gradient needs.
    That takes 2 bytes per token and entry of the vocabulary and saves one of the four products with the head
    (`colocate.policy.head.logprobs`)."""

    def to_numbers(self) -> list[int]:
        """The plan as numbers that ranks can exchange; `from_numbers` reads them."""
        return [
            ACTIVATION_POLICIES.index(self.activation_policy),
            self.tokens_per_microbatch or 0,
            self.sequences_per_microbatch,
            self.logprob_chunk_size,
            int(self.offload_optimizer),
            int(self.keep_softmax),
        ]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> TrainPlan:
        level, tokens, sequences, chunk, offload, softmax = numbers
        return cls(ACTIVATION_POLICIES[level], tokens or None, sequences, chunk, bool(offload), bool(softmax))

    def budget(self, longest: int) -> int:
        """The most tokens per micro-batch in a step whose longest sequence has `longest` tokens."""
        return self.tokens_per_microbatch or self.sequences_per_microbatch * longest

    def smaller(self, longest: int, *, has_layers: bool = True) -> TrainPlan | None:
        """The next plan to try after memory ran out; None if no plan would take less.

        One thing is changed per attempt, the cheapest in time first: the softmax is not kept; micro-batches
        have half the tokens, down to `ENOUGH_TOKENS`; the next activation policy; micro-batches have half the
        tokens, down to one sequence; logits exist for half as many tokens.

        Args:
            longest: tokens of the longest sequence, which no micro-batch can be cut below.
            has_layers: whether the model's layers follow the activation policy.
        """
        budget = self.budget(longest)
        half = max(longest, budget // 2)
        level = ACTIVATION_POLICIES.index(self.activation_policy)
        if self.keep_softmax:
            return replace(self, keep_softmax=False)
        if budget > max(longest, ENOUGH_TOKENS):
            return replace(self, tokens_per_microbatch=half)
        if has_layers and level + 1 < len(ACTIVATION_POLICIES):
            return replace(self, activation_policy=ACTIVATION_POLICIES[level + 1])
        if half < budget:
            return replace(self, tokens_per_microbatch=half)
        chunk = min(self.logprob_chunk_size, budget)
        if chunk >= 128:  # below 64 tokens, logits are no longer what fills the memory
            return replace(self, logprob_chunk_size=chunk // 2)
        return None


def most_cautious(plans: Sequence[TrainPlan], longest: int) -> TrainPlan:
    """The plan for sequences of up to `longest` tokens that takes no more memory than any of `plans`."""
    counts_sequences = all(plan.tokens_per_microbatch is None for plan in plans)
    return TrainPlan(
        ACTIVATION_POLICIES[max(ACTIVATION_POLICIES.index(plan.activation_policy) for plan in plans)],
        None if counts_sequences else min(plan.budget(longest) for plan in plans),
        min(plan.sequences_per_microbatch for plan in plans),
        min(plan.logprob_chunk_size for plan in plans),
        any(plan.offload_optimizer for plan in plans),
        all(plan.keep_softmax for plan in plans),
    )


class TrainPlanner(Protocol):
    """Chooses the next plan from what a run has shown so far (`colocate.planning.planner.Planner`)."""

    def with_prompts(self, train_plan: TrainPlan, prompt_tokens: int) -> TrainPlan:
        """The plan to continue with after a prompt of `prompt_tokens` was seen."""
        ...

    def refined(self, train_plan: TrainPlan, memory: dict[str, Any], num_tokens: int) -> TrainPlan:
        """The plan after a step whose `memory` (`Timeline.drain`) was measured; `num_tokens`: its largest
        micro-batch's."""
        ...
