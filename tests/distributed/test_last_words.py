"""A refusal that all ranks share is on the terminal once; one rank's own is seen, too."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from colocate.parallel import meeting
from colocate.parallel.meeting import Meeting
from processes import run_ranks

REFUSAL = "colocate train: shard={} is unknown; it is one of auto, none, 1, 2, 4, 8."


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The exit code, the words and the seconds of each of two ranks by case."""
    directory = tmp_path_factory.mktemp("words")
    run_ranks(2, Path(__file__).with_name("last_words_worker.py"), directory, timeout_s=240)
    return [json.loads((directory / f"said{rank}.json").read_text()) for rank in range(2)]


def test_what_all_ranks_refuse_is_said_by_the_first(said):
    (code, first, _), (other_code, other, _) = (of_rank["all"] for of_rank in said)
    assert code == other_code == 1
    assert first.count(REFUSAL.format(3)) == 1 and "shard" not in other


def test_what_one_rank_refuses_is_said_by_it(said):
    (code, first, first_seconds), (other_code, other, _) = (of_rank["second"] for of_rank in said)
    assert code == other_code == 1
    assert other.count(REFUSAL.format(3)) == 1
    assert first_seconds < 60, "the first rank does not wait for ddp_timeout"
    assert f"rank 1 is missing. It has ended with the words: {REFUSAL.format(3)}" in first


def test_each_rank_says_a_refusal_of_its_own(said):
    texts = [of_rank["different"][1] for of_rank in said]
    assert REFUSAL.format(5) in texts[0] and REFUSAL.format(3) in texts[1]


def test_nobody_waits_for_ever_for_last_words(monkeypatch):
    """Of four ranks that end, rank 2 says something else, and rank 3 never comes."""
    monkeypatch.setattr(meeting, "APART_S", 3.0)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=100))
    stores = [host, *(TCPStore("127.0.0.1", host.port, timeout=timedelta(seconds=100)) for _ in range(2))]
    is_said = {}

    def end(rank: int) -> None:
        place = Meeting(PrefixStore("test", stores[rank]), rank, 4, 4)
        is_said[rank] = place.ends_as_first("another" if rank == 2 else "the same")

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    assert is_said == {0: False, 1: True, 2: False}
