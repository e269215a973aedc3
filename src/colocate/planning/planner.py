"""Chooses how a run trains from its shapes and the device's memory, without loading or allocating anything.

    resident                       weights, float32 masters, moments, reference
    ├── rollout (the engine's turn)    KV cache, prefill, one decode step
    └── train   (the trainer's turn)   gradients, kept activations, one layer's backward or the log-probs

Rollout and training take turns with one memory, so a run needs resident + the larger of the two. Both can be
made smaller: the KV cache takes what is left, and training recomputes more or has fewer tokens in a
micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from colocate.engines.native.footprint import useful_kv_tokens
from colocate.memory.rows import Moment, total_bytes
from colocate.memory.train_plan import (
    ACTIVATION_POLICIES,
    ENOUGH_TOKENS,
    OVERHEAD_TOKENS,
    ActivationPolicy,
    TrainPlan,
)
from colocate.memory.workload import Workload
from colocate.planning.cut_groups import CutGroup
from colocate.planning.hardware import Cluster
from colocate.planning.memory_plan import (
    LEAST_KV_SHARE,
    MARGIN,
    MemoryPlan,
    account,
    engine_turn,
    resident_rows,
    train_bytes,
    train_room,
)
from colocate.planning.sharding import Shard, ShardingChoice, choose_sharding
from colocate.policy.footprint import MOMENTS_BYTES, Microbatch, head_is_trained, train_flops_per_token
from colocate.weights.shapes import ModelShapes

logger = logging.getLogger(__name__)

MAX_TOKENS_PER_MICROBATCH = 32768
TOKEN_STEP = 1024
"""Micro-batches are multiples of this many tokens, for which matrix products are fast."""
MAX_TOKENS_FOR_GROUP = 2**17
"""The most tokens of a micro-batch that is larger than `MAX_TOKENS_PER_MICROBATCH` to hold a whole group. The
limit exists because "offload" keeps the inputs of all layers for all of these tokens in the host's memory."""

LOGPROB_CHUNKS = (128, 256, 512, 1024, 2048, 4096, 8192)
MAX_LOGPROB_BYTES = 2 * 2**30
MAX_LOGPROB_SHARE = 1 / 16
"""The largest share of the memory left by the resident rows that the logits of one chunk may take."""

_MICROBATCH_MOMENTS: tuple[Moment, ...] = ("head", "layer", "embedding")
_MAX_CORRECTION = 2.0
_NEGLIGIBLE = 0.05
"""A share of a step's memory, or of its work, that is too small to act upon."""


@dataclass(frozen=True)
class Constraints:
    """The parts of a plan that the user has set; None: the planner chooses."""

    activation_policy: ActivationPolicy | None = None
    tokens_per_microbatch: int | None = None
    logprob_chunk_size: int | None = None
    offload_optimizer: bool | None = None
    sequences_per_microbatch: int = 1
    """Micro-batches hold this many times the tokens of the longest sequence if there is no GPU to plan
    for."""
    shard: Shard = "auto"


def plan(
    shapes: ModelShapes,
    workload: Workload,
    *,
    device_memory_bytes: int | None = None,
    constraints: Constraints | None = None,
    correction: float = 1.0,
) -> MemoryPlan:
    """Choose how to train (`choose_train_plan`), and account for the memory of one device."""
    constraints = constraints or Constraints()
    train_plan = choose_train_plan(shapes, workload, device_memory_bytes, constraints, correction)
    result = account(shapes, workload, train_plan, device_memory_bytes, correction)
    return replace(
        result, repeated_prompts=_repeated_prompts(result, shapes, workload, constraints, correction)
    )


