"""Evaluation: how good the policy is on held-out prompts."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers.trainer_utils import SaveStrategy, speed_metrics

from colocate.checkpoints.sealed import check_finite_weights
from colocate.data.splits import TrainDataset
from colocate.experience import ranks
from colocate.loop import roll_out
from colocate.parallel.watch import watched
from colocate.run.playing import with_prompts
from colocate.run.record import Run


@watched(lambda run: "in evaluate()")
def evaluate(run: Run, dataset: TrainDataset, metric_key_prefix: str) -> dict[str, float]:
    """Generate for every prompt of a dataset, and log rewards, lengths and the objective of all completions.

    Returns:
        The metrics, their names beginning with `metric_key_prefix` and an underscore.

    Raises:
        FloatingPointError: the weights are not finite.
    """
    check_finite_weights(run.policy, run.args, "evaluation")
    start_s = time.time()
    rows = list(with_prompts(dataset, run.playing))
    with run.journal.progress, run.timeline.phase("evaluate"), run.playing.tools_at_work():
        metrics = _metrics(run, rows)
    metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
    num_steps = math.ceil(len(rows) / (run.args.eval_batch_size * run.args.world_size))
    metrics.update(speed_metrics(metric_key_prefix, start_s, num_samples=len(rows), num_steps=num_steps))
    run.journal.log_eval(metrics)
    return metrics


def note_best(run: Run, metrics: dict[str, float]) -> None:
    """Judge whether the model just evaluated is the best so far; save_strategy="best" then has it saved."""
    metrics = ranks.of_all_ranks([metrics])[0]  # times differ between ranks, and all must come to one verdict
    if run.best.judge(run.journal.state, metrics) and run.args.save_strategy == SaveStrategy.BEST:
        run.journal.control.should_save = True


def _metrics(run: Run, rows: list[dict[str, Any]]) -> dict[str, float]:
    request = run.requests.evaluation(rows)
    episodes = roll_out(run, request, within="evaluate/")
    run.scorers.wake()
    rollout = run.judge.score(request, episodes)
    samples = run.selector.for_evaluation(rollout)
    run.scorers.sleep()
    objective = run.policy.evaluate(samples, run.objective)
    run.judge.add_waiting(objective)
    num_tokens = run.journal.state.num_input_tokens_seen
    return {**rollout.metrics, **ranks.totals(objective), "num_tokens": num_tokens}
