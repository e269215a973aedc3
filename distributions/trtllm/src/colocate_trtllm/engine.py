"""TensorRT-LLM as a rollout engine: its workers take turns with the ranks on the ranks' GPUs.

Each `size` consecutive ranks have one TensorRT-LLM together (`server.py`). All of them ask it for
completions, at any time and in any number; what concerns its memory and weights they do together, and the
first leads:

    wake_up()   memory for weights, the weights, all ranks of the run wait, memory for the KV cache
    sleep()     requests are cancelled, and the memory of both goes back; the weights are lost with it
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from colocate.engines.base import EngineLost
from colocate.engines.requests import derived_seed
from colocate.engines.turns import Turn, TurnEngine
from colocate.engines.vllm import logprobs_mode
from colocate.engines.vllm.groups import TensorParallelGroup
from colocate.engines.vllm.logprobs_mode import ReportedLogprobs
from colocate.parallel.verdict import PeerError, Peers, first_line
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import num_embeddings
from colocate.weights.source import BUCKET_BYTES, WeightSource, why_not_publishable
from colocate_trtllm.ray_server import Server
from colocate_trtllm.sampling import PROCESSED, RAW, DrawnTokens, SamplingRequest, sampling_arguments
from colocate_trtllm.server import Failed, Started
from colocate_trtllm.shared_memory import Handle, SharedMemory

logger = logging.getLogger(__name__)

PHASE_S = 600.0
"""Seconds for a change of phase, or a chunk of weights."""
ASK_S = 120.0
"""Seconds for an answer about requests."""
_POLL_S = 0.5
"""Seconds of a `poll` in which no turn ends."""

_MODES = {RAW: logprobs_mode.RAW, PROCESSED: logprobs_mode.PROCESSED}
_NO_MODES = "Install a release of TensorRT-LLM whose SamplingParams have logprobs_mode: this one has no {}"


class TRTLLMEngine(TurnEngine):
    """Generates with a TensorRT-LLM that runs beside the ranks, with a copy of the weights of `model`.

    Completions with equal (seed, prompt key, member) are drawn with equal noise if TensorRT-LLM's sampler
    has a seed for each request, which releases of 2026-08 and later have.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        server: the running engine of this rank's group, asleep.
        started: what it has told at its start.
        max_len: longest prompt + completion in tokens, with which it was started.
        group: the ranks that have it together.
        everyone: all ranks of the run, which wait for each other before memory for the KV cache is taken.
        memory: memory of this rank's device that a worker can read.
        bucket_bytes: see `WeightSource`.

    Raises:
        ValueError: this policy's weights cannot be handed over.
        RuntimeError: its workers are not on the ranks' GPUs.
    """

    shares_weights = False

    def __init__(
        self,
        model: nn.Module,
        server: Server,
        started: Started,
        *,
        max_len: int,
        group: TensorParallelGroup,
        everyone: Peers,
        memory: SharedMemory,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if (reason := why_not_publishable(model)) is not None:
            raise ValueError(f"TensorRT-LLM cannot generate with this policy: {reason}.")
        self._source: WeightSource | None = WeightSource(model, bucket_bytes)
        self._server, self._started = server, started
        self._group, self._everyone, self._memory = group, everyone, memory
        self._max_len, self._max_len_reason = max_len, f"TensorRT-LLM's max_seq_len = {max_len}"
        self._vocab_size = num_embeddings(model)
        self._weight_bytes = self._source.num_bytes // group.size
        self._tickets: dict[int, int] = {}
        """Sequences whose turns are under way, by the tickets of their requests."""
        self._next_ticket = itertools.count()
        is_first = group.rank == 0
        self._reported = {
            mode: ReportedLogprobs(
                name,
                engine="TensorRT-LLM",
                is_main=is_first,
                how_to_start=None if started.names_logprobs_modes else _NO_MODES,
            )
            for mode, name in _MODES.items()
        }
        self._check_gpus()
        if group.leads:
            logger.info(
                f"TensorRT-LLM {started.release} generates for ranks {group.rank} to "
                f"{group.rank + group.size - 1}, with a copy of the weights that comes in chunks of up to "
                f"{bucket_bytes / 2**20:,.0f} MiB before each rollout."
            )

    @property
    def rollout_weight_bytes(self) -> int:
        """Bytes of this GPU's part of the copy of the weights; 0 asleep."""
        return self._weight_bytes if self._is_awake else 0

    # ── Rollout ──────────────────────────────────────────────────────────────────────────────────────────

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt. See `RolloutEngine.generate`; ranks need not call it together."""
        self._check(prompts, sampling)
        self._count_requests(prompts, sampling)
        requests = list(self._requests(prompts, sampling))
        if not requests:
            return []
        box = f"generate-{self._group.rank}"
        drawn: dict[int, Completion] = {}
        try:
            self._ask("submit", box, self.policy_version, requests)
            while len(drawn) < len(requests):
                for result in self._ask("collect", box, _POLL_S):
                    drawn[result.ticket] = self._completion(result, sampling)
                    self._count_ended([drawn[result.ticket]])
        except BaseException:
            with suppress(Exception):
                self._ask("cancel", box)
            raise
        return self._told([drawn[request.ticket] for request in requests], sampling)

    def abort(self, sequences: Iterable[int]) -> None:
        gone = set(sequences)
        super().abort(gone)
        if tickets := [ticket for ticket, number in self._tickets.items() if number in gone]:
            for ticket in tickets:
                del self._tickets[ticket]
            self._ask("cancel", self._box, tickets)

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        """Let the turns that wait be drawn, and return those that have ended since."""
        requests, under_way = [], set(self._tickets.values())
        for number, turn in waiting.items():
            if number not in under_way:
                (request,) = self._requests([turn.as_prompt()], sampling)
                requests.append(request)
                self._tickets[request.ticket] = number
        if requests:
            self._ask("submit", self._box, self.policy_version, requests)
        results = self._ask("collect", self._box, _POLL_S)
        numbers = [self._tickets.pop(result.ticket) for result in results]
        completions = [self._completion(result, sampling) for result in results]
        return dict(zip(numbers, self._told(completions, sampling), strict=True))

    # ── Phases: all ranks of the run call these together ─────────────────────────────────────────────────

    def sleep(self, keep_bytes: int = 0) -> None:
        """Give all memory back. `keep_bytes` has no effect: TensorRT-LLM gives each kind back as a whole."""
        if self._is_awake:
            self._tickets.clear()
            self._group.gather(None)  # the others may still be drawing
            self._lead("sleep")
        super().sleep()

    def wake_up(self) -> None:
        """Take memory for the weights, send them, take the KV cache's memory.

        The weights were lost with their memory, so that they are sent in any case: also when nothing was
        published since the engine slept, as between two evaluations.

        Raises:
            RuntimeError: the engine is closed, or the weights could not be sent, here or on another rank.
        """
        self._check_open()
        if self._is_awake:
            return
        self._make_room()
        error: Exception | None = None
        try:
            self._lead("take_weights")
            self._push()
        except Exception as caught:
            error = caught
        self._make_room()
        # Until here a rank may need memory for publishing, which a KV cache on its GPU would take.
        self._everyone.agree(error)
        self._lead("take_kv")
        self._is_awake = True

    def update_weights(self, version: int) -> None:
        """Publish the weights that `model` has now; if asleep, those that it will have in `wake_up`."""
        self.policy_version = version
        if self._is_awake:
            self._tickets.clear()
            error: Exception | None = None
            try:
                self._push()
            except Exception as caught:
                error = caught
            self._everyone.agree(error)

    def close(self) -> None:
        """End TensorRT-LLM, if this rank has started it."""
        if not self._is_closed:
            super().close()
            self._tickets.clear()
            self._source = None
            self._server.close()

    def _push(self) -> None:
        """Send the weights; all ranks of the group raise if one cannot."""
        version, number = self.policy_version, 0
        self._lead("begin", version)
        try:
            for handles in self._chunks_of_all():
                self._lead("chunk", version, number, handles)
                number += 1
            self._lead("commit", version, number)
        except BaseException:
            if self._group.leads:
                with suppress(Exception):
                    self._server.call("abort", version, timeout_s=PHASE_S)
            raise

    def _chunks_of_all(self) -> Iterator[dict[str, list[tuple[str, Handle]]]]:
        """Chunk by chunk the handles of every rank's tensors, by its GPU."""
        assert self._source is not None
        chunks = self._source.chunks(self._memory.buffer)
        try:
            while True:
                mine: list[tuple[str, Handle]] | None = None
                error: Exception | None = None
                try:
                    if (chunk := next(chunks, None)) is not None:
                        mine = [(name, self._memory.handle(tensor)) for name, tensor in chunk.tensors]
                        self._memory.written()
                except Exception as caught:
                    error = caught
                told = self._group.gather((self._memory.gpu, mine, error and first_line(error)))
                if error is not None:
                    raise error
                if failures := [text for _, _, text in told if text is not None]:
                    raise PeerError(f"Another rank could not prepare its weights: {failures[0]}")
                if mine is None:
                    return
                yield {gpu: handles for gpu, handles, _ in told if handles is not None}
        finally:
            self._memory.close()

    def _make_room(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # another process maps the memory that PyTorch holds without using it

    # ── The server ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def _box(self) -> str:
        return f"turns-{self._group.rank}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self._server.call(method, *arguments, timeout_s=ASK_S)

    def _lead(self, method: str, *arguments: Any) -> None:
        """Let the first rank of the group call the server, and go on with the others when it has answered."""
        error: Exception | None = None
        if self._group.leads:
            try:
                self._server.call(method, *arguments, timeout_s=PHASE_S)
            except Exception as caught:
                error = caught
        failure = self._group.gather(error and first_line(error))[0]
        if error is not None:
            raise error
        if failure is not None:
            raise PeerError(f"TensorRT-LLM, which the first rank of this group leads: {failure}")

    def _check_gpus(self) -> None:
        ranks = self._group.gather(self._memory.gpu)
        if sorted(ranks) != sorted(self._started.gpus):
            raise RuntimeError(
                f"TensorRT-LLM's workers are on {', '.join(self._started.gpus)} and its ranks on "
                f"{', '.join(ranks)}: weights could not be handed over. Start the run with --launcher ray, "
                "on nodes whose GPUs Ray alone gives out."
            )

    # ── Requests ─────────────────────────────────────────────────────────────────────────────────────────

    def _mode(self, sampling: SamplingParams) -> str:
        """Which log-probs to ask for: raw ones if they are the policy's, as they are at temperature 1."""
        is_raw = logprobs_mode.tells_policys(logprobs_mode.RAW, sampling)
        return RAW if is_raw or not self._started.names_logprobs_modes else PROCESSED

    def _requests(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[SamplingRequest]:
        mode = self._mode(sampling) if self._started.names_logprobs_modes else None
        for prompt in prompts:
            for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True):
                arguments = sampling_arguments(
                    sampling,
                    max_tokens=limit,
                    seed=derived_seed(sampling.seed, prompt.key, sample, num_bits=63),
                    logprobs_mode=mode,
                )
                yield SamplingRequest(next(self._next_ticket), prompt.token_ids, arguments)

    def _completion(self, result: DrawnTokens | Failed, sampling: SamplingParams) -> Completion:
        """The completion that a request has come to."""
        if isinstance(result, Failed):
            raise RuntimeError(f"TensorRT-LLM could not draw a completion: {result.reason}")
        if result.finish == "cancelled":
            raise EngineLost(f"TensorRT-LLM gave a completion up after {len(result.token_ids)} tokens.")
        is_stopped = result.token_ids[-1] in sampling.stop_token_ids
        return Completion(
            result.token_ids, result.logprobs, "stop" if is_stopped else "length", result.version
        )

    def _told(self, completions: list[Completion], sampling: SamplingParams) -> list[Completion]:
        return self._reported[self._mode(sampling)].of(completions, sampling)
