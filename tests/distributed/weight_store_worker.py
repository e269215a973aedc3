"""One rank of the cases in test_weight_store.py: `weight_store_worker.py <directory>`.

Every rank has samples of its own. What the stack makes of split weights is compared with transformers' own
modules on the whole model. The largest differences go into `<directory>/<number of ranks>.<rank>.json`.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import engine_models
from peft import LoraConfig, get_peft_model
from test_policy import make_policy, make_samples, objective, plain, plain_loss

from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.experience import ranks
from colocate.parallel.mesh import Mesh
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import output_head
from colocate.policy.policy import Policy, UpdateResult
from colocate.policy.reference import make_reference
from colocate.policy.stack import layer as layer_module
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.layer import DecoderLayer
from colocate.policy.stack.stack import DecoderStack
from colocate.policy.stack.weight_store import WeightStore, gather_full
from colocate.weights.layouts import WeightPart, layout_for
from colocate.weights.weight_parts import split_weights, splits_of, storage_of

BETA = 0.5
TEMPERATURE = 0.8
FAMILIES = ["llama-biases", "gemma3_text", "qwen3"]


def make_model(name: str, *, lora: bool = False) -> Any:
    sizes = dict(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3)
    model = engine_models.make_model(name, **sizes).train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))
        torch.manual_seed(2)
        engine_models.randomise_adapters(model)
    return model


class Stacked:
    """A model computed by the stack."""

    def __init__(self, model: Any, store: WeightStore | None = None) -> None:
        self.model = model
        self.stack = DecoderStack(model, HostActivations(), store=store)

    def logprobs(self, samples: list[Any], policy: Any = "keep", **options: Any) -> tuple[Tensor, Tensor]:
        hidden = self.stack.hidden_states(self.stack.pack(samples), policy)
        targets = torch.cat([sample.completion_ids for sample in samples])
        head = self.stack.whole(output_head(self.model))
        return token_logprobs(hidden, targets, head, temperature=TEMPERATURE, chunk_size=7, **options)

    def backward(self, samples: list[Any], policy: Any) -> Tensor:
        """The log-probs [N] of the samples; gradients of the loss of `plain_loss` are added to the sums."""
        logprobs, entropies = self.logprobs(samples, policy)
        lengths = [len(sample.completion_ids) for sample in samples]
        loss = torch.zeros(())
        for sample, p, h in zip(samples, logprobs.split(lengths), entropies.split(lengths), strict=True):
            ratio = (p - p.detach()).exp()
            loss = loss - (ratio * sample.completion_mask).sum() * sample.advantage * sample.loss_weight
            loss = loss - (h * sample.completion_mask).sum() * sample.entropy_weight
        loss.backward()
        self.stack.settle()
        return logprobs.detach()


class Split(Stacked):
    """A model's part on this rank, with the sums of its gradients."""

    def __init__(self, whole: Any, mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        split_weights(model, WeightPart(mesh.weight_part, mesh.num_weight_parts))
        self.sums: dict[int, Tensor] = {}
        self.group = mesh.weight_group
        self.store = WeightStore(layout_for(model), self.group, self._add)
        super().__init__(model, self.store)

    def _add(self, parameter: Tensor, value: Tensor) -> None:
        assert value.shape == storage_of(parameter).shape
        self.sums[id(parameter)] = self.sums.get(id(parameter), 0) + value

    def gradients(self) -> dict[str, Tensor]:
        """By name the gradient of this rank's part, as the module holds it, summed over the ranks."""
        result = {}
        for (name, parameter), split in zip(
            self.model.named_parameters(), splits_of(self.model).values(), strict=True
        ):
            if not parameter.requires_grad:
                continue
            if split.dim is None:
                result[name] = parameter.grad.clone()
                dist.all_reduce(result[name], group=self.group)
            else:
                assert parameter.grad is None
                total = self.sums[id(parameter)]
                result[name] = total.t() if split.dim == 1 else total
        return result


def expected_gradients(whole: Any, samples: list[Any], ranks: list[int] | None = None) -> dict[str, Tensor]:
    """The gradients of the whole model, summed over the samples of `ranks` (None: of all)."""
    whole.zero_grad()
    plain_loss(whole, samples).backward()
    result = {}
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            result[name] = parameter.grad.clone()
            if ranks is not None and dist.get_rank() not in ranks:
                result[name].zero_()
            dist.all_reduce(result[name])
    return result


def difference(got: dict[str, Tensor], whole: dict[str, Tensor], split: Split) -> float:
    """The largest difference of a part's gradient, over the largest gradient of the model."""
    assert got.keys() == whole.keys()
    largest = max(gradient.abs().max().item() for gradient in whole.values())
    assert largest > 1e-2
    splits = splits_of(split.model)
    return max((got[n] - splits[n].of_full(whole[n])).abs().max().item() for n in whole) / largest


def own_samples() -> list[Any]:
    lengths = [(3, 5), (1, 1), (9, 2), (2, 12), (6, 6)]
    samples = make_samples(lengths[: 5 - dist.get_rank()], seed=dist.get_rank())
    return samples


def gradients(mesh: Mesh, name: str, policy: str, *, lora: bool = False) -> Iterator[tuple[str, float]]:
    """Two micro-batches, the MLP of the recomputed one in tiles."""
    whole, samples = make_model(name, lora=lora), own_samples()
    split = Split(whole, mesh)
    with mock.patch.object(layer_module, "MLP_TILE_TOKENS", 5):
        first = split.backward(samples[:1], policy)
        rest = split.backward(samples[1:], policy)
    want = torch.cat([logprobs for logprobs, _ in plain(whole, samples)])
    yield "log-probs", (torch.cat([first, rest]) - want).abs().max().item()
    yield "gradients", difference(split.gradients(), expected_gradients(whole, samples), split)
    if lora:
        assert not split.sums


def bf16_gradients(mesh: Mesh) -> Iterator[tuple[str, float]]:
    """Split bf16 weights beside whole ones, each rank's gradients rounded once and then added in float32."""
    whole, samples = make_model("qwen2").to(torch.bfloat16), own_samples()
    split = Split(whole, mesh)
    split.backward(samples, "keep")
    assert {total.dtype for total in split.sums.values()} == {torch.float32}
    Stacked(whole).backward(samples, "keep")
    want = {}
    for name, parameter in whole.named_parameters():
        want[name] = parameter.grad.float()
        dist.all_reduce(want[name])
    # Of thousands of values a few are rounded the other way: their products are summed in another order.
    yield "gradients", difference({n: g.float() for n, g in split.gradients().items()}, want, split) / 1000


def full_parameters(mesh: Mesh, name: str) -> Iterator[tuple[str, float]]:
    whole = make_model(name)
    split = Split(whole, mesh)
    splits = splits_of(split.model)
    largest = 0.0
    for key, parameter in split.model.named_parameters():
        full = gather_full(parameter, splits[key], mesh.weight_group)
        largest = max(largest, (full - whole.get_parameter(key)).abs().max().item())
    yield "weights", largest


def buffers(mesh: Mesh) -> Iterator[tuple[str, float]]:
    """Bytes of the buffers over those of one layer's matrices: during a pass, and after it."""
    whole = make_model("qwen3")
    split = Split(whole, mesh)
    layer = sum(p.nbytes for p in whole.model.layers[0].parameters() if p.ndim == 2)
    seen: list[int] = []
    forward = DecoderLayer.forward

    def watch(self: DecoderLayer, *arguments: Any) -> Any:
        seen.append(split.store.num_bytes)
        return forward(self, *arguments)

    with mock.patch.object(DecoderLayer, "forward", watch), torch.no_grad():
        split.logprobs(own_samples())
    assert len(seen) == 3
    yield "during", max(seen) / layer
    split.stack.release()
    yield "after", split.store.num_bytes / layer


def whole_head(mesh: Mesh) -> Iterator[tuple[str, float]]:
    """Whole embeddings and heads that are still in memory when a layer goes backward."""
    for lora, modes in ((False, ["later", "kept"]), (True, ["later", "at_once"])):
        split = Split(make_model("qwen3", lora=lora), mesh)
        for mode in modes:
            gathered: list[StorageWeakRef] = []
            alive: list[int] = []
            gather, backward = WeightStore.gather, DecoderLayer.backward

            def note(*arguments: Any, gather: Any = gather, gathered: Any = gathered) -> Tensor:
                full: Tensor = gather(*arguments)
                gathered.append(StorageWeakRef(full.untyped_storage()))
                return full

            def look(
                *arguments: Any, backward: Any = backward, gathered: Any = gathered, alive: Any = alive
            ) -> Any:
                until = time.monotonic() + 5  # gloo's threads let go of a tensor a little later
                while not all(r.expired() for r in gathered) and time.monotonic() < until:
                    time.sleep(0.001)
                alive.append(sum(not reference.expired() for reference in gathered))
                return backward(*arguments)

            with (
                mock.patch.object(WeightStore, "gather", note),
                mock.patch.object(DecoderLayer, "backward", look),
            ):
                logprobs, _ = split.logprobs(
                    own_samples(), entropy_gradient=mode == "later", keep_softmax=mode == "kept"
                )
                logprobs.sum().backward()
            split.stack.release()
            assert len(gathered) == 2 and len(alive) == 3
            yield f"{mode}{' lora' if lora else ''}", max(alive)


def ghost(mesh: Mesh) -> Iterator[tuple[str, float]]:
    """The last rank has no second micro-batch, and goes along with the others."""
    whole, samples = make_model("qwen2"), own_samples()
    split = Split(whole, mesh)
    last = dist.get_rank() == dist.get_world_size() - 1
    split.backward(samples[:1], "full")
    if last:
        split.store.begin()
        split.store.finish(has_backward=True)
    else:
        split.backward(samples[1:2], "full")
    want = expected_gradients(whole, samples[: 1 if last else 2])
    yield "gradients", difference(split.gradients(), want, split)
    with torch.no_grad():
        if last:
            split.store.begin()
            split.store.finish(has_backward=False)
        else:
            split.logprobs(samples)


def interrupted(mesh: Mesh) -> Iterator[tuple[str, float]]:
    """An exception inside a layer's backward pass, and one inside a forward pass; then all is repeated."""
    whole, samples = make_model("qwen3"), own_samples()
    split = Split(whole, mesh)
    for where in ("_mlp_backward", "forward"):
        calls = 0
        method: Callable[..., Any] = getattr(DecoderLayer, where)

        def fail(*arguments: Any, method: Any = method, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise torch.OutOfMemoryError("injected")
            return method(*arguments, **options)

        with mock.patch.object(DecoderLayer, where, fail):
            try:
                split.backward(samples, "keep")
            except torch.OutOfMemoryError:
                split.stack.release()
        assert calls == 2
        split.sums.clear()
        split.model.zero_grad()
    split.backward(samples, "keep")
    yield "gradients", difference(split.gradients(), expected_gradients(whole, samples), split)


def steps(mesh: Mesh, name: str, *, lora: bool = False, beta: float = 0.0) -> Iterator[tuple[str, float]]:
    """Three clipped steps by a policy over parts, beside one process with the samples of all ranks.

    With one part every rank has all weights, and rows of the optimizer's state.
    """
    lengths, num_ranks = [(3, 5), (9, 2), (2, 12), (6, 6)], dist.get_world_size()
    # Ranks have other numbers of micro-batches.
    samples = [make_samples(lengths[: 4 - rank], seed=rank) for rank in range(num_ranks)]
    own = samples[dist.get_rank()]
    everyones = [  # the gradient is the mean over ranks
        replace(s, loss_weight=s.loss_weight / num_ranks, entropy_weight=s.entropy_weight / num_ranks)
        for of_rank in samples
        for s in of_rank
    ]
    whole = make_model(name, lora=lora)
    parts = copy.deepcopy(whole)
    if mesh.num_weight_parts > 1:
        split_weights(parts, WeightPart(mesh.weight_part, mesh.num_weight_parts))
    for model in (whole, parts):
        torch.nn.Module.to(model, torch.device("cpu", 0))  # as runs do, which undoes the fusion
    options: dict[str, Any] = dict(max_grad_norm=1.0, learning_rate=0.1, budget=16)
    one = make_policy(whole, reference=make_reference(whole, has_new_adapter=lora), **options)
    with mock.patch.object(dist, "get_world_size", lambda *_: 1):  # the policy of one process
        theirs = [update(one, everyones, beta) for _ in range(3)]
    policy = make_policy(parts, reference=make_reference(parts, has_new_adapter=lora), mesh=mesh, **options)
    mine = [update(policy, own, beta) for _ in range(3)]
    for step, (got, want) in enumerate(zip(mine, theirs, strict=True)):
        norms = [result.metrics.compute()["grad_norm"] for result in (got, want)]
        assert norms[1] > 1.1
        yield f"gradient norm {step}", abs(norms[0] / norms[1] - 1)
        loss = got.loss.clone()
        dist.all_reduce(loss)
        yield f"loss {step}", (loss / num_ranks - want.loss).abs().item()
    if beta:
        penalties = [ranks.totals(result.metrics)["kl"] for result in mine]
        expected = [result.metrics.compute()["kl"] for result in theirs]
        assert expected[-1] > 0.01  # its part of the loss is hundreds of times the tolerance
        yield "kl", max(abs(a - b) / expected[-1] for a, b in zip(penalties, expected, strict=True))
    for what, got_of, want_of in (
        ("reference", policy.reference_logprobs(own), one.reference_logprobs(own)),
        ("log-probs", [x for x, _ in policy.logprobs(own)], [x for x, _ in one.logprobs(own)]),
    ):
        ours, others = torch.cat(got_of), torch.cat(want_of)
        # Over the largest one, of several nats after these steps: processors round in other orders.
        yield what, ((ours - others).abs().max() / others.abs().max()).item()
    splits, moved = splits_of(parts), 0.0
    start = make_model(name, lora=lora)
    for key, parameter in whole.named_parameters():
        difference = (splits[key].of_full(parameter) - parts.get_parameter(key)).abs().max().item()
        moved = max(moved, (parameter - start.get_parameter(key)).abs().max().item())
        yield key, difference
    assert moved > 1e-2


def update(policy: Policy, samples: list[Any], beta: float) -> UpdateResult:
    """A step of a plain policy gradient, or with `beta` of GRPO's loss with a KL penalty."""
    if not beta:
        return policy.update(samples, objective)
    logprobs = policy.reference_logprobs(samples)
    samples = [replace(s, reference_logprobs=x) for s, x in zip(samples, logprobs, strict=True)]
    return policy.update(samples, Objective(ObjectiveParams(loss_type="grpo", beta=beta)))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    mesh = Mesh.of("cpu", num_ranks)
    results: dict[str, dict[str, float]] = {}
    for name in FAMILIES:
        results[f"{name} keep"] = dict(gradients(mesh, name, "keep"))
        results[f"{name} steps"] = dict(steps(mesh, name))
        if num_ranks == 2:
            results[f"{name} full"] = dict(gradients(mesh, name, "full"))
            results[f"{name} lora"] = dict(gradients(mesh, name, "keep", lora=True))
            results[f"{name} gathered"] = dict(full_parameters(mesh, name))
    results["qwen3 steps lora"] = dict(steps(mesh, "qwen3", lora=True))
    if num_ranks == 4:
        replicas = Mesh.of("cpu", 2)
        results["qwen2 steps replicas"] = dict(steps(replicas, "qwen2"))
        results["qwen2 steps replicas lora"] = dict(steps(replicas, "qwen2", lora=True))
    else:
        results["qwen2 steps kl"] = dict(steps(mesh, "qwen2", beta=BETA))
        results["qwen3 steps lora kl"] = dict(steps(mesh, "qwen3", lora=True, beta=BETA))
        rows = Mesh.of("cpu")
        results["qwen2 steps rows"] = dict(steps(rows, "qwen2"))
        results["qwen3 steps rows lora"] = dict(steps(rows, "qwen3", lora=True))
        results["qwen2 steps rows kl"] = dict(steps(rows, "qwen2", beta=BETA))
        results["qwen3 steps rows lora kl"] = dict(steps(rows, "qwen3", lora=True, beta=BETA))
        results["bf16"] = dict(bf16_gradients(mesh))
        results["buffers"] = dict(buffers(mesh))
        results["whole head"] = dict(whole_head(mesh))
        results["ghost"] = dict(ghost(mesh))
        results["interrupted"] = dict(interrupted(mesh))
    file = Path(sys.argv[1]) / f"{num_ranks}.{dist.get_rank()}.json"
    file.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
