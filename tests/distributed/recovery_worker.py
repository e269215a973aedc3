"""One of two ranks that run out of memory in turns: `recovery_worker.py <directory> <number of injections>`.

Leaves what happened in `<directory>/rank<n>.json`.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import engine_models
from test_policy import make_policy, make_samples, objective

from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.model_runner import ModelRunner
from colocate.memory.train_plan import TrainPlan
from colocate.parallel.mesh import Mesh
from colocate.policy import policy as policy_module
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import FrozenCopy
from colocate.policy.stack.layer import DecoderLayer
from colocate.types import Prompt, SamplingParams
from colocate.weights.layouts import WeightPart
from colocate.weights.weight_parts import split_weights

PLAN = TrainPlan("keep", tokens_per_microbatch=40, logprob_chunk_size=128)
OF_RANKS = (TrainPlan("full", 40, logprob_chunk_size=128), TrainPlan("keep", 20, logprob_chunk_size=64))
# The ranks have unequal numbers of micro-batches, and the longest sequence is on one of them.
LENGTHS = [[(3, 5), (1, 1), (9, 12), (2, 12), (6, 6)], [(1, 9), (4, 3), (12, 1)]]
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (DecoderLayer, "forward"),
    "head": (policy_module, "token_logprobs"),
    "backward": (DecoderLayer, "backward"),
    "reduction": (PolicyOptimizer, "prepare_reduction"),
    "optimizer": (PolicyOptimizer, "prepare_step"),
    "state": (PolicyOptimizer, "_make_state"),
    "rollout": (ModelRunner, "prefill"),
}
MADE_BEFORE = ("optimizer", "state")
"""Places that are reached twice in a step: the second time, after the verdict, they find everything made."""

LAYOUTS = ("whole", "rows", "parts")
"""Each rank has everything; masters are split by rows; the weights are split, too."""


class Injection:
    """Fails the `call`-th call of a place, and counts all of them."""

    def __init__(self, place: str, call: int, error: Callable[[str], Exception], times: int = 1) -> None:
        self._owner, self._name = PLACES[place]
        self._call, self._error, self._times = call, error, times
        self.num_calls = 0

    def __enter__(self) -> Injection:
        original = getattr(self._owner, self._name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self._call <= self.num_calls < self._call + self._times:
                raise self._error(f"injected in {self._name}")
            return original(*args, **kwargs)

        self._patch = mock.patch.object(self._owner, self._name, wrapped)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def places_of(layout: str) -> list[str]:
    return [place for place in PLACES if place != "rollout" or layout != "parts"]


def make(layout: str, plan: TrainPlan = PLAN) -> Policy:
    sizes = dict(vocab_size=64, num_attention_heads=4, num_key_value_heads=4)
    model = engine_models.make_model("qwen2", **sizes).train()
    mesh = None if layout == "whole" else Mesh.of("cpu", 2 if layout == "parts" else 1)
    if layout == "parts":
        assert mesh is not None
        split_weights(model, WeightPart(mesh.weight_part, 2))
    return make_policy(model, plan=plan, learning_rate=0.1, reference=FrozenCopy(model), mesh=mesh)


def train(policy: Policy, layout: str, rank: int) -> list[torch.Tensor]:
    """Two updates of what a rollout's step does; the log-probs and parameters that it comes to.

    Rank 0 asks for log-probs once more, as in an evaluation where it has one prompt more; ranks that share
    the weights do so together.
    """
    samples = make_samples(LENGTHS[rank], seed=rank)
    results: list[torch.Tensor] = []
    for _ in range(2):
        if layout != "parts":
            results.append(roll_out(policy))
        results += [logprobs for logprobs, _ in policy.logprobs(samples)]
        if rank == 0 or layout == "parts":
            policy.logprobs(samples[: 1 - rank])
        results += policy.reference_logprobs(samples)
        policy.update(samples, objective)
    return results + [p.detach().clone() for p in policy.model.parameters()]


def roll_out(policy: Policy) -> torch.Tensor:
    engine = NativeEngine(policy.model, max_num_seqs=4, page_size=4)
    prompts = [Prompt(tuple(range(1, 20)), key, range(2)) for key in range(2)]
    engine.wake_up()
    completions = engine.generate(prompts, SamplingParams(max_tokens=3, seed=1, temperature=0.0))
    engine.sleep()
    return torch.tensor([len(completion.token_ids) for completion in completions])


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def checksum(policy: Policy) -> str:
    return repr([p.double().sum().item() for p in policy.model.parameters()])


def disagreement(layout: str, rank: int) -> dict[str, Any]:
    """What ranks come to whose planners disagree before the first step and after each, compared with ranks
    that have one plan."""

    class Planner:
        """Takes smaller micro-batches on rank 1, and recomputes on rank 0."""

        def with_prompts(self, plan: TrainPlan, _: int) -> TrainPlan:
            return plan

        def refined(self, plan: TrainPlan, *_: Any) -> TrainPlan:
            return OF_RANKS[rank]

    policy, same = make(layout, OF_RANKS[rank]), make(layout, PLAN)
    policy.planner = Planner()
    samples = make_samples(LENGTHS[rank], seed=rank)
    plans, results = [], []
    for _ in range(3):
        for each in (policy, same):
            logprobs = [x for x, _ in each.logprobs(samples)] + each.reference_logprobs(samples)
            update = each.update(samples, objective)
            results.append(logprobs + [p.detach().clone() for p in each.model.parameters()])
        plans.append(of_ranks(repr(policy.plan)))
        policy.learn({}, update)
    far = max(distance(results[i], results[i + 1]) for i in range(0, len(results), 2))
    return {"plans": plans, "distance": far}


def of_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None, None]
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    directory, num_injections = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.getLogger("colocate").setLevel(logging.ERROR)
    # Whatever PyTorch deprecates would warn the user on every rank.
    warnings.filterwarnings("error", r".*torch\.distributed\.", FutureWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, rng = dist.get_rank(), random.Random(0)
    gc.freeze()  # each recovery collects garbage, which would look through all of the imported libraries
    num_calls = {}
    for layout in LAYOUTS:
        for place in places_of(layout):
            policy = make(layout)
            with Injection(place, 0, RuntimeError) as counter:
                train(policy, layout, rank)
            num_calls[layout, place] = of_ranks(counter.num_calls)
    undisturbed: dict[tuple[str, TrainPlan], list[torch.Tensor]] = {}
    trials = []
    for number in range(num_injections):
        layout = LAYOUTS[number % len(LAYOUTS)]
        places = places_of(layout)
        place, victim = places[number // len(LAYOUTS) % len(places)], rng.randrange(2)
        stride = 2 if place in MADE_BEFORE else 1
        call = 1 + stride * rng.randrange(num_calls[layout, place][victim] // stride)
        policy = make(layout)
        with Injection(place, call if rank == victim else 0, torch.OutOfMemoryError) as injection:
            results = train(policy, layout, rank)
        plan = of_ranks(policy.plan)[0]
        if (layout, plan) not in undisturbed:  # both ranks come here, or none
            undisturbed[layout, plan] = train(make(layout, plan), layout, rank)
        trials.append(
            {
                "case": [layout, place, victim, call],
                "has_failed": rank == victim and injection.num_calls >= call,
                "plan": repr(policy.plan),
                "distance": distance(results, undisturbed[layout, plan]),
                "checksum": checksum(policy) if layout != "parts" else "",
            }
        )
    endings = []
    for place, error, times in (("backward", ValueError, 1), ("forward", torch.OutOfMemoryError, 10_000)):
        for layout in LAYOUTS:
            policy = make(layout)
            try:
                with Injection(place, 2, error, times if rank == 1 else 0):  # type: ignore[arg-type]
                    policy.update(make_samples(LENGTHS[rank], seed=rank), objective)
            except Exception as end:
                endings.append([type(end).__name__, str(end)])
    start = [p.detach() for p in make("whole").model.parameters()]
    whole, rows = (train(make(layout), layout, rank)[-len(start) :] for layout in ("whole", "rows"))
    told: dict[str, Any] = {"trials": trials, "endings": endings, "moved": distance(whole, start)}
    told["disagreements"] = [disagreement(layout, rank) for layout in LAYOUTS]
    told["rows"] = distance(whole, rows)
    (directory / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
