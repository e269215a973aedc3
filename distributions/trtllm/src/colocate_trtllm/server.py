"""One TensorRT-LLM for a group of ranks: the engine, the requests of each rank, weights, and memory.

It is a Ray actor without a GPU of its own; the engine's workers are Ray actors, too, on the ranks' GPUs. This
file runs where TensorRT-LLM is installed. All ranks of the group ask it for completions, one of them leads it
through its phases:

    asleep ── take_weights ─▶ begin, chunk …, commit ── take_kv ─▶ awake ── sleep ─▶ asleep
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from colocate.parallel.launching import without_launchers
from colocate_trtllm import memory_tags
from colocate_trtllm.sampling import DrawnTokens, SamplingRequest, drawn

WORKER = "colocate_trtllm.weight_worker.WeightWorker"
ABORT_S = 60.0
"""Seconds for the engine to give up requests that were cancelled."""


class Started(NamedTuple):
    """Facts about a running engine that the ranks need."""

    release: str
    gpus: tuple[str, ...]
    """UUIDs of the workers' GPUs, each beginning with "GPU-"."""
    names_logprobs_modes: bool
    """Whether requests can say which log-probs they want; older releases have raw ones only."""


class Failed(NamedTuple):
    """A request that has ended with an error."""

    ticket: int
    reason: str


class Status(NamedTuple):
    """The state of a server."""

    version: int | None
    """The version of the weights; None: there are none, or a mixture of two versions."""
    is_awake: bool
    num_running: int


@dataclass
class _Box:
    """The requests of one asker that are under way, and what has ended since it last looked."""

    running: dict[int, tuple[Any, asyncio.Task[DrawnTokens | Failed]]] = field(default_factory=dict)
    ended: list[DrawnTokens | Failed] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Push:
    """Weights on their way: the version, and the number of chunks that were loaded."""

    version: int
    num_chunks: int = 0


