"""Log-probs of tokens from hidden states, forward and backward, beside Liger and Cut Cross-Entropy.

    python -m benchmarks.kernels.logprobs --hardware h200 --peers-site DIR

DIR holds the packages `liger_kernel` and `cut_cross_entropy` (github.com/apple/ml-cross-entropy); without it
or where one of them fails, the result says so. All compute the policy-gradient loss -Σ_i A_i log p_i / N
of N tokens, and the gradients of hidden states and, if it is trained, head. Only colocate also returns the
entropies. In every case all take turns, and each repetition is kept; memory is the highest that PyTorch
allocated above the inputs, gradients included. Errors are those of the gradients on the first tokens against
float64, relative, in the Frobenius norm.

The softmax is as peaked as a trained model's: Cut Cross-Entropy leaves out blocks of small probabilities,
which of random hidden states would be all.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common.results import committed, write_result
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import OutputHead

MODELS = {"1.5b": (1536, 151_936), "7b": (3584, 152_064)}
"""Hidden size and vocabulary of Qwen2.5."""
NUM_SEQUENCES, LENGTH = 16, 1024
NUM_EXACT = 1024
"""Tokens whose gradients are compared with float64."""
REPETITIONS, WARMUP = 10, 2
CHUNK_SIZES = (1024, 2048, 4096)


class Inputs(NamedTuple):
    hidden: Tensor  # [N, hidden]
    weight: Tensor  # [V, hidden]
    targets: Tensor  # [N]
    advantages: Tensor  # [B], of N / B tokens each

    @property
    def factors(self) -> Tensor:
        """d loss / d log p, [N]."""
        num_tokens = len(self.targets)
        return -self.advantages.repeat_interleave(num_tokens // len(self.advantages)) / num_tokens

    def first(self, num_tokens: int) -> Inputs:
        return Inputs(
            self.hidden[:num_tokens].detach().requires_grad_(),
            self.weight,
            self.targets[:num_tokens],
            self.advantages,
        )


Loss = Callable[[Inputs], Tensor]


def make_inputs(hidden_size: int, vocab_size: int, num_tokens: int, trains_head: bool) -> Inputs:
    """Each hidden state points to four tokens, the target being the first.

    The others' logits are noise with a deviation of about 1, and together weigh as much as one logit of
    log V + 0.5. The target's is 6 to 10 above that, and each of the other three up to 4 below the last.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = dict(device="cuda", generator=generator)
    weight = torch.randn(vocab_size, hidden_size, **options) * 0.02
    chosen = torch.randint(vocab_size, (num_tokens, 4), **options)
    drop = torch.rand(num_tokens, 4, **options).cumsum(-1) * 4
    wanted = math.log(vocab_size) + 0.5 + 10 - drop
    hidden = torch.randn(num_tokens, hidden_size, **options) * (0.8 / 0.02 / math.sqrt(hidden_size))
    for i in range(4):
        hidden += wanted[:, i, None] / (hidden_size * 0.02**2) * weight[chosen[:, i]]
    return Inputs(
        hidden.bfloat16().requires_grad_(),
        weight.bfloat16().requires_grad_(trains_head),
        chosen[:, 0].contiguous(),
        torch.randn(NUM_SEQUENCES, **options),
    )


def ours(chunk_size: int, keep_softmax: bool = False) -> Loss:
    def loss(inputs: Inputs) -> Tensor:
        logprobs, _ = token_logprobs(
            inputs.hidden,
            inputs.targets,
            OutputHead(inputs.weight),
            chunk_size=chunk_size,
            entropy_gradient=False,
            keep_softmax=keep_softmax,
        )
        return (logprobs * inputs.factors).sum()

    return loss


def full_logits(inputs: Inputs) -> Tensor:
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(-1)
    return (log_p.gather(-1, inputs.targets[:, None])[:, 0] * inputs.factors).sum()


def liger_grpo(chunk_size: int, compiled: bool) -> Loss:
    """Liger's own GRPO loss, of `chunk_size` sequences at a time. On policy its gradient is ours."""
    module = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=compiled, use_ref_model=False, chunk_size=chunk_size, loss_type="bnpo"
    )

    def loss(inputs: Inputs) -> Tensor:
        num_sequences = len(inputs.advantages)
        targets = inputs.targets.view(num_sequences, -1)
        hidden = inputs.hidden.view(num_sequences, targets.shape[1], -1)
        return module(hidden, inputs.weight, targets, torch.ones_like(targets), inputs.advantages)[0]

    return loss


