"""Changes of options, alone or together, with which the planner finds that a run fits a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from colocate.engines.native.footprint import decode_bytes
from colocate.planning.hardware import Cluster
from colocate.planning.memory_plan import MemoryPlan
from colocate.planning.planner import Case
from colocate.planning.sharding import ShardingChoice, with_sharding
from colocate.policy.footprint import MOMENTS_BYTES
from colocate.weights.shapes import FourBit, Lora

MOST_CHANGES = 4
"""The most changes in one remedy; with more of them it would be a different run."""
SHORTEST = 256
"""The fewest tokens to which a remedy shortens prompts or completions."""
MOST_GPUS = 64
"""The most GPUs that `enough_gpus` tries, in nodes of eight."""
_RANK = 16
"""Rank of the adapters that a remedy adds, which is `lora_r`'s default."""


@dataclass(frozen=True)
class OptionChange:
    """A change of one or a few options that go together."""

    settings: tuple[str, ...]
    cost: int
    """The extent to which the change alters the run: 1 changes no result, 10 is another way of training."""
    apply: Callable[[Case], Case]


@dataclass(frozen=True)
class Remedy:
    """Changes that together make a run fit."""

    changes: tuple[OptionChange, ...]
    case: Case
    plan: MemoryPlan
    """The plan of the changed run."""

    @property
    def settings(self) -> str:
        return " ".join(itertools.chain.from_iterable(change.settings for change in self.changes))


def find_remedies(case: Case, most: int = 3) -> list[Remedy]:
    """The smallest changes with which the planner says that the run fits, the smallest first.

    A remedy with more changes is listed only if the smaller one leaves little memory free; otherwise the
    additional changes would not be needed.

    Args:
        most: how many remedies to look for at most.

    Returns:
        Nothing if the run fits as it is, if the device is unknown, or if no `MOST_CHANGES` suffice.
    """
    if case.plan().fits is not False:
        return []
    found: list[Remedy] = []
    for changes in _combinations(case):
        if len(found) == most:
            break
        # Remedies found before that set a subset of these options, each changed as little or less.
        within = [remedy for remedy in found if _options(remedy.changes) <= _options(changes)]
        if any(remedy.plan.why_tight is None for remedy in within):
            continue
        changed = case
        for change in changes:
            changed = change.apply(changed)
        plan = changed.plan()
        if plan.fits and not (within and plan.why_tight):
            found.append(Remedy(changes, changed, plan))
    return found


def needed_bytes(case: Case) -> int | None:
    """The least memory in bytes of a device that the run fits, to about 1 %; None if it fits no device."""
    least, most = 2**30, 2**43
    if not replace(case, device_memory_bytes=most).plan().fits:
        return None
    while most - least > least // 100:
        middle = (least + most) // 2
        if replace(case, device_memory_bytes=middle).plan().fits:
            most = middle
        else:
            least = middle
    return most


def enough_gpus(case: Case) -> tuple[Cluster, ShardingChoice] | None:
    """The smallest larger cluster, doubled step by step, whose GPUs the run fits with as many completions on
    each, and its sharding; None if `MOST_GPUS` are too few."""
    now = case.cluster or Cluster()
    more = now
    while (num_gpus := 2 * more.num_gpus) <= MOST_GPUS:
        is_full = num_gpus // more.num_nodes > max(8, now.gpus_per_node)
        more = Cluster(num_gpus, more.num_nodes * (2 if is_full else 1), now.gpu)
        choice = case.sharding_choice(more)
        if choice.chosen.plan.fits and choice.chosen.plan.is_safe:
            return more, choice
    return None


def with_adapters(case: Case, *, in_4bit: bool) -> Case:
    """The run with LoRA on the matrices that PEFT chooses, with frozen weights in 4 bits or in their own
    type."""
    shapes = case.shapes if case.shapes.has_adapters else case.shapes.with_lora(Lora(_RANK))
    shapes = replace(shapes, four_bit=FourBit()) if in_4bit else shapes
    if in_4bit:  # such weights are not split
        sharding = replace(case.workload.sharding, num_weight_parts=1, decode_shard=None)
        case = replace(case, workload=with_sharding(shapes, case.workload, sharding))
        case = case if case.constraints.shard == "none" else _of_constraints(shard="auto")(case)
    return _without_sharing(replace(case, shapes=shapes))


def _without_sharing(case: Case) -> Case:
    """The run with a copy of the weights for vLLM: with adapters it cannot read the trainer's own."""
    return _of_workload(vllm=replace(case.workload.vllm, shares_weights=False))(case)


def _options(changes: tuple[OptionChange, ...]) -> set[str]:
    return {setting.split("=")[0] for change in changes for setting in change.settings}


def _combinations(case: Case) -> list[tuple[OptionChange, ...]]:
    """All combinations with at most one change of each kind, those that alter the run least first."""
    kinds = [(None, *kind) for kind in _kinds(case) if kind]
    ways = (tuple(filter(None, way)) for way in itertools.product(*kinds))
    some = [way for way in ways if 0 < len(way) <= MOST_CHANGES]
    return sorted(some, key=lambda way: (sum(change.cost for change in way), len(way)))


