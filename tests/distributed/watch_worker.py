"""One of two ranks, of which rank 1 comes to an end: `watch_worker.py <how> <directory>`.

<how> is "killed", "raises", "ends", "trainer", "saves" or "hangs" (until it was told of).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from colocate.checkpoints.stop_signals import StopRequest
from colocate.parallel import stalls, watch


def end(how: str) -> None:
    """The end of rank 1."""
    print("the last words of rank 1", file=sys.stderr)
    threading.Event().wait(2 * watch.BEAT_S)  # what is written less than a beat before is lost
    if how == "raises":
        raise ValueError("rank 1 has found something")
    if how == "ends":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def work(how: str) -> None:
    """Rank 0 waits as if for a collective that does not notice that rank 1 is gone."""
    with watch.watching(60.0, lambda: "after step 6"):
        dist.barrier()  # of a piece of work that both finish
    if how == "ends" and dist.get_rank() == 1:
        end(how)
    # torchrun sends SIGTERM to the ranks that are left, and a run takes it for a wish to stop after the step.
    with StopRequest(cast(Any, None)), watch.watching(60.0, lambda: "after step 7"):
        if how != "ends":
            dist.barrier()
        if dist.get_rank() == 1:
            end(how)
        threading.Event().wait(60)
        print("nobody has noticed")


def hang(directory: Path) -> None:
    """The reward function of rank 1 returns when rank 0 has told of it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import tiny

    stalls.STALL_S = 2.0
    is_told = directory / "told"

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage(), file=sys.stderr)
            if "waits for it" in record.getMessage():
                is_told.touch()

    logging.getLogger("colocate").addHandler(Telling())

    def slow(completions: list[str], **_: Any) -> list[float]:
        until_s = time.monotonic() + 60
        while os.environ["RANK"] == "1" and not is_told.exists() and time.monotonic() < until_s:
            threading.Event().wait(0.1)
        return tiny.count_digits(completions)

    tiny.make_trainer(directory, reward_funcs=slow, per_device_train_batch_size=2, max_steps=1).train()


def train(directory: Path) -> None:
    """Rank 1 is killed in the second step, while rank 0 goes on to a collective."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import tiny

    trainer: Any = None

    def reward(completions: list[str], **_: Any) -> list[float]:
        if trainer.state.global_step == 1 and trainer.args.process_index == 1:
            end("killed")
        return tiny.count_digits(completions)

    engine = tiny.StubEngine(lambda prompt, member: [5 + member, tiny.EOS])
    trainer = tiny.make_trainer(directory, reward_funcs=reward, stub=engine)
    trainer.train()


def save_alone(directory: Path) -> None:
    """Rank 0 alone saves a model that it has whole, which it may, and then one of which it has a part."""
    for path in (Path(__file__).parents[1], Path(__file__).parents[1] / "integration"):
        sys.path.insert(0, str(path))
    from small_runs import make_trainer

    for parts in (1, 2):
        options: dict[str, Any] = dict(shard=parts, max_steps=1, save_strategy="no")
        trainer = make_trainer(directory / str(parts), gradient_accumulation_steps=1, **options)
        trainer.train()
        if dist.get_rank() == 0:
            trainer.save_model()
    print("the last words of rank 1", file=sys.stderr)


def main() -> None:
    how, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    watch.GRACE_S = 2.0
    if how == "trainer":
        train(directory)
    elif how == "saves":
        save_alone(directory)
    elif how == "hangs":
        hang(directory)
    else:
        dist.init_process_group("gloo")
        work(how)


if __name__ == "__main__":
    main()
