"""Runs of every kind are killed again and again, in steps, in saves and in pushes, and end as without that.

Each run is killed with SIGKILL, and resumed with "auto", twelve times: in two of three kills a drawn time
after a new checkpoint is there, so that the next one is near or being written, and else a drawn time after
the start. What it comes to at last is compared with a run that nobody has killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import read_metrics
from test_carry_over import RAGGED
from test_refill import OPTIONS as REFILL
from test_refill import differs_if, numbered
from test_resume import wait_for
from test_turns import OPTIONS as TURNS
from test_turns import SHORT_TURNS, always_calling, by_tokens, chat_model, questions

from colocate.checkpoints import sealed
from colocate.checkpoints.sealed import list_checkpoints
from colocate.parallel.launching import free_port
from processes import FORKS
from tiny import count_digits, make_model, make_trainer
from tool_chat import add

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from native_server_case import NativeServer

NUM_KILLS = 12
NUM_STEPS = 3 * NUM_KILLS
SAVING: dict[str, Any] = dict(
    max_steps=NUM_STEPS, save_strategy="steps", save_steps=1, save_total_limit=3, lr_scheduler_type="constant"
)


def with_tools(directory: Path, **options: Any) -> Any:
    always_calling(pytest.MonkeyPatch())
    turns = dict(TURNS, max_completion_length=120, steps_per_generation=2, max_tool_calling_iterations=2)
    return make_trainer(
        directory, model=chat_model(), train_dataset=questions(), tools=[add], reward_funcs=by_tokens,
        generation_kwargs=SHORT_TURNS, **{**turns, **SAVING, **options},
    )  # fmt: skip


def with_carry_over(directory: Path, **options: Any) -> Any:
    return make_trainer(directory, **{**RAGGED, **SAVING, **options})


def with_refill(directory: Path, **options: Any) -> Any:
    odd = differs_if(lambda n: n % 2)
    given = dict(REFILL, reward_funcs=odd, train_dataset=numbered())
    return make_trainer(directory, **{**given, **SAVING, **options})


def on_two_ranks(directory: Path, **options: Any) -> Any:
    given: dict[str, Any] = dict(
        per_device_train_batch_size=2, steps_per_generation=2, shard=1, reward_funcs=count_digits
    )
    return make_trainer(directory, model=make_model(), **{**given, **SAVING, **options})


def with_a_server(directory: Path, **options: Any) -> Any:
    given: dict[str, Any] = dict(engine="rollout_server", rollout_server_base_url=os.environ["SERVER"])
    return make_trainer(directory, model=make_model(), **{**given, **SAVING, **options})


KINDS: dict[str, Callable[..., Any]] = {
    "tools": with_tools,
    "carry-over": with_carry_over,
    "refill": with_refill,
    "two ranks": on_two_ranks,
    "a server in a push": with_a_server,
}


def train(kind: str, directory: Path, environment: dict[str, str], slow_s: float) -> None:
    """One process of a run.

    Args:
        slow_s: how much longer a rollout takes, a push and each of a checkpoint's files; else too little time
            is spent there for a kill to come.
    """
    os.environ |= environment
    torch.set_num_threads(1)
    trainer = KINDS[kind](directory)

    def slowly(owner: Any, name: str, marker: str | None = None) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if marker is not None:
                (directory.parent / marker).touch()
            time.sleep(slow_s)
            try:
                return function(*args, **kwargs)
            finally:
                if marker is not None:
                    (directory.parent / marker).unlink(missing_ok=True)

        setattr(owner, name, call)

    if slow_s:
        slowly(trainer.run.engine, "wake_up")
        slowly(trainer.run.engine, "update_weights", "pushing" if "push" in kind else None)
        slowly(sealed, "_flush")
    (directory.parent / f"begun-{environment.get('RANK', '0')}").touch()
    trainer.train(resume_from_checkpoint="auto")


class Run:
    """A run in processes of its own.

    Attributes:
        kills: how many there were of each kind.
    """

    def __init__(self, kind: str, root: Path, environment: dict[str, str]) -> None:
        self.kind, self.directory = kind, root / "run"
        self._environment = environment
        self.kills: Counter[str] = Counter()
        root.mkdir()

    def start(self, slow_s: float) -> list[Any]:
        num_ranks = 2 if self.kind == "two ranks" else 1
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
        started = []
        for rank in range(num_ranks):
            (self.directory.parent / f"begun-{rank}").unlink(missing_ok=True)
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if num_ranks > 1 else {}
            of_process = (self.kind, self.directory, self._environment | of_rank, slow_s)
            started.append(FORKS.Process(target=train, args=of_process))
            started[-1].start()
        return started

    def finish(self) -> None:
        for process in self.start(slow_s=0.0):
            process.join(600)
            assert process.exitcode == 0

    def kill(self, number: int, rng: random.Random) -> None:
        """Start it, and kill it; of two ranks one, which the other must notice."""
        before = set(list_checkpoints(self.directory))
        started = self.start(slow_s=0.03)
        for rank, process in enumerate(started):
            wait_for((self.directory.parent / f"begun-{rank}").exists, process)
        if is_late := number % 3 > 0:
            wait_for(lambda: set(list_checkpoints(self.directory)) - before, started[0])
        if "push" in self.kind:
            wait_for((self.directory.parent / "pushing").exists, started[0])
        time.sleep(rng.uniform(0.0, 0.06 if "push" in self.kind else 0.5))
        victim = rng.choice(started)
        assert all(process.is_alive() for process in started), "it was to be killed before its end"
        os.kill(victim.pid, signal.SIGKILL)
        for process in started:
            process.join(90)
            assert process.exitcode is not None, "the other rank waits for one that is dead"
        in_a_save = any(self.directory.glob("partial-*"))
        in_a_push = (self.directory.parent / "pushing").exists()
        (self.directory.parent / "pushing").unlink(missing_ok=True)
        self.kills["after a checkpoint" if is_late else "anywhere"] += 1
        self.kills["in a save"] += in_a_save
        self.kills["in a push"] += in_a_push
        for checkpoint in list_checkpoints(self.directory):
            sealed.verify(checkpoint)

    def last_checkpoint(self) -> dict[str, torch.Tensor]:
        (*_, newest) = list_checkpoints(self.directory)
        assert newest.name == f"checkpoint-{NUM_STEPS}"
        return load_file(newest / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_twelve_times_ends_as_one_that_is_not(kind, tmp_path):
    server = NativeServer(make_model(), max_num_seqs=None) if "server" in kind else None
    environment = {} if server is None else {"SERVER": server.base_url}
    killed, whole = (Run(kind, tmp_path / name, environment) for name in ("killed", "whole"))
    rng = random.Random(kind)
    for number in range(NUM_KILLS):
        killed.kill(number, rng)
    killed.finish()
    whole.finish()
    if server is not None:
        server.close()
    print(f"\n{kind}: {dict(killed.kills)}, partial checkpoints left: "
          f"{len(list(killed.directory.glob('partial-*')))}")  # fmt: skip
    assert not list(killed.directory.glob("partial-*"))
    # Which sequences are decoded together depends on when a server is asked and tools answer, and roundings
    # depend on that.
    exact = kind in ("carry-over", "refill", "two ranks")
    ours, theirs = killed.last_checkpoint(), whole.last_checkpoint()
    furthest = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    print(f"largest difference of a weight: {furthest:g}")
    assert furthest == 0.0 if exact else furthest < 2e-3
    records, expected = (read_metrics(run.directory) for run in (killed, whole))
    assert [record["step"] for record in records] == list(range(1, NUM_STEPS + 1))
    names = ("reward", "num_tokens", *(("loss", "grad_norm", "entropy") if exact else ()))
    assert [[r.get(n) for n in names] for r in records] == [[r.get(n) for n in names] for r in expected]
