"""One rank of the cases in test_fully_sharded.py: `fully_sharded_worker.py <directory>`.

Models without a layout, split over two ranks by FSDP2, beside the same models whole in one process. The
largest differences go into `<directory>/<rank>.json`, whole runs into directories of their own.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
import small_runs
from engine_models import greedy_completions, make_prompts
from peft import LoraConfig, get_peft_model
from test_policy import make_policy, make_samples, objective, plain, plain_loss
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from colocate.engines.transformers_engine import TransformersEngine
from colocate.parallel.mesh import Mesh
from colocate.policy import policy as policy_module
from colocate.policy.model.loading import enable_gradient_checkpointing
from colocate.policy.model.precision import cast_to_bf16
from colocate.policy.reference import make_reference
from colocate.weights.fully_sharded import shard_fully
from colocate.weights.layouts import WeightPart
from colocate.weights.source import WeightSource
from colocate.weights.weight_parts import local_part, splits_of, whole_tensor

CPU = torch.device("cpu")
COMMON = dict(vocab_size=97, max_position_embeddings=63, hidden_size=32, num_hidden_layers=3)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": dict(COMMON, num_attention_heads=4, initializer_range=0.2),  # tied, matrices transposed
    "gpt_neox": dict(COMMON, num_attention_heads=4, intermediate_size=49, initializer_range=0.2),  # untied
    "opt": dict(COMMON, num_attention_heads=4, ffn_dim=49, word_embed_proj_dim=32, init_std=0.2),
}
"""Of none of their numbers of rows is every one even."""
ROUTED: dict[str, Any] = dict(
    COMMON, num_attention_heads=4, num_key_value_heads=4, head_dim=8, intermediate_size=48,
    moe_intermediate_size=16, first_k_dense_replace=1, n_routed_experts=3, num_experts_per_tok=3, n_group=1,
    topk_group=1, initializer_range=0.2,
)  # fmt: skip
"""A mixture whose routers transformers keeps in float32; every token goes to all experts."""
CASES = ["gpt2", "gpt_neox", "opt-lora"]


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    ends: dict[str, Any] = dict(pad_token_id=0, eos_token_id=1, bos_token_id=1)
    family, _, adapter = family.partition("-")
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(FAMILIES | {"glm4_moe": ROUTED})[family], **ends)
    )
    if adapter:
        model = get_peft_model(
            model, LoraConfig(r=1, target_modules=["q_proj", "fc2"], init_lora_weights=False)
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.modules():
        if hasattr(layer, "dropout") and isinstance(layer.dropout, float):
            layer.dropout = 0.0
    return model.train()


def shard(model: Any, mesh: Mesh) -> Any:
    assert mesh.weight_mesh is not None
    shard_fully(model, WeightPart(mesh.weight_part, mesh.num_weight_parts), mesh.weight_mesh, CPU)
    return model


def largest(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    return max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in pairs)


def steps(mesh: Mesh, family: str) -> Iterator[tuple[str, float]]:
    """Three clipped steps by a policy over parts, beside one process with the samples of all ranks.

    Ranks have other numbers of micro-batches, and in the second step one of them has no sample.
    """
    lengths, num_ranks, rank = [(3, 5), (9, 2), (2, 12), (6, 6)], dist.get_world_size(), dist.get_rank()
    samples = [make_samples(lengths[: 4 - r], seed=r) for r in range(num_ranks)]
    whole = make_model(family)
    parts = copy.deepcopy(whole)
    if family == "gpt_neox":
        enable_gradient_checkpointing(parts)
    parts = shard(parts, mesh)
    options: dict[str, Any] = dict(max_grad_norm=1.0, learning_rate=0.1, budget=16)
    start = copy.deepcopy(whole)
    one = make_policy(whole, reference=make_reference(whole), **options)
    policy = make_policy(parts, reference=make_reference(parts), mesh=mesh, **options)
    for step in range(3):
        of_ranks = samples[:1] + [[]] * (num_ranks - 1) if step == 1 else samples
        everyones = [  # the gradient is the mean over ranks
            replace(s, loss_weight=s.loss_weight / num_ranks, entropy_weight=s.entropy_weight / num_ranks)
            for of_rank in of_ranks
            for s in of_rank
        ]
        if step == 0:
            plain_loss(start, everyones).backward()  # by nothing of this project
            gradients = [p.grad for p in start.parameters() if p.grad is not None]
            expected = torch.nn.utils.get_total_norm(gradients).item()
        with mock.patch.object(dist, "get_world_size", lambda *_: 1):  # the policy of one process
            theirs = one.update(everyones, objective)
        mine = policy.update(of_ranks[rank], objective)
        losses = mine.loss.clone()
        dist.all_reduce(losses)
        yield f"loss {step}", (losses / num_ranks - theirs.loss).abs().item()
        norms = [update.metrics.compute()["grad_norm"] for update in (mine, theirs)]
        assert norms[1] > 1.1
        yield f"gradient norm {step}", abs(norms[0] / norms[1] - 1)
        if step == 0:
            yield "gradient norm by autograd", abs(norms[0] / expected - 1)
    own = samples[rank]
    got = policy.logprobs(own)
    yield "log-probs", largest((a, b) for (a, _), (b, _) in zip(got, one.logprobs(own), strict=True))
    with torch.no_grad():
        yield "own log-probs", largest((a, b) for (a, _), (b, _) in zip(got, plain(whole, own), strict=True))
    yield "reference", largest(zip(policy.reference_logprobs(own), one.reference_logprobs(own), strict=True))
    splits, moved = splits_of(parts), 0.0
    kept = 0
    for key, before in start.named_parameters():
        parameter, mine = whole.get_parameter(key), local_part(parts.get_parameter(key))
        kept += mine.numel()
        yield key, largest(iter([(splits[key].of_full(parameter.detach()), mine)]))
        moved = max(moved, (parameter - before).abs().max().item())
    assert moved > 1e-2
    num_parameters = sum(p.numel() for p in start.parameters())
    assert 0.45 < kept / num_parameters < 0.55
    yield from engines(parts, whole)
    yield (
        "log-probs after a rollout",
        largest((a, b) for (a, _), (b, _) in zip(policy.logprobs(own), one.logprobs(own), strict=True)),
    )


def engines(parts: Any, whole: Any) -> Iterator[tuple[str, float]]:
    """What an engine with the trainer's weights draws, and what one with its own copy is given."""
    rank = dist.get_rank()
    # Ranks have other numbers of batches, of other lengths.
    prompts = make_prompts([3, 7, 5, 4][2 * (rank % 2) :], seed=rank)
    drawn = []
    for model in (parts, whole):
        engine = TransformersEngine(model, pad_token_id=0, max_num_seqs=2)
        engine.wake_up()
        if model is parts:
            assert engine.rollout_weight_bytes == sum(p.nbytes for p in whole.parameters())
        drawn.append(greedy_completions(engine, prompts, 9 + 3 * rank))
        engine.sleep()
        assert engine.rollout_weight_bytes == 0
    yield "greedy tokens", float(drawn[0] != drawn[1])
    published = dict(WeightSource(parts, 4096).tensors())
    is_adapted = hasattr(whole, "peft_config")
    expected = dict((copy.deepcopy(whole).merge_and_unload() if is_adapted else whole).named_parameters())
    assert (
        published.keys() == expected.keys() and WeightSource(parts).tied_head == WeightSource(whole).tied_head
    )
    yield "published", largest((published[name], expected[name]) for name in expected)


