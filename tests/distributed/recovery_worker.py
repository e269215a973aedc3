"""One of two ranks that run out of memory in turns: `recovery_worker.py <directory> <number of injections>`.

Leaves what happened in `<directory>/rank<n>.json`.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_policy import VOCAB, make_model, make_policy, make_samples, objective

from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.model_runner import ModelRunner
from colocate.memory.train_plan import TrainPlan
from colocate.policy import policy as policy_module
from colocate.policy.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.policy.reference import FrozenCopy
from colocate.policy.stack import DecoderLayer
from colocate.types import Prompt, SamplingParams

PLAN = TrainPlan("keep", tokens_per_microbatch=40, logprob_chunk_size=128)
# The ranks have unequal numbers of micro-batches, and the longest sequence is on one of them.
LENGTHS = [[(3, 5), (1, 1), (9, 12), (2, 12), (6, 6)], [(1, 9), (4, 3), (12, 1)]]
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (DecoderLayer, "forward"),
    "head": (policy_module, "token_logprobs"),
    "backward": (DecoderLayer, "backward"),
    "gradients": (PolicyOptimizer, "gradients"),
    "optimizer": (PolicyOptimizer, "prepare_step"),
    "state": (PolicyOptimizer, "_make_state"),
    "rollout": (ModelRunner, "prefill"),
}
MADE_BEFORE = ("gradients", "optimizer", "state")
"""Places that are reached twice in a step: the second time, after the verdict, they find everything made."""


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


def make(plan: TrainPlan = PLAN) -> Policy:
    model = make_model("qwen2")
    return make_policy(model, plan=plan, learning_rate=0.1, reference=FrozenCopy(model))


def train(policy: Policy, rank: int) -> list[torch.Tensor]:
    """Two updates of what a rollout's step does; the log-probs, completions and parameters that it comes to.

    Rank 0 asks for log-probs once more, as an evaluation of an odd number of prompts does.
    """
    samples = make_samples(LENGTHS[rank], seed=rank)
    engine = NativeEngine(policy.model, max_num_seqs=4, page_size=4)
    prompts = [Prompt(tuple(range(1, 20)), key, range(2)) for key in range(2)]
    results: list[torch.Tensor] = []
    for _ in range(2):
        engine.wake_up()
        completions = engine.generate(prompts, SamplingParams(max_tokens=3, seed=1))
        engine.sleep()
        assert all(0 <= token < VOCAB for completion in completions for token in completion.token_ids)
        results += [logprobs for logprobs, _ in policy.logprobs(samples)]
        if rank == 0:
            policy.logprobs(samples[:1])
        results += policy.reference_logprobs(samples)
        policy.update(samples, objective)
    return results + [p.detach().clone() for p in policy.model.parameters()]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def checksum(policy: Policy) -> str:
    return repr([p.double().sum().item() for p in policy.model.parameters()])


def main() -> None:
    directory, num_injections = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    logging.getLogger("colocate").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, rng = dist.get_rank(), random.Random(0)
    gc.freeze()  # each recovery collects garbage, which would look through all of the imported libraries
    num_calls = {}
    for place in PLACES:
        policy = make()
        with Injection(place, 0, RuntimeError) as counter:
            train(policy, rank)
        counts: list[int] = [0, 0]
        dist.all_gather_object(counts, counter.num_calls)
        num_calls[place] = counts
    undisturbed: dict[TrainPlan, list[torch.Tensor]] = {}
    trials = []
    for number in range(num_injections):
        place, victim = list(PLACES)[number % len(PLACES)], rng.randrange(2)
        stride = 2 if place in MADE_BEFORE else 1
        call = 1 + stride * rng.randrange(num_calls[place][victim] // stride)
        policy = make()
        with Injection(place, call if rank == victim else 0, torch.OutOfMemoryError) as injection:
            results = train(policy, rank)
        plans: list[Any] = [None, None]
        dist.all_gather_object(plans, policy.plan)
        if plans[0] not in undisturbed:  # both ranks come here, or none
            undisturbed[plans[0]] = train(make(plans[0]), rank)
        trials.append(
            {
                "case": [place, victim, call],
                "has_failed": rank == victim and injection.num_calls >= call,
                "plan": repr(policy.plan),
                "distance": distance(results, undisturbed[plans[0]]),
                "checksum": checksum(policy),
            }
        )
    endings = []
    for place, error, times in (("backward", ValueError, 1), ("forward", torch.OutOfMemoryError, 10_000)):
        try:
            with Injection(place, 3, error, times if rank == 1 else 0):  # type: ignore[arg-type]
                make().update(make_samples(LENGTHS[rank], seed=rank), objective)
        except Exception as end:
            endings.append([type(end).__name__, str(end)])
    moved = distance(undisturbed[PLAN][-1:], [list(make().model.parameters())[-1].detach()])
    told = {"trials": trials, "endings": endings, "moved": moved, "num_calls": num_calls}
    (directory / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
