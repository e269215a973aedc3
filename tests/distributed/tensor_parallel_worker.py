"""Processes that split the weights and decode together, over gloo, for `test_tensor_parallel.py`.

Every process writes what it was given, and what all of them drew, as `<case>-<rank>.pt`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from engine_models import make_lora, make_model, make_prompts, randomise_adapters

from colocate.engines.native import all_reduce, capacity, tensor_parallel
from colocate.engines.native import engine as native_engine
from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.gathered_engine import GatheredEngine
from colocate.engines.native.model_runner import ModelRunner
from colocate.engines.native.torch_backend import TorchBackend, product
from colocate.parallel.mesh import DecodeMesh, Mesh
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.adapters import AdaptedLinear
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

MODELS: dict[str, Callable[[], Any]] = {
    # Parts of 512 and 256 tokens: whole blocks of the sampler. Biases everywhere, also of o and down.
    "qwen2": lambda: make_model("qwen2", vocab_size=1024, num_key_value_heads=4),
    "llama": lambda: make_lora("llama-biases", vocab_size=1024, num_key_value_heads=4),
    "qwen3": lambda: make_lora("qwen3-tied", vocab_size=1024, num_key_value_heads=4),
    # Parts of a block and 44 tokens; a window, so that attention does not see all of a prompt.
    "odd": lambda: make_model("qwen2-window", vocab_size=600, num_key_value_heads=4),
    "tied": lambda: make_model("qwen3-tied", vocab_size=1024, num_key_value_heads=4),
}

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=10, temperature=0),
    "drawn": SamplingParams(max_tokens=10, temperature=0.9, seed=2**40 + 3),
    "filtered": SamplingParams(max_tokens=10, seed=5, top_k=50, top_p=0.95, min_p=0.01),
    "penalty": SamplingParams(max_tokens=10, temperature=0, repetition_penalty=1.7),
}
SAMPLINGS["stopped"] = SamplingParams(
    max_tokens=10, temperature=0.9, seed=2**40 + 3, stop_token_ids=tuple(range(0, 600, 9))
)


def share_of(rank: int, num_ranks: int) -> list[Prompt]:
    """A rank's part of `all_prompts`: groups span ranks, and of four ranks the last one has none."""
    prompts = all_prompts()
    members = [(prompt, member) for prompt in prompts for member in prompt.samples]
    num_sharing = min(num_ranks, 3)
    own = members[rank * len(members) // num_sharing : (rank + 1) * len(members) // num_sharing]
    parts = []
    for prompt in prompts:
        held = [member for other, member in own if other is prompt]
        if held:
            limits = None if prompt.max_tokens is None else tuple(prompt.max_tokens[m] for m in held)
            parts.append(Prompt(prompt.token_ids, prompt.key, range(held[0], held[-1] + 1), limits))
    return parts


def all_prompts() -> list[Prompt]:
    """Prompts of ragged lengths, some with limits."""
    return [
        Prompt(prompt.token_ids, prompt.key, range(3), None if prompt.key % 2 else (9, 1, 10))
        for prompt in make_prompts([1, 40, 9, 16, 6])
    ]


class Recorder:
    """What all ranks drew together in the last rollout, and how many tokens they prefilled for it."""

    def __init__(self) -> None:
        self.drawn: list[Completion] = []
        self.num_prefilled = 0
        finish, prefill = NativeEngine._finish, ModelRunner.prefill

        def recorded(engine: NativeEngine) -> None:
            finish(engine)
            ended = engine._submissions.ended
            self.drawn = [ended[number] for number in sorted(ended)]

        def counted(runner: ModelRunner, items: Any) -> Any:
            self.num_prefilled += sum(len(item.token_ids) - item.num_cached for item in items)
            return prefill(runner, items)

        NativeEngine._finish, ModelRunner.prefill = recorded, counted  # type: ignore[method-assign]


def plain(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


def check_sums(engine: NativeEngine) -> list[bool]:
    """From now on every sum of the engine is compared over its ranks; returns where the answers appear."""
    equal: list[bool] = []
    parallel: Any = engine._parallel
    added = parallel.sum

    def checked(partial: torch.Tensor) -> torch.Tensor:
        total = added(partial)
        equal.append(parallel._sum.is_equal_everywhere(total))
        return total

    parallel.sum = checked
    return equal


TIGHT = ("greedy", "stopped")
"""What is drawn with few rows, pages and tokens of a prefill; the rest has room."""


@contextmanager
def imitated_symmetric_memory() -> Iterator[None]:
    """Sums take one shot up to 4 rows, two shots up to 32, and gloo beyond; gloo adds up in place of a GPU.

    As on a GPU, one shot leaves the partial result where it is, and two shots write the sum over it.
    """

    def one_shot(x: torch.Tensor, how: str, name: str) -> torch.Tensor:
        return two_shot(x.clone(), how, name)

    def two_shot(x: torch.Tensor, how: str, name: str) -> torch.Tensor:
        assert how == "sum"
        dist.all_reduce(x, group=_resolve_process_group(name))
        return x

    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(torch.ops.symm_mem, "one_shot_all_reduce", one_shot)
        patch(torch.ops.symm_mem, "two_shot_all_reduce_", two_shot)
        patch(_symmetric_memory, "empty", torch.empty)
        patch(_symmetric_memory, "rendezvous", lambda tensor, group: None)
        patch(all_reduce, "ONE_SHOT_BYTES", 4 * 32 * 4)
        patch(tensor_parallel, "make_sum", all_reduce.SymmetricSum)
        yield


class Stacking(TorchBackend):
    """Multiplies with the rollout's own copy of the adapters' A, as the kernels do, and never with PEFT's."""

    stacks_adapters = True

    def linear(
        self, x: torch.Tensor, adapted: AdaptedLinear, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        stack = adapted.stack
        assert stack is not None and adapted.stacked_a is not None
        output = product(x, adapted.weight, adapted.bias, out)
        reduced = F.linear(x, adapted.stacked_a).split(stack.padded_rank, dim=1)
        for t, columns, adapter in zip(reduced, stack.columns, stack.adapters, strict=True):
            update = F.linear(t[:, : len(adapter.a)], adapter.b)
            output[:, columns] += adapter.scaling * update
        return output


def after_a_step(engine: NativeEngine, generate: Callable[[NativeEngine, str], None]) -> list[bool]:
    """Draw again with other adapters, before and after sleep; what held of the copy of A."""
    assert engine._model is not None
    identity, held = engine._decoder.runner.identity(), engine.rollout_weight_bytes
    torch.manual_seed(3)
    randomise_adapters(engine._model)
    generate(engine, "greedy")
    is_in_place = engine._decoder.runner.identity() == identity
    is_all = held == engine.rollout_weight_bytes > 0
    engine.sleep()
    is_freed = engine.rollout_weight_bytes == 0
    engine.wake_up()
    generate(engine, "drawn")
    return [is_in_place, is_all, is_freed, engine.rollout_weight_bytes == held]


def rollouts(name: str, mesh: Mesh, recorder: Recorder) -> dict[str, Any]:
    model = MODELS[name]()
    whole_page_bytes = NativeEngine(model, page_size=4)._cache.page_bytes(torch.float32)
    split_weights(model, WeightPart(mesh.weight_part, mesh.num_weight_parts))
    prompts = share_of(mesh.weight_part, mesh.num_weight_parts)
    found: dict[str, Any] = {}

    def generate(engine: NativeEngine, kind: str) -> None:
        found[kind] = plain(engine.generate(prompts, SAMPLINGS[kind])), plain(recorder.drawn)

    # Five rows for fifteen completions; pages for one and a half sequences; prompts in pieces of 7 tokens.
    tight = NativeEngine(model, group=mesh.weight_group, max_num_seqs=5, page_size=4, kv_cache_tokens=76)
    tight._backend.max_prefill_tokens = 7
    tight.wake_up()
    for kind in TIGHT:
        generate(tight, kind)
    found["page_bytes"] = [tight._cache.page_bytes(torch.float32), whole_page_bytes]
    tight.close()
    roomy = NativeEngine(model, group=mesh.weight_group, max_num_seqs=32, page_size=4)
    roomy.wake_up()
    recorder.num_prefilled = 0
    found["sums"] = check_sums(roomy)
    generate(roomy, "drawn")
    found["num_prefilled"] = recorder.num_prefilled
    del roomy._parallel.sum
    for kind in ("filtered", "penalty"):
        generate(roomy, kind)
    if isinstance(roomy._backend, Stacking):
        earlier = dict(found)
        found["copy of A"] = after_a_step(roomy, generate)
        found["after a step"] = {kind: found[kind][1] for kind in ("greedy", "drawn")}
        found |= earlier
    roomy.close()
    return found


def without_memory(mesh: Mesh, recorder: Recorder) -> dict[str, Any]:
    """One rank has little memory for pages, and none in its third MLP; then after a step all go on."""
    model = MODELS["qwen2"]()
    part = WeightPart(mesh.weight_part, mesh.num_weight_parts)
    split_weights(model, part)
    engine = NativeEngine(model, group=mesh.weight_group, max_num_seqs=8, page_size=4)
    engine._backend.max_prefill_tokens = 1024
    usable = capacity._usable_bytes
    if part.index == 1:
        page_bytes = engine._cache.page_bytes(torch.float32)
        capacity._usable_bytes = lambda held, device: 30 * page_bytes
    engine.wake_up()
    gated, num_calls = engine._backend.gated_linear, 0

    def failing(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if part.index == 1 and num_calls == 3:
            raise torch.OutOfMemoryError("injected")
        return gated(*arguments, **options)

    engine._backend.gated_linear = failing  # type: ignore[method-assign]
    prompts = share_of(mesh.weight_part, mesh.num_weight_parts)
    engine.generate(prompts, SAMPLINGS["drawn"])
    found: dict[str, Any] = {
        "drawn": plain(recorder.drawn),
        "max_prefill": engine._backend.max_prefill_tokens,
    }
    capacity._usable_bytes = usable
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.generate(prompts, SAMPLINGS["greedy"])
    found["after a step"] = plain(recorder.drawn)
    found["nothing"] = engine.generate([], SAMPLINGS["greedy"])
    found["errors"] = [
        message_of(engine.generate, prompts, SamplingParams(max_tokens=9 + part.index)),
        message_of(engine.generate, [] if part.index else [Prompt((), 7)], SAMPLINGS["greedy"]),
        message_of(NativeEngine, model),
    ]
    return found


def gathered(name: str, mesh: Mesh, num_parts: int) -> dict[str, Any]:
    """What a rank gets that decodes with `num_parts` gathered parts, and the bytes that these take."""
    model, part = MODELS[name](), WeightPart(mesh.weight_part, mesh.num_weight_parts)
    split_weights(model, part)
    decode = DecodeMesh.of(mesh, num_parts)
    engine = GatheredEngine(model, decode, max_num_seqs=32, page_size=4)
    prompts, found = share_of(part.index, part.count), {"asleep": [engine.rollout_weight_bytes]}
    engine.wake_up()
    found["awake"] = [engine.rollout_weight_bytes]
    for kind in ("greedy", "drawn"):
        found[kind] = plain(engine.generate(prompts, SAMPLINGS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.sleep()
    found["asleep"].append(engine.rollout_weight_bytes)
    if part.index == 1:
        storage = engine._gathered._storage
        engine._gathered._storage = mock.Mock()
        effects = torch.OutOfMemoryError("injected"), storage.untyped_storage()
        engine._gathered._storage.untyped_storage.side_effect = effects
    try:
        engine.wake_up()
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)
    if part.index == 1:
        engine._gathered._storage = storage
    found["asleep"].append(engine.rollout_weight_bytes)
    engine.wake_up()
    found["after a step"] = plain(engine.generate(prompts, SAMPLINGS["greedy"]))
    if num_parts == 1:  # a rank that decodes alone may do so in its own time
        numbers = engine.submit(prompts, SAMPLINGS["greedy"])
        turns: dict[int, Completion] = {}
        while engine.is_busy:
            turns |= engine.poll()
        found["turns"] = plain([turns[number] for number in numbers])
    engine.close()
    found["asleep"].append(engine.rollout_weight_bytes)
    return found


def message_of(work: Callable[..., Any], *arguments: Any) -> str:
    try:
        work(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    # Whatever PyTorch deprecates would warn the user on every rank.
    warnings.filterwarnings("error", r".*torch\.distributed\.", FutureWarning)
    dist.init_process_group("gloo")
    rank, recorder = dist.get_rank(), Recorder()
    by_two, by_four = Mesh.of("cpu", 2), Mesh.of("cpu", 4)
    cases = ("qwen2", by_two), ("qwen3", by_two), ("odd", by_two), ("llama", by_four)
    for name, mesh in cases:
        with ExitStack() as stack:
            if name == "qwen3":
                stack.enter_context(imitated_symmetric_memory())
                stack.enter_context(mock.patch.object(native_engine, "backend_for", lambda _: Stacking()))
            found = rollouts(name, mesh, recorder)
        torch.save(found, directory / f"{name}-{mesh.num_weight_parts}-{rank}.pt")
    torch.save(without_memory(by_two, recorder), directory / f"memory-{rank}.pt")
    for name, mesh, num_parts in (("qwen2", by_two, 1), ("tied", by_four, 1), ("qwen2", by_four, 2)):
        file = f"gathered-{name}-{mesh.num_weight_parts}-{num_parts}-{rank}.pt"
        torch.save(gathered(name, mesh, num_parts), directory / file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