def bf16(mesh: Mesh, family: str, types: set[torch.dtype]) -> Iterator[tuple[str, float]]:
    """A step on bf16 weights: masters beside those of one process, by the largest change of one."""
    samples, num_ranks = make_samples([(3, 5), (9, 2), (2, 12)]), dist.get_world_size()
    whole = make_model(family)
    cast_to_bf16(whole)
    parts = shard(copy.deepcopy(whole), mesh)
    options: dict[str, Any] = dict(max_grad_norm=1.0, learning_rate=1.0, budget=16)
    one, policy = make_policy(whole, **options), make_policy(parts, mesh=mesh, **options)
    before = {n: w.clone() for n, w in one.optimizer.state_dict()["weights"].items()}
    with mock.patch.object(dist, "get_world_size", lambda *_: 1):
        one.update(samples, objective)
    own = [replace(s, loss_weight=s.loss_weight * num_ranks, entropy_weight=s.entropy_weight * num_ranks)
           for s in samples[dist.get_rank() :: num_ranks]]  # fmt: skip
    policy.update(own, objective)
    expected, got = one.optimizer.state_dict()["weights"], policy.optimizer.tensors()
    change = max((expected[name] - before[name]).abs().max().item() for name in expected)
    assert change > 1e-2
    wholes = {name: whole_tensor(got[f"weights/{name}"]) for name in expected}
    assert {p.dtype for p in parts.parameters()} == types
    assert {w.dtype for w in wholes.values()} == {torch.float32}
    # Ranks sum gradients that were rounded to 8 bits one by one.
    yield "masters", largest((wholes[n], expected[n]) for n in expected) / change / 1000
    rounded = ((local_part(p), local_part(got[f"weights/{n}"]).to(p)) for n, p in parts.named_parameters())
    yield "rounded masters", largest(rounded)