def liger_cross_entropy(chunk_mem_const: int, accum_dtype: torch.dtype | None) -> Loss:
    """Fused linear cross entropy, each token for itself; `chunk_mem_const` times the default chunk."""
    name = "liger_kernel.ops.fused_linear_cross_entropy"
    function = importlib.import_module(name).LigerFusedLinearCrossEntropyFunction
    # bias to softcap, z-loss, type of the head's sum, three more outputs, implementation, chunk
    options: tuple[Any, ...] = (None, None, -100, 0.0, 0.0, "none", None)
    options += (False, accum_dtype, False, False, False, None, None, chunk_mem_const)

    def loss(inputs: Inputs) -> Tensor:
        nll = function.apply(inputs.hidden, inputs.weight, inputs.targets, *options)[0]
        return -(nll * inputs.factors).sum()

    return loss


def cut_cross_entropy(impl: str) -> Loss:
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def loss(inputs: Inputs) -> Tensor:
        nll = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, reduction="none", impl=impl)
        return -(nll * inputs.factors).sum()

    return loss


VARIANTS: dict[str, Callable[[], Loss]] = {
    **{f"colocate, chunk {size}": lambda size=size: ours(size) for size in CHUNK_SIZES},
    "colocate, softmax kept": lambda: ours(2048, keep_softmax=True),
    "full logits": lambda: full_logits,
    "liger GRPO, 1 sequence": lambda: liger_grpo(1, compiled=True),
    "liger GRPO, 8 sequences": lambda: liger_grpo(8, compiled=True),
    "liger GRPO, 8 sequences, not compiled": lambda: liger_grpo(8, compiled=False),
    "liger cross entropy": lambda: liger_cross_entropy(1, torch.float32),
    "liger cross entropy, chunks x 8": lambda: liger_cross_entropy(8, torch.float32),
    "liger cross entropy, chunks x 8, bf16 sums": lambda: liger_cross_entropy(8, None),
    "cce": lambda: cut_cross_entropy("cce"),
    "cce_kahan_full_c": lambda: cut_cross_entropy("cce_kahan_full_c"),
    "cce_exact": lambda: cut_cross_entropy("cce_exact"),
}
"""Cut Cross-Entropy's: small gradients left out; all kept for the head; all kept."""
CHOSEN = "colocate, chunk 2048"