def choose_train_plan(
    shapes: ModelShapes,
    workload: Workload,
    device_memory_bytes: int | None,
    constraints: Constraints | None = None,
    correction: float = 1.0,
) -> TrainPlan:
    """The fastest way to train that fits the device, within what the user has set.

    The activation policies are tried from the fastest to the one that takes least memory, each with the most
    tokens per micro-batch that fit. The first one is taken whose micro-batches are so large that the next
    policy, which recomputes more, would be slower even with micro-batches of `ENOUGH_TOKENS` and uncut groups
    (`_suffices`). The next policy is judged by this fixed size and not by the size that would fit with it, so
    that more memory can never lead to more recomputation. Remaining memory then goes to larger chunks of
    log-probs, and at last to keeping their softmax. If no plan fits, the one that takes least memory is
    returned, and the run will deal with running out of memory.

    Args:
        device_memory_bytes: memory of the device; None: there is no GPU, and nothing to choose.
        constraints: what the user has set.
        correction: factor on the predicted bytes that grow with tokens, as in `account`.
    """
    constraints = constraints or Constraints()
    if device_memory_bytes is None:
        return choose_fixed_plan(constraints)
    offload = constraints.offload_optimizer
    if offload is None:
        offload = _offload_helps(shapes, workload, device_memory_bytes)
    chosen = _fastest(shapes, workload, device_memory_bytes, constraints, offload, correction)
    if constraints.offload_optimizer is None and not offload and workload.sharding.is_split:
        # Unlike a whole one, a split optimizer's state stays away during forward and backward. Its way to
        # the host and back takes less time than recomputing activations on each GPU.
        moved = _fastest(shapes, workload, device_memory_bytes, constraints, True, correction)
        before, after = _rank(chosen), _rank(moved)
        room = train_room(shapes, workload, chosen, device_memory_bytes)
        if after[0] > before[0] or train_bytes(shapes, workload, chosen, correction) > room:
            return moved
    return chosen


def _fastest(
    shapes: ModelShapes,
    workload: Workload,
    device_memory_bytes: int,
    constraints: Constraints,
    offload: bool,
    correction: float,
) -> TrainPlan:
    """The choice of `choose_train_plan` with the optimizer's state on the host during rollouts or not."""
    start = TrainPlan(
        logprob_chunk_size=constraints.logprob_chunk_size or LOGPROB_CHUNKS[0], offload_optimizer=offload
    )
    room = train_room(shapes, workload, start, device_memory_bytes)

    def fits(candidate: TrainPlan) -> bool:
        return train_bytes(shapes, workload, candidate, correction) <= room

    policies = (
        ACTIVATION_POLICIES if constraints.activation_policy is None else (constraints.activation_policy,)
    )
    budgets = (
        _budgets(workload)
        if constraints.tokens_per_microbatch is None
        else (constraints.tokens_per_microbatch,)
    )
    chosen = replace(start, activation_policy=policies[-1], tokens_per_microbatch=budgets[0])
    for policy in policies:
        fitting = [
            candidate
            for budget in budgets
            if fits(candidate := replace(start, activation_policy=policy, tokens_per_microbatch=budget))
        ]
        if fitting:
            chosen = fitting[-1]
            if chosen.budget(0) == budgets[-1] or _suffices(shapes, workload, policy, chosen.budget(0)):
                break
    if constraints.logprob_chunk_size is None:
        chosen = _with_larger_chunks(shapes, workload, chosen, room, fits)
    if head_is_trained(shapes) and not workload.entropy_gradient:
        keeping = replace(chosen, keep_softmax=True)
        chosen = keeping if fits(keeping) else chosen
    return chosen


def choose_fixed_plan(constraints: Constraints) -> TrainPlan:
    """The plan where there is no GPU: the user's settings, and fixed defaults for all else."""
    return TrainPlan(
        constraints.activation_policy or "keep",
        constraints.tokens_per_microbatch,
        constraints.sequences_per_microbatch,
        constraints.logprob_chunk_size or TrainPlan.logprob_chunk_size,
        bool(constraints.offload_optimizer),
    )