OPTIONS: dict[str, Any] = dict(
    model="gpt2", disable_dropout=True, max_steps=5, learning_rate=3e-3, loss_type="dapo", num_iterations=2,
    beta=0.1,
    adam_epsilon=1e-4,  # keys' biases have no gradient but rounding, which must not be made a step
    gradient_accumulation_steps=1, save_strategy="steps", save_steps=3,
)  # fmt: skip


ADAPTED: dict[str, Any] = dict(
    model="gpt_neox",
    max_steps=2,
    save_steps=2,
    peft_config=LoraConfig(r=2, target_modules=["query_key_value"]),
)


class StopAfterThreeSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def build(directory: Path, num_ranks: int, **options: Any) -> Any:
    options = OPTIONS | options
    model = small_runs.make_model(options.pop("model"), vocab_size=29, max_position_embeddings=63)
    return small_runs.make_trainer(
        directory, model=model, per_device_train_batch_size=4 // num_ranks, **options
    )


def run(directory: Path) -> None:
    """Five steps in one go, and as three and two."""
    trainer = build(directory / "run", 2, shard=2)
    trainer.train()
    trainer.save_model()
    build(directory / "adapter", 2, shard=2, **ADAPTED).train()
    build(directory / "resumed", 2, shard=2, callbacks=[StopAfterThreeSteps]).train()
    build(directory / "resumed", 2, shard=2).train(resume_from_checkpoint=True)
    best = build(directory / "best", 2, shard=2, **small_runs.ends_with_the_first_step())
    best.train()
    best.save_model()


def refusals(directory: Path) -> dict[str, str]:
    """What is said of runs that cannot be split this way, by name."""
    cases: dict[str, dict[str, Any]] = {
        "adapter": dict(peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)),
        "server": dict(engine="vllm_server"),
        "native": dict(engine="native"),
        "together": dict(decode_shard=2),
    }
    told = {}
    for name, options in cases.items():
        try:
            build(directory / name, 2, shard=2, **options)
            told[name] = ""
        except ValueError as error:
            told[name] = str(error)
    try:
        build(directory / "saving", 2, shard=2).model.save_pretrained(directory / "saving")
    except RuntimeError as error:
        told["saving"] = str(error)
    return told


def failure(directory: Path) -> str:
    """What a run says of which rank 1 has no memory left in a pass of the second update."""
    trainer = build(directory / "failed", 2, shard=2)
    forward = policy_module.padded_hidden_states

    def failing(*args: Any) -> Tensor:
        if dist.get_rank() == 1 and trainer.state.global_step == 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("full")
        return forward(*args)

    with mock.patch.object(policy_module, "padded_hidden_states", failing):
        try:
            trainer.train()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh.of("cpu", 2)
    results: dict[str, Any] = {family: dict(steps(mesh, family)) for family in CASES}
    results["bf16"] = dict(bf16(mesh, "gpt2", {torch.bfloat16}))
    results["bf16, routers in float32"] = dict(bf16(mesh, "glm4_moe", {torch.bfloat16, torch.float32}))
    run(directory)
    results["refusals"] = refusals(directory)
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    (directory / f"{dist.get_rank()}.txt").write_text(failure(directory))
    sys.stdout.flush()
    os._exit(0)  # as a run ends that has failed: rank 1 does not say goodbye to rank 0


if __name__ == "__main__":
    main()
