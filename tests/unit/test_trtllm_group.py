"""Two ranks that have one TensorRT-LLM together: one leads, both send weights and ask, none waits in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_models import MAX_POSITION, greedy_references, make_model, make_prompts
from trtllm_case import BUCKET_BYTES, HostMemory, LocalServer, arguments_for
from trtllm_stand_in import GPUS, NEWEST, installed

from colocate.parallel.verdict import PeerError, Peers
from colocate.types import SamplingParams
from colocate_trtllm.engine import TRTLLMEngine
from colocate_trtllm.ray_server import Placement

GREEDY = SamplingParams(max_tokens=9, temperature=0)


class Member:
    """A rank of a group, which is a thread here; `TensorParallelGroup` is the same between processes."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.size, self.index, self.leads = rank, 2, 0, rank == 0
        self._meeting, self._table = meeting, table

    def gather(self, item: Any) -> list[Any]:
        self._table[self.rank] = item
        self._meeting.wait(30)
        told = list(self._table)
        self._meeting.wait(30)
        return told


class Pair:
    """Two engines of one server, over models with equal weights."""

    def __init__(self) -> None:
        self.models = [make_model("qwen3") for _ in range(2)]
        self.server = LocalServer()
        placed = Placement([None], [[0, 1]], 0.5).arguments()
        started = self.server.call("start", arguments_for(self.models[0], tensor_parallel_size=2), placed)
        meeting, table = threading.Barrier(2), [None, None]
        self._threads = ThreadPoolExecutor(2)

        def make(rank: int) -> TRTLLMEngine:
            memory = HostMemory()
            memory.gpu = GPUS[rank]
            return TRTLLMEngine(
                self.models[rank], self.server, started, max_len=MAX_POSITION, memory=memory,
                group=Member(rank, meeting, table), everyone=Peers(torch.device("cpu")),
                bucket_bytes=BUCKET_BYTES,
            )  # fmt: skip

        self.engines = self.both(make)

    def both(self, work: Callable[[int], Any]) -> list[Any]:
        """What each rank's thread comes to: a result, or an error."""

        def tried(rank: int) -> Any:
            try:
                return work(rank)
            except Exception as error:
                return error

        return [done.result(60) for done in [self._threads.submit(tried, rank) for rank in range(2)]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with installed(NEWEST):
        made = Pair()
        yield made
        made.server.close()


def test_both_ask_at_any_time_and_in_any_number(pair):
    assert pair.both(lambda rank: pair.engines[rank].wake_up()) == [None, None]
    prompts = make_prompts([3, 8, 5, 11])

    def ask(rank: int) -> list[list[int]]:
        completions = []
        for number in range(3 if rank else 1):  # the ranks are not in step
            completions += pair.engines[rank].generate([prompts[rank + number]], GREEDY)
        return [list(c.token_ids) for c in completions]

    first, second = pair.both(ask)
    expected = greedy_references(pair.models[0], prompts, 9)
    assert first == expected[:1] and second == expected[1:]


def test_each_worker_has_its_weights_from_the_rank_on_its_gpu(pair):
    """The ranks' weights differ here, as they never do in a run: so it is seen whose came where."""
    with torch.no_grad():
        pair.models[1].model.norm.weight.mul_(2)
    pair.both(lambda rank: pair.engines[rank].wake_up())
    workers = pair.server.inner._llm.workers
    for worker, model in zip(workers, pair.models, strict=True):
        for name, weight in worker.engine.model_engine.model.named_parameters():
            assert torch.equal(weight, dict(model.named_parameters())[name]), name


def test_an_error_of_the_leader_reaches_the_other_which_does_not_wait_forever(pair):
    inner = pair.server.inner._llm.workers[1].engine
    inner.fail_at = inner.num_loaded + 5
    first, second = pair.both(lambda rank: pair.engines[rank].wake_up())
    assert isinstance(first, RuntimeError) and "injected" in str(first)
    assert isinstance(second, PeerError) and "leads: RuntimeError: injected" in str(second)
    assert pair.server.call("status").version is None
    inner.fail_at = None
    assert pair.both(lambda rank: pair.engines[rank].wake_up()) == [None, None], "it can be tried again"
    (completion,) = pair.engines[1].generate(make_prompts([4]), GREEDY)
    assert list(completion.token_ids) == greedy_references(pair.models[1], make_prompts([4]), 9)[0]


def test_an_error_of_the_other_rank_ends_the_push_for_both(pair, monkeypatch):
    """Rank 1 runs out of memory while it fills its third chunk."""
    whole, num_buffers = HostMemory.buffer, 0

    def buffer(memory: HostMemory, num_bytes: int) -> torch.Tensor:
        nonlocal num_buffers
        num_buffers += memory.gpu == GPUS[1]
        if memory.gpu == GPUS[1] and num_buffers == 3:
            raise torch.OutOfMemoryError("no room for a chunk")
        return whole(memory, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "buffer", buffer)
        first, second = pair.both(lambda rank: pair.engines[rank].wake_up())
    assert isinstance(second, torch.OutOfMemoryError)
    assert isinstance(first, PeerError) and "no room for a chunk" in str(first)
    assert pair.server.call("status").version is None
    assert pair.server.inner._push is None, "the leader has given it up"
    assert pair.both(lambda rank: pair.engines[rank].wake_up()) == [None, None]


def test_the_server_sleeps_when_both_have_drawn(pair):
    pair.both(lambda rank: pair.engines[rank].wake_up())
    drawn = threading.Event()

    def play(rank: int) -> Any:
        if rank == 1:
            completions = pair.engines[1].generate(make_prompts([5], 4), SamplingParams(60))
            drawn.set()
        pair.engines[rank].sleep()
        assert drawn.is_set(), "the first rank had nothing to draw and waited"
        return completions if rank else None

    _, completions = pair.both(play)
    assert [len(c.token_ids) for c in completions] == [60] * 4
    assert not pair.server.call("status").is_awake