@dataclass(frozen=True)
class Case:
    """A run to plan: the model's shapes, the workload, and the device's memory (None: no GPU)."""

    shapes: ModelShapes
    workload: Workload
    device_memory_bytes: int | None = None
    constraints: Constraints = Constraints()
    cluster: Cluster | None = None
    """The GPUs for which the planner chooses how they split the run; None: the workload's sharding stands."""

    def plan(self, correction: float = 1.0) -> MemoryPlan:
        """The memory of one device."""
        if self.cluster is not None:
            return self.sharding_choice(self.cluster, correction).chosen.plan
        return self._plan_of(self.workload, correction)

    def sharding_choice(self, cluster: Cluster, correction: float = 1.0) -> ShardingChoice:
        """The best way to split the run over the GPUs of `cluster` (`choose_sharding`)."""
        return choose_sharding(
            self.shapes,
            self.workload,
            cluster,
            self.constraints.shard,
            lambda workload: self._plan_of(workload, correction),
        )

    def _plan_of(self, workload: Workload, correction: float) -> MemoryPlan:
        return plan(
            self.shapes,
            workload,
            device_memory_bytes=self.device_memory_bytes,
            constraints=self.constraints,
            correction=correction,
        )


class Planner:
    """The plan of a run, corrected by the measured memory of its steps.

    Args:
        shapes, workload, device_memory_bytes, constraints: as in `plan`.
    """

    def __init__(
        self,
        shapes: ModelShapes,
        workload: Workload,
        device_memory_bytes: int | None,
        constraints: Constraints | None = None,
    ) -> None:
        self._shapes = shapes
        self.workload = workload
        self._device_memory_bytes = device_memory_bytes
        self._constraints = constraints
        self._correction = 1.0
        self._may_grow = True
        self._planned: tuple[tuple[Workload, float], MemoryPlan] | None = None
        """The last plan, by what may have changed since: each step asks for one, and few change it."""

    def plan(self) -> MemoryPlan:
        """The plan as of now."""
        known = (self.workload, self._correction)
        if self._planned is None or self._planned[0] != known:
            self._planned = known, self.case.plan(self._correction)
        return self._planned[1]

    @property
    def case(self) -> Case:
        """The run as it is known now, with the longest prompt seen so far."""
        return Case(
            self._shapes, self.workload, self._device_memory_bytes, self._constraints or Constraints()
        )

    def with_prompts(self, train_plan: TrainPlan, prompt_tokens: int) -> TrainPlan:
        """The plan to continue with after a prompt of `prompt_tokens` was seen.

        A prompt longer than all before leads to a new choice. If running out of memory has made `train_plan`
        smaller than the planner's own, the new choice is taken only if it is smaller still.
        """
        if prompt_tokens <= self.workload.prompt_tokens:
            return train_plan
        before = self.plan()
        self.workload = replace(self.workload, prompt_tokens=prompt_tokens)
        after = self.plan()
        if before.train_plan != train_plan and _rank(after.train_plan) >= _rank(train_plan):
            return train_plan
        if after.repeated_prompts is not None and before.repeated_prompts is None:
            logger.warning(after.repeated_prompts)
        return after.train_plan

    def refined(self, train_plan: TrainPlan, memory: dict[str, Any], num_tokens: int) -> TrainPlan:
        """The plan to continue with after a step was measured (`refine`); `train_plan` if the record says
        nothing.

        Args:
            train_plan: the plan that the step was done with.
            memory: the entry "memory" of the step's `Timeline.drain`.
            num_tokens: tokens of the step's largest micro-batch.
        """
        spans = [span for span in memory["spans"] if span["phase"] == "train"]
        if not spans or not num_tokens:
            return train_plan
        before, after, peak = (spans[-1][f"{name}_bytes"] for name in ("before", "after", "peak"))
        # The first step allocates the moments, which stay. Its peak does not show what training alone takes.
        if after - before > _NEGLIGIBLE * (peak - before):
            return train_plan
        return self.refine(train_plan, peak - before, num_tokens)

    def refine(self, train_plan: TrainPlan, measured_bytes: int, num_tokens: int) -> TrainPlan:
        """The plan to continue with, given the bytes by which a step exceeded the memory in use before it.

        A step of n tokens is predicted to take fixed + correction × transient(n) bytes: fixed are the
        gradients, transient are activations, logits and temporaries, which grow with n. Solved for the
        measured bytes:

            correction = (measured - fixed) / transient = 1 + (measured - predicted) / transient

        where `predicted` is the prediction with a correction of 1. The correction stays between 1/2 and 2.
        Real sequences differ from step to step, so a correction that followed each of them would swing, and
        each swing would change the plan. Therefore it may fall (and the plan grow) only after the first
        measured step, and only if that step used the planner's own plan; later it can only rise, and the plan
        only shrink.

        Args:
            train_plan: the plan that the step was done with.
            measured_bytes: its peak minus the bytes in use before it.
            num_tokens: tokens of its largest micro-batch.
        """
        if self._device_memory_bytes is None:
            return train_plan
        may_grow = self._may_grow and train_plan == self.plan().train_plan
        self._may_grow = False
        predicted_bytes, transient_bytes = self._prediction(train_plan, num_tokens)
        if measured_bytes <= (1 + _NEGLIGIBLE) * self._exchange_bytes(train_plan):
            return train_plan  # the peak was no larger than what takes as much for any number of tokens
        ratio = 1.0 + (measured_bytes - predicted_bytes) / max(transient_bytes, 1)
        floor = 1 / _MAX_CORRECTION if may_grow else self._correction
        self._correction = min(max(ratio, floor), _MAX_CORRECTION)
        chosen = self.plan().train_plan
        return chosen if may_grow or _rank(chosen) < _rank(train_plan) else train_plan

    def _prediction(self, train_plan: TrainPlan, num_tokens: int) -> tuple[int, int]:
        """Predicted bytes of a step with micro-batches of `num_tokens`: all, and those that grow with
        them."""
        workload = self.workload
        if num_tokens < workload.max_sequence_length:
            # Real sequences are often shorter than the longest that may come.
            share = num_tokens / workload.max_sequence_length
            workload = replace(
                workload,
                prompt_tokens=max(1, int(workload.prompt_tokens * share)),
                completion_tokens=max(1, int(workload.completion_tokens * share)),
            )
        # An optimizer state that was on the host is back before the step begins: the step does not add it.
        step = replace(train_plan, tokens_per_microbatch=num_tokens, offload_optimizer=False)
        moments = _MICROBATCH_MOMENTS if workload.sharding.is_split else get_args(Moment)
        whole, fixed = (train_bytes(self._shapes, workload, step, scale, moments) for scale in (1.0, 0.0))
        return whole, whole - fixed

    def _exchange_bytes(self, train_plan: TrainPlan) -> int:
        """Predicted bytes while ranks with a split optimizer exchange gradients and step; else 0."""
        if not self.workload.sharding.is_split:
            return 0
        return train_bytes(self._shapes, self.workload, train_plan, 1.0, ("reduce", "step"))


