"""All ranks of a run meet at one address before PyTorch connects them, and decide there what stops the run.

PyTorch's own message about a missing node is about a socket; here the first rank waits for each rank by name.
The meeting needs no collective: it works before the process group is made, and where NCCL would not.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore

logger = logging.getLogger(__name__)

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_GRACE_S = 30.0
"""Seconds that the other ranks wait for the decision longer than the first rank."""
_LINGER_S = 10.0
"""How long the first rank, in whose process the store may live, waits until the others have read why the run
stops."""

PATIENCE_S = 30.0
"""Seconds after which the first rank says whom it waits for, and again after twice as long each time."""
_LOOK_S = 0.1
"""Seconds between two looks whether a rank that is missing has ended."""
APART_S = 10.0
"""Seconds that starting ranks may be apart when they come to the same error."""
_TOGETHER_S = 3.0
"""Seconds once they have met: less than `watch.GRACE_S`, after which others end a failed rank."""

_meeting: Meeting | None = None


@dataclass
class Meeting:
    """The place where the ranks of a run leave reports, and the first rank decides."""

    store: Store
    rank: int
    num_ranks: int
    ranks_per_node: int
    num_decisions: int = 0

    def decide(self, report: str, judge: Callable[[Sequence[str | None]], str], timeout_s: float) -> str:
        """The result of `judge` on the reports of all ranks, on every rank.

        Every rank must call it, in the same order of calls.

        Args:
            report: this rank's.
            judge: called on the first rank with the reports in the order of ranks, None for each rank that
                left none within `timeout_s`; returns why the run cannot go on, or an empty text.

        Raises:
            TimeoutError: the first rank has ended, or did not decide in time.
        """
        self.num_decisions += 1
        place = f"{self.num_decisions}"
        self.store.set(f"{place}/{self.rank}", report)
        if self.rank == 0:
            reports = self._collect(place, timeout_s)
            verdict = self._errors_of_missing(reports) or judge(reports)
            self.store.set(f"{place}/verdict", verdict)
            if verdict:
                self._linger(place, sum(report is not None for report in reports) - 1)
            return verdict
        try:
            self.store.wait([f"{place}/verdict"], timedelta(seconds=timeout_s + _GRACE_S))
            verdict = self.store.get(f"{place}/verdict").decode()
            self.store.add(f"{place}/readers", 1)
        except DistError as error:
            raise TimeoutError(
                f"Rank {self.rank} (on {socket.gethostname()}) waited for rank 0 to say whether the run can "
                f"begin; rank 0 has ended, or said nothing for {timeout_s + _GRACE_S:,.0f} s. Its own output "
                "says why."
            ) from error
        return verdict

    def ends_as_first(self, text: str) -> bool:
        """Whether the first rank ends with an error of the same text. The first rank itself gets False, once
        the others have read its text. A rank calls this once, when it ends. It waits only briefly for ranks
        that have come to the first decision, since they did not end before it."""
        self.store.set(f"end/{self.rank}", text)
        waited_for = [f"heard/{rank}" for rank in range(1, self.num_ranks)] if self.rank == 0 else ["end/0"]
        begin_s = time.monotonic()
        while missing := [key for key in waited_for if not self.store.check([key])]:
            have_met = self.store.check([f"1/{key.partition('/')[2]}" for key in missing])
            if time.monotonic() - begin_s > (_TOGETHER_S if have_met else APART_S):
                break
            time.sleep(0.05)
        if self.rank == 0:
            return False
        is_same = not missing and self.store.get("end/0").decode() == text
        self.store.set(f"heard/{self.rank}", "")
        return is_same

    def _collect(self, place: str, timeout_s: float) -> list[str | None]:
        """The reports, awaited until all are there, a rank that is missing has ended, or the time is over."""
        begin_s, told_s = time.monotonic(), PATIENCE_S
        while missing := self._missing(place):
            waited_s = time.monotonic() - begin_s
            if waited_s >= timeout_s or any(self.store.check([f"end/{rank}"]) for rank in missing):
                break
            if waited_s >= told_s:
                told_s *= 3
                verb = "has" if len(missing) == 1 else "have"
                logger.warning(
                    f"{in_words(missing).capitalize()} of {self.num_ranks} {verb} not come yet after "
                    f"{waited_s:.0f} s. Rank 0 waits for {timeout_s:,.0f} s (ddp_timeout); if a process has "
                    "ended, its own output says why."
                )
            time.sleep(_LOOK_S)  # a wait in the store that ends by its time prints warnings of a socket's
        keys = [f"{place}/{rank}" for rank in range(self.num_ranks)]
        return [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]

    def _missing(self, place: str) -> list[int]:
        return [rank for rank in range(self.num_ranks) if not self.store.check([f"{place}/{rank}"])]

    def _errors_of_missing(self, reports: Sequence[str | None]) -> str:
        """The errors of ranks that have ended before they came; empty if none has."""
        missing = [rank for rank, report in enumerate(reports) if report is None]
        return "\n".join(
            f"{self.num_ranks} processes were to join, and rank {rank} is missing. It has ended with the "
            f"words: {self.store.get(f'end/{rank}').decode()}"
            for rank in missing
            if self.store.check([f"end/{rank}"])
        )

    def _linger(self, place: str, num_readers: int) -> None:
        end = time.monotonic() + _LINGER_S
        while time.monotonic() < end and self.store.add(f"{place}/readers", 0) < num_readers:
            time.sleep(0.05)


def meeting() -> Meeting | None:
    """Where the ranks of this run meet; None: there is one rank, or something else has connected them."""
    return _meeting


def meet(timeout_s: float, *, use_cpu: bool = False, backend: str | None = None) -> None:
    """Wait until every rank that the launcher has announced is there, before PyTorch connects them.

    Nothing happens with one rank, or if PyTorch has connected the ranks already.

    Args:
        timeout_s: the option `ddp_timeout`.
        use_cpu, backend: the options `use_cpu` and `ddp_backend`.

    Raises:
        TimeoutError: ranks are missing; it names them and the nodes that are there.
    """
    global _meeting
    if _meeting is not None or dist.is_initialized() or not _has_launcher():
        return
    _check_nccl(use_cpu, backend)
    place = _place(timeout_s)

    def judge(hosts: Sequence[str | None]) -> str:
        return "" if None not in hosts else absence(hosts, place.ranks_per_node, timeout_s)

    if reason := place.decide(socket.gethostname(), judge, timeout_s):
        raise TimeoutError(reason)
    _meeting = place


def place_of_launcher() -> Meeting | None:
    """Where the ranks meet, or would have met; None: there is one rank, or something else has started them.

    Raises:
        RuntimeError, TimeoutError: nobody is there.
    """
    return _meeting or (_place(APART_S) if _has_launcher() else None)


def _has_launcher() -> bool:
    """Whether a launcher has started several ranks, and said where they meet."""
    return all(map(os.environ.get, _VARIABLES)) and int(os.environ["WORLD_SIZE"]) > 1


def _place(timeout_s: float) -> Meeting:
    rank, num_ranks, address, port = (os.environ[name] for name in _VARIABLES)
    store = _connect(address, int(port), int(rank), timeout_s)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks)
    return Meeting(PrefixStore(f"colocate/{attempt}", store), int(rank), int(num_ranks), per_node)


def _check_nccl(use_cpu: bool, backend: str | None) -> None:
    is_needed = torch.cuda.is_available() and not use_cpu and backend in (None, "nccl", "cpu:gloo,cuda:nccl")
    if is_needed and not dist.is_nccl_available():
        raise RuntimeError(
            f"This PyTorch ({torch.__version__}) was built without NCCL, by which GPUs exchange gradients. "
            "Install one that has it (the wheels of pytorch.org for Linux do), start one process on one GPU, "
            "or set ddp_backend='gloo', which is far slower."
        )


def _connect(address: str, port: int, rank: int, timeout_s: float) -> Store:
    """The store that PyTorch will also use: torchrun's, else one in the first rank's process."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not has_agent
    try:
        return TCPStore(
            address, port, is_master=is_host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    except DistError as error:
        here = socket.gethostname()
        if is_host:
            raise RuntimeError(
                f"Rank 0 (on {here}) cannot open port {port}, where the other ranks would find it: {error}. "
                "If another run has the port, choose one that is free (torchrun: --master_port; accelerate: "
                "--main_process_port)."
            ) from error
        raise TimeoutError(
            f"Rank {rank} (on {here}) waited {timeout_s:,.0f} s for the first node at {address}:{port}, and "
            "nobody answered there. Start the same command on the first node, too; check that this address "
            "is the first node's, as seen from here, and that no firewall closes the port."
        ) from error


def absence(hosts: Sequence[str | None], ranks_per_node: int, timeout_s: float) -> str:
    """The message about ranks that have not come, whose host is None; nodes have `ranks_per_node` ranks
    each."""
    present = {rank: host for rank, host in enumerate(hosts) if host is not None}
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    verb = "is" if len(missing) == 1 else "are"
    who = f"{in_words(missing)} {verb} missing"
    if ranks_per_node < len(hosts) and len(hosts) % ranks_per_node == 0:
        nodes = [hosts[i : i + ranks_per_node] for i in range(0, len(hosts), ranks_per_node)]
        counted = f"{sum(None not in node for node in nodes)} of {len(nodes)} nodes"
    else:
        counted = f"{len(present)} of {len(hosts)} processes"
    by_host: dict[str, list[int]] = {}
    for rank, host in present.items():
        by_host.setdefault(host, []).append(rank)
    there = "; ".join(f"{host} ({in_words(ranks)})" for host, ranks in by_host.items())
    return (
        f"{counted} joined within {timeout_s:,.0f} s: {who}. Joined: {there}. Start the same command on "
        "every node, with the first node's address; the missing processes' own output says whether they "
        "began and why they ended. ddp_timeout sets how many seconds are waited."
    )


def in_words(ranks: Sequence[int]) -> str:
    """Ranks in rising order as text: "rank 2", "ranks 1, 8-15"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
