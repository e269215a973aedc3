"""The options of requests, of turns, of refilling, of batches begun ahead, and of weights in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from colocate.data.options import PromptOptions
from colocate.options.requirements import (
    AT_LEAST_ONE,
    FRACTION,
    IN_COMPLETIONS,
    NOT_NEGATIVE,
    PORT,
    SECONDS,
    Requirement,
)

THREADS = Requirement("must be 0 to 1,024 threads", lambda v: 0 <= v <= 1024)


@dataclass
class RefillOptions(PromptOptions):
    """The options of requests and slices, and of groups that are replaced."""

    # ── Batches. All batch sizes count completions, not prompts ──────────────────────────────────────────

    num_generations: int = 8
    """Completions per prompt (G): at least 2, and a divisor of `generation_batch_size`."""
    num_generations_eval: Annotated[int | None, AT_LEAST_ONE] = None
    """Completions per prompt in evaluation. None: `num_generations`."""
    max_completion_length: Annotated[int, AT_LEAST_ONE, IN_COMPLETIONS] = 512
    """The most tokens that one completion may have."""
    steps_per_generation: Annotated[int | None, AT_LEAST_ONE] = None
    """Micro-steps that one rollout is trained in. None: gradient_accumulation_steps, so that a rollout feeds
    one optimizer step."""

    # ── Loss ─────────────────────────────────────────────────────────────────────────────────────────────

    top_entropy_quantile: Annotated[float, FRACTION] = 1.0
    """The policy loss keeps this share of the tokens, those of the highest entropy (arXiv:2506.01939)."""

    # ── Dynamic sampling ─────────────────────────────────────────────────────────────────────────────────

    max_refill_rounds: Annotated[int, NOT_NEGATIVE] = 0
    """How many more rollouts may replace groups whose members all have one reward, until the batch is full
    (dynamic sampling, DAPO). The first rollout of a step asks for more prompts, too, by the share of such
    groups in the steps before; all together for at most so many more batches of prompts. What is missing then
    stays as it is. 0: all groups are trained on."""
    refill_reward: str | None = None
    """The reward function in which the members of a group must differ, with max_refill_rounds. None: the
    weighted sum of all."""


@dataclass(kw_only=True)
class SelectionOptions(RefillOptions):
    """All options by which a rank makes requests and slices."""

    steps_per_generation: int
    seed: int
    loss_type: str
    vllm_max_model_length: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    process_index: int
    world_size: int


@dataclass
class CarryOptions:
    """The options of batches that are begun ahead."""

    # ── Carry-over ───────────────────────────────────────────────────────────────────────────────────────

    max_policy_lag: Annotated[int, NOT_NEGATIVE] = 0
    """How many generation batches are begun ahead, so that the device stays full until the longest completion
    ends. Their tokens may then be drawn by weights that are that many rollouts old. 0: none, all tokens are
    drawn by the weights that are trained."""
    mask_stale_tokens: Annotated[bool, IN_COMPLETIONS] = False
    """Leave tokens that older weights have drawn out of the loss (max_policy_lag)."""


@dataclass
class TurnOptions:
    """The options of episodes of several turns."""

    # ── Turns ────────────────────────────────────────────────────────────────────────────────────────────

    max_tool_calling_iterations: Annotated[int | None, NOT_NEGATIVE, IN_COMPLETIONS] = None
    """Turns at most after which the tools that a model calls are run; what it calls in the next one is not.
    None: no limit but `max_completion_length`, which bounds all tokens after a prompt."""
    tool_timeout_s: Annotated[float | None, SECONDS] = None
    """Seconds that a call of a tool may take; the model then reads an error instead of a result. An
    environment's `reset` and its construction may take as long. None: no limit. The trainer must be in the
    main thread, unless there are `tool_workers`."""
    tool_workers: Annotated[int, THREADS] = 0
    """Threads for tools and environments that are not async. 0: they run in the main thread, one after the
    other, while the device generates."""
    agent_timeout_s: Annotated[float | None, SECONDS] = None
    """Seconds that the trainer's `agent` may take for an episode, which then ends with the calls that were
    made. None: no limit."""
    agent_port: Annotated[int | None, PORT] = None
    """Port of 127.0.0.1 at which the trainer's `agent` asks the policy; the ranks of a run have this one and
    the next ones, in their order. None: any that is free."""
