"""Collects the logs of reward functions besides rewards: columns of the completions table, and metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from colocate.reporting.run_log import TRAINER_METRICS, reserve_metrics
from colocate.users_code.errors import RewardError

TURN_REWARDS = "turn_rewards"
"""The name among reward functions of the rewards that environments give for turns."""

TABLE_COLUMNS = frozenset({"step", "prompt", "completion", "advantage", TURN_REWARDS})
"""Columns that the completions table always has, in addition to one for each reward function, and that of
turns."""

reserve_metrics(*(f"rewards/{TURN_REWARDS}/{name}" for name in ("mean", "std")))


class FunctionLog:
    """The columns and metrics that one function logs. Each function has its own, since async ones log from
    another thread."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.columns: dict[str, list] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Iterable) -> None:
        self.columns[column].extend(values)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))


def merge_logs(
    logs: Sequence[FunctionLog], num_completions: int
) -> tuple[dict[str, list], dict[str, list[float]]]:
    """The columns and the metrics of all functions.

    Raises:
        RewardError: a column or metric has a name that belongs to the trainer or to another function, or a
            column does not have one value per completion.
    """
    functions = [log.function for log in logs]
    reserved_columns = TABLE_COLUMNS.union(functions)
    reserved_metrics = TRAINER_METRICS.union(
        f"rewards/{f}/{what}" for f in functions for what in ("mean", "std")
    )
    columns: dict[str, list] = {}
    metrics: dict[str, list[float]] = defaultdict(list)
    for log in logs:
        _refuse(log, "column", reserved_columns & log.columns.keys())
        _refuse(log, "metric", reserved_metrics & log.metrics.keys())
        for name, values in log.columns.items():
            if len(values) != num_completions:
                raise RewardError(
                    f"The reward function {log.function!r} logged {len(values)} values in the column "
                    f"{name!r}, but {num_completions} were expected, one per completion."
                )
            columns[f"{log.function}/{name}" if name in columns else name] = values
        for name, numbers in log.metrics.items():
            metrics[name].extend(numbers)
    return columns, dict(metrics)


def _refuse(log: FunctionLog, kind: str, names: Iterable[str]) -> None:
    for name in sorted(names):
        raise RewardError(
            f"The reward function {log.function!r} logged the {kind} {name!r}, which is the name of one of "
            f"the trainer's own: call it, say, {f'{log.function}/{name}'!r}."
        )
