"""One rank of the steps in test_dealing.py: `dealing_worker.py <directory>`.

Rank 0 has generated long completions and rank 1 short ones. Trains every case on them for one rollout, and
leaves the parameters, the metrics and what each rank has trained on in the directory.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny
from colocate.algorithms.losses import LOSSES
from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.experience import ranks
from colocate.experience.select import Selector
from colocate.experience.window import TrainingWindow
from colocate.memory.train_plan import TrainPlan
from colocate.parallel.mesh import Mesh
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import make_reference
from colocate.reporting.metrics import Metrics
from colocate.types import Sample

SLICE_SIZE, NUM_SLICES, SLICES_PER_STEP, NUM_ITERATIONS, NUM_ROLLOUTS = 3, 4, 2, 2, 1
NUM_STEPS = NUM_ROLLOUTS * NUM_SLICES * NUM_ITERATIONS // SLICES_PER_STEP
LEARNING_RATE = 0.05
NUM_GENERATIONS = 8  # with 12 completions of each rank, the second of three groups spans both

# "threshold" weighs tokens by the entropies of all ranks. "router" has a loss that is no sum over tokens:
# only with one sequence in each micro-batch it is the same for every cut. In "turns" each token has an
# advantage of its own.
CASES: dict[str, dict[str, Any]] = {
    **{name: dict(loss_type=name) for name in LOSSES},
    "cispo": dict(loss_type="cispo", epsilon_high=5.0),
    "masked": dict(loss_type="grpo", off_policy_mask_threshold=0.05),
    "threshold": dict(loss_type="dapo", entropy_coef=0.05),
    "router": dict(loss_type="grpo"),
    "turns": dict(loss_type="dapo"),
}


def options_of(case: str, rank: int, num_ranks: int) -> Any:
    return SimpleNamespace(
        seed=1,
        loss_type=CASES[case]["loss_type"],
        max_completion_length=30,
        per_device_train_batch_size=SLICE_SIZE,
        gradient_accumulation_steps=SLICES_PER_STEP,
        steps_per_generation=NUM_SLICES,
        top_entropy_quantile=0.6 if case == "threshold" else 1.0,
        process_index=rank,
        world_size=num_ranks,
    )


def samples_of(rank: int, rollout: int, case: str = "") -> list[Sample]:
    """What a rank has generated: up to 30 tokens each on rank 0, up to 3 on rank 1."""
    generator = torch.Generator().manual_seed(10 * rollout + rank)
    per_rank = SLICE_SIZE * NUM_SLICES
    samples = []
    for number in range(rank * per_rank, (rank + 1) * per_rank):
        key = 100 * rollout + number // NUM_GENERATIONS
        prompt = torch.Generator().manual_seed(key)
        length = int(torch.randint(20, 31, (), generator=generator)) if rank == 0 else 1 + number % 3
        samples.append(
            Sample(
                prompt_ids=torch.randint(tiny.VOCAB_SIZE, (6 + key % 3,), generator=prompt),
                completion_ids=torch.randint(tiny.VOCAB_SIZE, (length,), generator=generator),
                completion_mask=(torch.rand(length, generator=generator) < 0.9).float(),
                advantage=torch.randn((), generator=generator).item(),
                rollout_logprobs=-4 + 0.5 * torch.randn(length, generator=generator),
                prompt_key=key,
            )
        )
    if case == "turns":
        samples = [replace(s, advantage=s.advantage * torch.arange(len(s.completion_ids))) for s in samples]
    return samples


def num_loss_tokens(rollout: int, case: str) -> int:
    """The tokens that the loss counts, of both ranks."""
    samples = [sample for rank in range(2) for sample in samples_of(rank, rollout, case)]
    return int(sum(sample.completion_mask.sum() for sample in samples))


def policy_of(case: str, mesh: Mesh | None = None) -> Policy:
    model = tiny.make_model("llama")
    if case == "router":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(
                **tiny._SIZES, vocab_size=tiny.VOCAB_SIZE, head_dim=8, num_experts=4,
                num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1,
            )
        )  # fmt: skip
    # LUSPO sums over tokens where others take means.
    learning_rate = LEARNING_RATE / 20 if case == "luspo" else LEARNING_RATE
    args = TrainingArguments(
        output_dir="unused", use_cpu=True, report_to=[], optim="sgd", learning_rate=learning_rate,
        lr_scheduler_type="constant",
    )  # fmt: skip
    return Policy(
        model,
        PolicyOptimizer(model, args, NUM_STEPS, mesh=mesh),
        temperature=1.0,
        plan=TrainPlan(tokens_per_microbatch=1 if case == "router" else 64, logprob_chunk_size=7),
        max_grad_norm=None,
        reference=make_reference(model),
        router_loss_coef=0.1 if case == "router" else 0.0,
    )


def objective_of(case: str) -> Objective:
    return Objective(ObjectiveParams(**CASES[case], beta=0.1))


def train(case: str, rank: int) -> dict[str, Any]:
    policy, objective = policy_of(case), objective_of(case)
    selector = Selector(policy, options_of(case, rank, 2))
    window = TrainingWindow(SLICES_PER_STEP, NUM_ITERATIONS, torch.device("cpu"))
    metrics, trained = [], []
    for rollout in range(NUM_ROLLOUTS):
        scored: Any = SimpleNamespace(
            members=[[sample] for sample in samples_of(rank, rollout, case)],
            num_loss_tokens=num_loss_tokens(rollout, case),
        )
        window.add(selector.slices(scored, rollout), lambda s: [x for x, _ in policy.logprobs(s)])
        while window.ready:
            samples = selector.for_step(window.peek())
            update = policy.update(samples, objective)
            window.advance(update.logprobs)
            metrics.append(ranks.totals(update.metrics))
            trained.append([(s.prompt_key, s.completion_ids.tolist()) for s in samples])
    return {"parameters": dict(policy.model.named_parameters()), "metrics": metrics, "trained": trained}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {case: train(case, rank) for case in CASES}
    # Fewer samples than ranks: one rank takes the step with none.
    policy = policy_of("grpo")
    (sample,) = samples_of(0, 0)[:1]
    policy.update([sample] if rank == 0 else [], lambda logprobs, *_: (-logprobs.sum(), Metrics()))
    results["one sample"] = {"parameters": dict(policy.model.named_parameters())}
    # First the loss of rank 0 alone is not finite, though all gradients are; then every loss is.
    for name, mesh in (("replicated", None), ("split", Mesh.of("cpu"))):
        policy = policy_of("grpo", mesh)
        skipped = [
            policy.update(
                samples_of(rank, 0)[:2],
                lambda logprobs, *_, add=add: (add - logprobs.sum(), Metrics()),
            ).skipped
            for add in (math.nan if rank == 0 else 0.0, 0.0)
        ]
        results[f"skipped {name}"] = skipped
    torch.save(results, Path(sys.argv[1]) / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