class TRTLLMServer:
    """Holds an `AsyncLLM`. All methods run on one event loop, which is the actor's."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._sampling_class: Any = None
        self._boxes: dict[str, _Box] = {}
        self._version: int | None = None
        self._push: _Push | None = None
        self._has_weights = self._is_awake = False
        self._changing = asyncio.Lock()
        """Weights and memory change one call at a time: one whose caller has lost patience may still run."""
        self._names_logprobs_modes = False

    async def start(self, arguments: Mapping[str, Any], placement: Mapping[str, Any]) -> Started:
        """Start the engine. It is asleep then, and has no weights.

        Args:
            arguments: those of `AsyncLLM`, but for its placement and memory; `kv_cache_config` as a mapping.
            placement: see `Placement.arguments`.

        Raises:
            ImportError: TensorRT-LLM is not installed in the interpreter of this actor.
        """
        self._leave_launchers()
        import tensorrt_llm
        from tensorrt_llm.llmapi import KvCacheConfig

        self._sampling_class = tensorrt_llm.SamplingParams
        self._names_logprobs_modes = "logprobs_mode" in getattr(
            self._sampling_class, "__dataclass_fields__", ()
        )
        self._llm = tensorrt_llm.AsyncLLM(
            **{**arguments, "kv_cache_config": KvCacheConfig(**arguments["kv_cache_config"])},
            **placement,
            **memory_tags.sleep_arguments(),
            ray_worker_extension_cls=WORKER,
        )
        await self._llm.setup_async()
        gpus = await self._llm.collective_rpc("gpu_uuid")
        self._has_weights = self._is_awake = True
        await self.sleep()
        return Started(tensorrt_llm.__version__, tuple(gpus), self._names_logprobs_modes)

    async def status(self) -> Status:
        return Status(self._version, self._is_awake, sum(len(box.running) for box in self._boxes.values()))

    async def close(self) -> None:
        """End the engine and its workers."""
        if self._llm is not None:
            await self._cancel_all()
            llm, self._llm = self._llm, None
            llm.shutdown()

    @staticmethod
    def _leave_launchers() -> None:
        """Take out of the environment, which the engine's workers inherit, what would tell them other ranks.

        Workers are told their GPUs by their numbers on the node, so all of them must be visible.
        """
        for name in os.environ.keys() - without_launchers(os.environ).keys():
            del os.environ[name]
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    # ── Memory ───────────────────────────────────────────────────────────────────────────────────────────

    async def sleep(self) -> None:
        """Cancel all requests and give the memory of weights and KV cache back; the weights are lost, too, if
        that fails in the middle."""
        async with self._changing:
            if not self._has_weights:
                return
            self._is_awake = False
            await self._cancel_all()
            if callable(pause := getattr(self._llm, "pause_generation", None)):
                await pause()
            await self._llm.collective_rpc("forget_prefixes")
            self._version = None
            await self._llm.release([*memory_tags.weight_tags(), *memory_tags.kv_tags()])
            self._has_weights = False

    async def take_weights(self) -> None:
        """Take memory for weights, whose contents are undefined."""
        async with self._changing:
            if not self._has_weights:
                await self._llm.resume(memory_tags.weight_tags())
                self._has_weights = True

    async def take_kv(self) -> None:
        """Take the KV cache's memory, and accept requests.

        Raises:
            RuntimeError: there are no whole weights yet. Memory for the KV cache is taken last, when no rank
                needs memory for publishing any more.
        """
        async with self._changing:
            if self._version is None:
                raise RuntimeError("The KV cache was to be taken before the weights had come.")
            if not self._is_awake:
                await self._llm.resume(memory_tags.kv_tags())
                if callable(resume := getattr(self._llm, "resume_generation", None)):
                    await resume()
                self._is_awake = True

    # ── Weights ──────────────────────────────────────────────────────────────────────────────────────────

    async def begin(self, version: int) -> None:
        """Begin to take the weights of `version`. All requests are cancelled.

        Raises:
            RuntimeError: there is no memory for weights.
        """
        async with self._changing:
            if not self._has_weights:
                raise RuntimeError(f"Weights of version {version} came before memory was taken for them.")
            await self._give_up()
            await self._cancel_all()
            self._push = _Push(version)

    async def chunk(self, version: int, number: int, handles: Mapping[str, list[Any]]) -> int:
        """Load chunk `number`, unless that was done already; returns the number of chunks that are loaded.

        Args:
            handles: see `WeightWorker.receive_chunk`.

        Raises:
            RuntimeError: another chunk or version is due, or the workers could not load it. The weights are
                a mixture of two versions then, with which nothing is generated.
        """
        async with self._changing:
            push = self._push
            if push is None or push.version != version or number > push.num_chunks:
                due = "no weights are" if push is None else f"chunk {push.num_chunks} of {push.version} is"
                raise RuntimeError(f"Chunk {number} of version {version} came where {due} due.")
            if number == push.num_chunks:
                self._version = None
                await self._or_give_up("receive_chunk", dict(handles))
                push.num_chunks += 1
            return push.num_chunks

    async def commit(self, version: int, num_chunks: int) -> None:
        """Make the loaded weights those that requests are answered with; said again, it does nothing.

        Raises:
            RuntimeError: `abort` or another version came before, or not all chunks are there.
        """
        async with self._changing:
            push = self._push
            if push is None and self._version == version:
                return
            if push is None or (push.version, push.num_chunks) != (version, num_chunks) or not num_chunks:
                there = "none" if push is None else f"{push.num_chunks} of version {push.version}"
                raise RuntimeError(
                    f"{num_chunks} chunks of version {version} were to be used, of which {there} came."
                )
            await self._or_give_up("finish_push")
            self._push, self._version = None, version

    async def abort(self, version: int) -> None:
        """Give up the weights of `version`. Those before them are used on if no chunk was loaded yet."""
        async with self._changing:
            if self._push is not None and self._push.version == version:
                await self._give_up()

    async def _or_give_up(self, method: str, *arguments: Any) -> None:
        try:
            await self._llm.collective_rpc(method, args=arguments)
        except BaseException:
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        if self._push is not None:
            self._push = None
            await self._llm.collective_rpc("abort_push")

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    async def submit(self, box: str, version: int, requests: Iterable[SamplingRequest]) -> None:
        """Begin to draw completions with the weights of `version`.

        Args:
            box: whose requests they are.

        Raises:
            RuntimeError: the server is asleep, or takes weights, or has those of another version.
        """
        if not self._is_awake or self._push is not None or self._version != version:
            what = "asleep" if not self._is_awake else "taking weights" if self._push else "awake"
            raise RuntimeError(
                f"Completions of version {version} were asked for; the server is {what} and has weights of "
                f"version {self._version}."
            )
        own = self._boxes.setdefault(box, _Box())
        for request in requests:
            output = self._llm.generate_async(
                inputs={"prompt_token_ids": list(request.token_ids)}, sampling_params=self._params(request)
            )
            task = asyncio.ensure_future(self._follow(own, request.ticket, output, version))
            own.running[request.ticket] = output, task

    async def collect(self, box: str, wait_s: float) -> list[DrawnTokens | Failed]:
        """Results that have ended since the last call; waits up to `wait_s` for one to end."""
        own = self._boxes.setdefault(box, _Box())
        if not own.ended and own.running:
            own.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(own.news.wait(), wait_s)
        ended, own.ended = own.ended, []
        return ended

    async def cancel(self, box: str, tickets: Sequence[int] | None = None) -> list[DrawnTokens]:
        """Give requests up; None: all of the box. Unknown ones are harmless.

        Returns:
            What had been drawn for each by then, with as many log-probs as tokens; all of it for those that
            have ended and were not collected.

        Raises:
            RuntimeError: the engine does not give them up within `ABORT_S` seconds.
        """
        own = self._boxes.setdefault(box, _Box())
        chosen = {*own.running, *(result.ticket for result in own.ended)}
        if tickets is not None:
            chosen &= set(tickets)
        results = [result for result in own.ended if result.ticket in chosen]
        own.ended = [result for result in own.ended if result.ticket not in chosen]
        gone = [own.running.pop(ticket) for ticket in sorted(chosen) if ticket in own.running]
        for output, _ in gone:
            output.abort()
        if gone:
            _, pending = await asyncio.wait([task for _, task in gone], timeout=ABORT_S)
            if pending:
                raise RuntimeError(
                    f"{len(pending)} of {len(gone)} requests were not given up within {ABORT_S:g} s."
                )
            results += [task.result() for _, task in gone]
        return [result for result in results if isinstance(result, DrawnTokens)]

    async def _cancel_all(self) -> None:
        for name in self._boxes:
            await self.cancel(name)
        self._boxes.clear()

    async def _follow(self, box: _Box, ticket: int, output: Any, version: int) -> DrawnTokens | Failed:
        result: DrawnTokens | Failed
        try:
            done = await output
            result = drawn(ticket, done.outputs[0], version)
        except Exception as error:
            result = Failed(ticket, f"{type(error).__name__}: {error}")
        if box.running.pop(ticket, None) is not None:  # else it was cancelled, and is told to whoever did
            box.ended.append(result)
            box.news.set()
        return result

    def _params(self, request: SamplingRequest) -> Any:
        arguments = dict(request.arguments)
        if (mode := arguments.get("logprobs_mode")) is not None:
            from tensorrt_llm.sampling_params import LogprobMode

            arguments["logprobs_mode"] = LogprobMode[mode]
        return self._sampling_class(**arguments)