# ── What the choice stands on ────────────────────────────────────────────────────────────────────────────


def _suffices(shapes: ModelShapes, workload: Workload, policy: ActivationPolicy, budget: int) -> bool:
    """Whether a policy with micro-batches of `budget` tokens is at least as fast as the next policy, which
    recomputes more, would be with micro-batches of `ENOUGH_TOKENS` and uncut groups.

    The time of a step is taken as operations per token × (1 + `OVERHEAD_TOKENS` / tokens of a micro-batch) ×
    the tokens computed, of which a cut group has more (`CutGroup.work`).
    """
    level = ACTIVATION_POLICIES.index(policy)
    if level + 1 == len(ACTIVATION_POLICIES):
        return True
    slower = train_flops_per_token(shapes, workload, ACTIVATION_POLICIES[level + 1])
    faster = train_flops_per_token(shapes, workload, policy)
    work = (1 + OVERHEAD_TOKENS / budget) * CutGroup.of(workload, budget).work
    return faster * work <= slower * (1 + OVERHEAD_TOKENS / ENOUGH_TOKENS)


def _budgets(workload: Workload) -> Sequence[int]:
    """Tokens per micro-batch to choose from, ascending: the longest sequence, then multiples of `TOKEN_STEP`.

    The largest is `MAX_TOKENS_PER_MICROBATCH`, beyond which matrix products get no faster. If it would cut a
    group into parts that compute the prompt too often, the largest is the whole group instead.
    """
    longest = workload.max_sequence_length
    most, group = MAX_TOKENS_PER_MICROBATCH, CutGroup.of(workload, MAX_TOKENS_PER_MICROBATCH)
    if group.work > 1 + _NEGLIGIBLE:
        most = min(group.whole_tokens, MAX_TOKENS_FOR_GROUP)
    most = _in_steps(min(most, workload.step_tokens))
    return (longest, *range(_in_steps(longest + 1), most + 1, TOKEN_STEP))