def run(loss: Loss, inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None
    loss(inputs).backward()


def measure(loss: Loss, inputs: Inputs) -> dict[str, float]:
    """Seconds of forward and backward, and bytes at their peak above the inputs."""
    inputs.hidden.grad = inputs.weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(loss, inputs)
    end.record()
    end.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    inputs.hidden.grad = inputs.weight.grad = None
    return {"time_s": start.elapsed_time(end) * 1e-3, "peak_bytes": peak}


def exact_gradients(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of the hidden states [N, hidden] and the head [V, hidden], in float64."""
    hidden, weight = inputs.hidden.detach().double(), inputs.weight.detach().double()
    grad = (hidden @ weight.T).softmax(-1).neg_()
    grad[torch.arange(len(grad), device=grad.device), inputs.targets] += 1
    grad *= inputs.factors.double()[:, None]
    return grad @ weight, grad.T @ hidden


def relative_error(grad: Tensor | None, exact: Tensor) -> float | None:
    if grad is None:
        return None
    # In parts: the difference in float64 would be a third matrix of the head's size.
    squares = sum(
        (a.double() - b).square().sum() for a, b in zip(grad.split(8192), exact.split(8192), strict=True)
    )
    return math.sqrt(float(squares)) / float(exact.norm())


def compare(model: str, trains_head: bool, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Every variant's errors, then all of them in turns."""
    inputs = make_inputs(*MODELS[model], NUM_SEQUENCES * LENGTH, trains_head)
    few = inputs.first(NUM_EXACT)
    case = {"model": model, "trains_head": trains_head}
    losses: dict[str, Loss] = {}
    errors: dict[str, dict[str, float | None]] = {}
    for name, build in VARIANTS.items():
        if name == "colocate, softmax kept" and not trains_head:
            continue
        try:
            loss = build()
            run(loss, few)
            exact = exact_gradients(few)
            errors[name] = {
                "hidden_error": relative_error(few.hidden.grad, exact[0]),
                "weight_error": relative_error(few.weight.grad, exact[1]),
            }
            del exact
            for _ in range(WARMUP):
                run(loss, inputs)
            losses[name] = loss
        except Exception as error:  # a peer that does not run here stops no one else
            failures[f"{model}, {'trained' if trains_head else 'frozen'} head: {name}"] = repr(error)[:500]
            print(f"{name}: {error!r}"[:500], flush=True)
            torch.cuda.empty_cache()
        few.hidden.grad = few.weight.grad = None
    rows = [
        {**case, "variant": name, "repetition": repetition, **measure(loss, inputs), **errors[name]}
        for repetition in range(REPETITIONS)
        for name, loss in losses.items()
    ]
    print(f"\n{model}, {'trained' if trains_head else 'frozen'} head, {len(inputs.targets)} tokens")
    print(f"{'':44}{'ms':>8}{'MiB':>8}{'error of hidden':>17}{'of head':>10}")
    for name in losses:
        time_s, peak = median_of(rows, name)
        ends = "".join(f"{'' if e is None else format(e, '.2e'):>13}" for e in errors[name].values())
        print(f"{name:44}{time_s * 1e3:8.1f}{peak / 2**20:8.0f}{ends}", flush=True)
    return rows


def median_of(rows: list[dict[str, Any]], variant: str) -> tuple[float, float]:
    """Seconds and bytes."""
    own = [row for row in rows if row["variant"] == variant]
    return statistics.median(row["time_s"] for row in own), max(row["peak_bytes"] for row in own)


def claims_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Times and peaks of one case; of a peer's variants the fastest counts, for its memory the smallest."""
    model, trains_head = rows[0]["model"], rows[0]["trains_head"]
    measured = {row["variant"]: median_of(rows, row["variant"]) for row in rows}
    if CHOSEN not in measured:
        return {}
    prefix = f"{model.replace('.', 'p')}_{'trained' if trains_head else 'frozen'}"
    time_s, peak_bytes = measured[CHOSEN]
    claims = {f"{prefix}_ms": time_s * 1e3, f"{prefix}_peak_mib": peak_bytes / 2**20}
    if "colocate, softmax kept" in measured:
        claims[f"{prefix}_kept_ms"] = measured["colocate, softmax kept"][0] * 1e3
    for peer in ("full logits", "liger", "cce", "cce_exact"):
        # CCE that leaves gradients out and CCE that does not are not the same function.
        names = [name for name in measured if (name.startswith(peer) if peer == "liger" else name == peer)]
        if names:
            key = peer.replace(" ", "_")
            claims[f"{prefix}_vs_{key}"] = min(measured[name][0] for name in names) / time_s
            claims[f"{prefix}_memory_vs_{key}"] = min(measured[name][1] for name in names) / peak_bytes
    return claims


def peer_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="name of the result")
    parser.add_argument("--peers-site", type=Path, help="directory with the peers' packages")
    options = parser.parse_args()
    commit = committed()
    if options.peers_site:
        sys.path.append(str(options.peers_site.resolve()))
    failures: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    claims: dict[str, float] = {}
    for model in MODELS:
        for trains_head in (False, True):
            case_rows = compare(model, trains_head, failures)
            rows += case_rows
            claims |= claims_of(case_rows) if case_rows else {}
    path = write_result(
        "logprobs",
        options.hardware,
        claims,
        rows,
        commit,
        num_tokens=NUM_SEQUENCES * LENGTH,
        shapes={model: dict(zip(("hidden", "vocab"), sizes, strict=True)) for model, sizes in MODELS.items()},
        chosen=CHOSEN,
        peers={name: peer_version(name) for name in ("liger-kernel", "cut-cross-entropy")},
        failures=failures,
    )
    print(f"\n{path}")


if __name__ == "__main__":
    main()
