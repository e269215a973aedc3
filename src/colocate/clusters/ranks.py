"""One start of all ranks of a run on Ray: their places, their output in the driver, and how they end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from colocate.checkpoints.stop_signals import StopSignals
from colocate.clusters.actor import Place
from colocate.clusters.cluster import seat
from colocate.clusters.process import ANSWER_S, Ending, Process
from colocate.parallel.ask import Ask
from colocate.parallel.ray_place import RayPlace

_LOOK_S = 0.2
"""Seconds after which signals and the terminal's size are looked at again."""
GRACE_S = 12.0
"""Seconds for the other ranks after one has ended with an error: they may come to the same error, or tell of
it (`watch.GRACE_S` is shorter)."""


class Rank(Process):
    """A rank, whose output is shown: the first rank's as it comes, whole lines of the others by name.

    Args:
        is_heard: else lines are only kept, since the first rank draws on the terminal.
    """

    def __init__(self, number: int, seat: Mapping[str, Any], *, is_heard: bool) -> None:
        super().__init__(f"rank {number}", seat)
        self._is_heard = is_heard
        self._open = {1: "", 2: ""}
        self._prefix = f"[rank {number}] " if number else ""

    def last_words(self) -> str:
        return super().last_words() if self._prefix else "Its last lines are above."

    def say(self, number: int, text: str) -> None:
        if number == 2:
            self.tail.write(text)
        if not self._is_heard:
            return
        if self._prefix:
            *whole, self._open[number] = (self._open[number] + text).split("\n")
            text = "".join(f"{self._prefix}{line.rpartition(chr(13))[2]}\n" for line in whole)
        print(text, end="", file=sys.stdout if number == 1 else sys.stderr, flush=True)


class Ranks:
    """The ranks of a run, at their places on the cluster.

    Args:
        groups: a placement group for each node.
    """

    def __init__(self, groups: Sequence[Any], ask: Ask) -> None:
        self._groups, self._ask, self._size = groups, ask, _terminal_size()
        share = 1 / ask.shares if ask.on_gpus else 0
        self.all = [
            Rank(number, seat(*bundle, 1, share), is_heard=number == 0 or self._size is None)
            for number, bundle in enumerate(product(groups, range(ask.ranks_per_node)))
        ]

    @property
    def places(self) -> list[Place]:
        return [rank.place for rank in self.all]

    async def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Ending:
        """Start all ranks, and show their output until all have ended, or one has failed.

        The first Ctrl-C and SIGTERM are passed on: the ranks save the step in hand, and end.

        Args:
            arguments: what follows `colocate`.
            variables: what all ranks' environments have beside what tells them their ranks.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again.
        """
        going: dict[asyncio.Task[Ending], Rank] = {}
        for number, rank in enumerate(self.all):
            words = self._variables(number) | dict(variables)
            start = rank.run(arguments, words, self._size if number == 0 else None)
            going[asyncio.create_task(start)] = rank
        failures: list[Ending] = []
        until_s, num_passed_on = float("inf"), 0
        with StopSignals() as stop:
            while going and time.monotonic() < until_s and not any(each.was_lost for each in failures):
                ended, _ = await asyncio.wait(going, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                failures += [ending for task in ended if (ending := task.result()).code]
                going = {task: rank for task, rank in going.items() if task not in ended}
                if failures and not stop.noted:
                    until_s = min(until_s, time.monotonic() + GRACE_S)
                for signal in stop.noted[num_passed_on:]:
                    num_passed_on += 1
                    for rank in self.all:
                        rank.actor.signal.remote(signal)
                if self._size is not None and (size := _terminal_size()) not in (None, self._size):
                    self._size = size
                    self.all[0].actor.resize.remote(size)
        for rank in going.values() if failures else ():
            if (silence_s := time.monotonic() - rank.heard_s) > ANSWER_S:
                failures.append(rank.ending(f"is lost: nothing was heard of it for {silence_s:.0f} s"))
        # What all ranks find wrong, one alone says, and need not be the first to end.
        failures.sort(key=lambda failure: (not failure.was_lost, not failure.has_words))
        return replace([*failures, Ending(0)][0], was_stopped=bool(stop.noted))

    def _variables(self, number: int) -> dict[str, str]:
        """What torchrun would set, and the GPUs of the node's ranks, which all of them see: LOCAL_RANK is the
        number of a rank's own."""
        places, per_node = self.places, self._ask.ranks_per_node
        first = number - number % per_node
        gpu_ids = [gpu for place in places[first : first + per_node] for gpu in place.gpu_ids]
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(number - first),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].free_port),
            "CUDA_VISIBLE_DEVICES": ",".join(sorted(gpu_ids, key=lambda gpu: (len(gpu), gpu))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
            **self._ray_place().as_variable(),
            **{name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ},
        }

    def _ray_place(self) -> RayPlace:
        import ray
        from ray.util.placement_group import placement_group_table

        context = ray.get_runtime_context()
        return RayPlace(
            address=context.gcs_address,
            namespace=context.namespace,
            groups=tuple(placement_group_table(group)["name"] for group in self._groups),
            sizes=(self._ask.ranks_per_node,) * len(self._groups),
            shares=self._ask.shares,
        )


def _terminal_size() -> tuple[int, int] | None:
    """Rows and columns of the terminal that this process writes to; None: it writes elsewhere."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return None
    columns, rows = os.get_terminal_size()
    return rows, columns