def _in_steps(num_tokens: int) -> int:
    """`num_tokens` rounded up to a multiple of `TOKEN_STEP`."""
    return -(-num_tokens // TOKEN_STEP) * TOKEN_STEP


def _with_larger_chunks(
    shapes: ModelShapes,
    workload: Workload,
    chosen: TrainPlan,
    room_bytes: int,
    fits: Callable[[TrainPlan], bool],
) -> TrainPlan:
    """The plan with the largest chunk of log-probs that still fits, takes little memory, and is of use."""
    limit = min(MAX_LOGPROB_BYTES, MAX_LOGPROB_SHARE * room_bytes)
    per_token = shapes.vocab_size * (4 + workload.parameter_dtype.itemsize)
    predicted = Microbatch.of(workload, chosen.budget(workload.max_sequence_length)).num_predicted
    for size in LOGPROB_CHUNKS[1:]:
        larger = replace(chosen, logprob_chunk_size=size)
        if size * per_token > limit or size >= 2 * predicted or not fits(larger):
            break
        chosen = larger
    return chosen


def _offload_helps(shapes: ModelShapes, workload: Workload, device_memory_bytes: int) -> bool:
    """Whether a rollout has too little memory while the optimizer's state is on the device."""
    if workload.optim not in MOMENTS_BYTES or workload.engine == "rollout_server":
        return False
    resident = resident_rows(shapes, workload, TrainPlan())
    rollout, kv_tokens = engine_turn(shapes, workload, resident, device_memory_bytes)
    return total_bytes(
        [*resident, *rollout]
    ) > device_memory_bytes or kv_tokens < LEAST_KV_SHARE * useful_kv_tokens(workload.of_engine)


def _repeated_prompts(
    result: MemoryPlan, shapes: ModelShapes, workload: Workload, constraints: Constraints, correction: float
) -> str | None:
    if result.device_memory_bytes is None:
        return None
    group = CutGroup.of(workload, result.train_plan.budget(workload.max_sequence_length))
    if group.work <= 1 + _NEGLIGIBLE:
        return None
    whole = replace(
        result.train_plan,
        tokens_per_microbatch=_in_steps(group.whole_tokens),
        logprob_chunk_size=constraints.logprob_chunk_size or LOGPROB_CHUNKS[0],
        keep_softmax=False,
    )
    needed_bytes = result.phase_bytes("resident") + train_bytes(shapes, workload, whole, correction)
    short_gib = (needed_bytes / (1 - MARGIN) - result.device_memory_bytes) / 2**30
    return (
        f"A group of {group.num_completions} completions is trained in {group.num_parts} micro-batches that "
        f"each compute its prompt: {group.num_parts} × {group.prompt_tokens:,} + {group.num_completions} × "
        f"{group.completion_tokens:,} = {group.computed_tokens:,} tokens, {group.work:.1f} times the "
        f"{group.whole_tokens:,} of a group in one. That would take a device of "
        f"{result.device_memory_bytes / 2**30 + short_gib:.2f} GiB with activation_policy="
        f"{whole.activation_policy!r}, "
        + (
            f"{short_gib:.2f} GiB more than this one has."
            if short_gib > 0
            else f"so this one will do: set max_tokens_per_microbatch={group.whole_tokens}."
        )
    )


def _rank(train_plan: TrainPlan) -> tuple[int, int, bool]:
    """A key by which plans are compared: larger for a plan that takes more memory."""
    level = ACTIVATION_POLICIES.index(train_plan.activation_policy)
    return -level, train_plan.budget(0), train_plan.keep_softmax