def _kinds(case: Case) -> Iterator[list[OptionChange]]:
    """The possible changes, in lists: at most one of each list is made. A remedy names them in this order."""
    workload, shapes = case.workload, case.shapes
    whole = () if case.constraints.shard in ("auto", "none", 1) else ("shard=auto",)
    if shapes.has_adapters and shapes.four_bit is None:
        yield [OptionChange(("load_in_4bit=True", *whole), 5, _in_4bit)]
    elif not shapes.has_adapters:
        in_4bit = OptionChange(("use_peft=True", "load_in_4bit=True", *whole), 14, _in_4bit)
        yield [OptionChange(("use_peft=True",), 9, _adapted), in_4bit]
    yield from ([change] for change in _unset_constraints(case))
    if workload.parameter_dtype.itemsize == 4:
        yield [OptionChange(("dtype=bfloat16",), 2, _of_workload(parameter_dtype=torch.bfloat16))]
    if workload.engine == "native" and workload.max_num_seqs > 64:
        decoded = shapes.part(workload.sharding.num_decode_parts)
        scratch = decode_bytes(decoded, 64) if workload.is_gpu else 0
        fewer = _of_workload(max_num_seqs=64, decode_rows=64, decode_scratch_bytes=scratch)
        yield [OptionChange(("max_num_seqs=64",), 2, fewer)]
    if workload.has_reference and not shapes.has_adapters:
        yield [OptionChange(("beta=0.0",), 3, _of_workload(has_reference=False))]
    if not shapes.has_adapters and _moments(case, "adamw_bnb_8bit") < _moments(case, workload.optim):
        yield [OptionChange(("optim=adamw_bnb_8bit",), 3, _of_workload(optim="adamw_bnb_8bit"))]
    yield _shorter("max_completion_length", workload.completion_tokens, "completion_tokens")
    yield _shorter("max_prompt_length", workload.prompt_tokens, "prompt_tokens")


def _adapted(case: Case) -> Case:
    return with_adapters(case, in_4bit=False)


def _in_4bit(case: Case) -> Case:
    return with_adapters(case, in_4bit=True)


def _unset_constraints(case: Case) -> Iterator[OptionChange]:
    """Changes that leave an option of the user's to the planner, or set it to the value that takes least
    memory."""
    constraints, workload = case.constraints, case.workload
    longest = workload.max_sequence_length
    if constraints.shard != "auto" and case.cluster is not None and case.cluster.num_gpus > 1:
        yield OptionChange(("shard=auto",), 1, _of_constraints(shard="auto"))
    if constraints.activation_policy not in (None, "offload"):
        yield OptionChange(("activation_policy=auto",), 1, _of_constraints(activation_policy=None))
    if (constraints.tokens_per_microbatch or 0) > longest:
        tokens = _of_constraints(tokens_per_microbatch=longest)
        yield OptionChange((f"max_tokens_per_microbatch={longest}",), 1, tokens)
    if (constraints.logprob_chunk_size or 0) > 128:
        yield OptionChange(("logprob_chunk_size=128",), 1, _of_constraints(logprob_chunk_size=128))
    if constraints.offload_optimizer is False:
        yield OptionChange(("offload_optimizer=True",), 1, _of_constraints(offload_optimizer=True))
    if workload.kv_cache_tokens is not None and workload.engine == "native":
        yield OptionChange(("kv_cache_tokens=null",), 1, _of_workload(kv_cache_tokens=None))
    if workload.engine == "vllm" and workload.vllm.memory_share is not None:
        demand = replace(workload.vllm, memory_share=None)
        yield OptionChange(("vllm_gpu_memory_utilization=null",), 1, _of_workload(vllm=demand))
    if workload.engine == "vllm" and not workload.vllm.sleeps:
        demand = replace(workload.vllm, sleeps=True)
        yield OptionChange(("vllm_enable_sleep_mode=True",), 1, _of_workload(vllm=demand))


def _shorter(option: str, tokens: int, field: str) -> list[OptionChange]:
    """Changes that halve a length once, twice and three times."""
    halves = [(tokens >> times, 2 + 2 * times) for times in (1, 2, 3) if tokens >> times >= SHORTEST]
    return [OptionChange((f"{option}={half}",), cost, _of_workload(**{field: half})) for half, cost in halves]


def _moments(case: Case, optim: str) -> int:
    return sum(map(MOMENTS_BYTES[optim], case.shapes.trained_sizes))


def _of_workload(**changes: object) -> Callable[[Case], Case]:
    return lambda case: replace(case, workload=replace(case.workload, **changes))  # type: ignore[arg-type]


def _of_constraints(**changes: object) -> Callable[[Case], Case]:
    return lambda case: replace(case, constraints=replace(case.constraints, **changes))  # type: ignore[arg-type]
