"""`RolloutEngine`: the methods by which the loop drives any engine. `BaseEngine`: the part that our engines
share.

`tests/unit/test_engine_contract.py` holds every engine to what is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from colocate.engines.requests import check_requests, check_token_ids
from colocate.memory.timeline import NOTHING_POOLED, PooledBytes
from colocate.reporting.work_counts import WorkCounts
from colocate.types import Completion, Prompt, SamplingParams


class EngineLost(RuntimeError):
    """The server that generates is gone or useless; another engine can do the same work."""


class RolloutEngine(Protocol):
    """A source of completions that takes turns with the trainer on the same device.

    An engine starts asleep. Only the training loop wakes it and puts it to sleep.
    """

    shares_weights: bool
    """True: the engine reads the trainer's own parameters, and publishing moves no byte."""
    policy_version: int
    """Version of the weights the next `generate` uses; stamped on every completion."""
    pooled_bytes: PooledBytes
    """Memory that the engine maps itself and PyTorch's allocator counts as its own; it never changes."""
    counts: WorkCounts
    """Where the engine counts tokens as it draws them, and in `generate` completions; a run puts its own in
    place."""

    @property
    def num_restarts(self) -> int:
        """The number of times that a rollout server was lost and came back; 0 for other engines."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids that a prompt may consist of."""
        ...

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the KV cache holds now; while asleep, those that `sleep` let it keep. 0 if unknown."""
        ...

    @property
    def rollout_weight_bytes(self) -> int:
        """Bytes that a copy of the weights holds now; while asleep, those that `sleep` let it keep."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """Complete every prompt: `sum(len(p.samples) for p in prompts)` completions, prompt by prompt.

        Raises:
            ValueError: a prompt is empty, its `max_tokens` are not one per sample or exceed the rollout's
                `max_tokens`, or prompt + completion could exceed the engine's context.
            RuntimeError: the engine is asleep.
        """
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a submitted sequence waits or runs, so that `poll` has something to do."""
        ...

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, keep: bool = False) -> list[int]:
        """Queue sequences to be generated: one for each sample of each prompt, prompt by prompt.

        Args:
            sampling: equal to that of all sequences that the engine still has.
            keep: keep a sequence after a turn, so that it can be extended, until it is aborted. All its
                tokens after the prompt, drawn and given, are then at most `sampling.max_tokens`, and within
                the engine's context with the prompt.

        Returns:
            The sequences' numbers.
        """
        ...

    def poll(self) -> dict[int, Completion]:
        """Generate a little further, and return the turns that have ended since, by their sequences.

        A turn ends with a stop token or at its limit. A turn of an episode has draws of its own: they depend
        on the seed, the prompt's key, the member and the number of the turn.
        """
        ...

    def progress(self, sequence: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
        """The tokens that a turn under way has drawn so far, for those who show it as it grows.

        Returns:
            The turn's tokens from number `start` on, and their log-probs (None: the engine cannot tell). No
            token, if there is none yet, or the engine tells only of whole turns, or knows no such turn.
        """
        ...

    def num_cached_tokens(self, sequence: int) -> int | None:
        """`Completion.num_cached_tokens` of a turn under way; None: it is not known, or there is no such
        turn."""
        ...

    def extend(self, sequence: int, token_ids: Sequence[int], max_tokens: int) -> None:
        """Begin the next turn of a sequence that was kept: append tokens, then draw up to `max_tokens`.

        Raises:
            ValueError: the sequence has a turn under way or is not known, a token is outside the vocabulary,
                or the sequence could become longer than `sampling.max_tokens`.
        """
        ...

    def abort(self, sequences: Iterable[int]) -> None:
        """Forget sequences in any state, and free their memory. Unknown numbers are ignored."""
        ...

    def sleep(self, keep_bytes: int = 0) -> None:
        """Give back the memory of the KV cache and of a copy of the weights. Sleeping twice is harmless.

        The engine may keep up to `keep_bytes` of that memory, so that it wakes up faster; the contents are
        lost in any case. Sequences stay, and are computed again from their tokens. Called while asleep,
        `sleep` gives back all but `keep_bytes` of the memory that the engine keeps.
        """
        ...

    def wake_up(self) -> None:
        """Take the KV cache's memory again; its contents are undefined. Waking twice is harmless."""
        ...

    def update_weights(self, version: int) -> None:
        """Publish a policy version and forget everything computed with older ones (prefix pages).

        The weights are those of the model that the engine was made with. With `shares_weights` they are in
        place already; another engine copies them, now or, if it is asleep, when it wakes up.
        """
        ...

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        ...


class BaseEngine:
    """An engine that is asleep, awake or closed, reads the trainer's own weights and holds no memory.

    A subclass writes `generate`, which begins with `_check`, and overrides the methods that differ. One whose
    library completes whole lists of prompts is a `TurnEngine`.

    Attributes:
        _max_len: longest prompt + completion in tokens.
        _max_len_reason: the reason for that limit, for error messages.
        _vocab_size: number of token ids that a prompt may consist of.
    """

    shares_weights = True
    pooled_bytes = NOTHING_POOLED
    num_restarts = 0
    policy_version = 0
    _is_awake = False
    _is_closed = False
    _counts: WorkCounts | None = None
    _max_len: int
    _max_len_reason: str
    _vocab_size: int

    @property
    def counts(self) -> WorkCounts:
        if self._counts is None:
            self._counts = WorkCounts()
        return self._counts

    @counts.setter
    def counts(self, counts: WorkCounts) -> None:
        self._counts = counts

    def _count_requests(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Begin to count the work of a `generate`."""
        limits = [limit for prompt in prompts for limit in prompt.limits(sampling.max_tokens)]
        self.counts.begin("tokens", sum(limits), is_limit=True)
        self.counts.begin("completions", len(limits))

    def _count_ended(self, completions: Iterable[Completion]) -> None:
        """Count completions whose tokens were not counted as they were drawn."""
        for completion in completions:
            self.counts.add("tokens", len(completion.token_ids))
            self.counts.add("completions")

    @property
    def max_len(self) -> int:
        return self._max_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def kv_cache_bytes(self) -> int:
        return 0

    @property
    def rollout_weight_bytes(self) -> int:
        return 0

    def progress(self, sequence: int, start: int = 0) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
        return (), None

    def num_cached_tokens(self, sequence: int) -> int | None:
        return None

    def sleep(self, keep_bytes: int = 0) -> None:
        """Refuse `generate`; there is no memory to give back."""
        self._is_awake = False

    def wake_up(self) -> None:
        """Allow `generate`.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._check_open()
        self._is_awake = True

    def update_weights(self, version: int) -> None:
        """Note the version of the weights, which are in place already."""
        self.policy_version = version

    def close(self) -> None:
        """Refuse everything from now on."""
        self._is_awake, self._is_closed = False, True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The engine is closed and cannot be used again.")

    def _check_awake(self, method: str) -> None:
        if not self._is_awake:
            raise RuntimeError(f"The engine is asleep; call wake_up() before {method}().")

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Raises RuntimeError if the engine is asleep, ValueError for what `check_requests` refuses."""
        self._check_awake("generate")
        check_requests(
            prompts,
            sampling,
            max_len=self._max_len,
            max_len_reason=self._max_len_reason,
            vocab_size=self._vocab_size,
        )

    def _check_submission(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, open_sampling: SamplingParams | None
    ) -> None:
        """Raises as `_check` does, and ValueError if the engine has sequences with other `open_sampling`."""
        self._check(prompts, sampling)
        if open_sampling not in (None, sampling):
            raise ValueError(
                f"The engine still has sequences with {open_sampling}; it was asked for more with "
                f"{sampling}. Finish or abort those first, or ask for the same."
            )

    def _check_extension(
        self,
        sequence: int,
        token_ids: Sequence[int],
        limit: int,
        *,
        num_prompt: int,
        num_after: int,
        sampling: SamplingParams,
    ) -> None:
        """Refuse tokens by which a sequence cannot be extended.

        Args:
            limit: tokens that it may draw after `token_ids`.
            num_prompt: tokens of its prompt.
            num_after: tokens that it has after its prompt, drawn and given.
        """
        check_token_ids(f"Sequence {sequence} was given", token_ids, self._vocab_size)
        most = min(sampling.max_tokens, self._max_len - num_prompt)
        total = num_after + len(token_ids) + limit
        if limit < 1 or total > most:
            raise ValueError(
                f"Sequence {sequence} has {num_after} tokens after its prompt of {num_prompt}; "
                f"{len(token_ids)} more and {limit} to draw make {total}, and {most} may follow it "
                f"(max_tokens = {sampling.max_tokens}; {self._max_len_reason}). Draw at least 1 token and at "
                f"most {most - num_after - len(token_ids)}, or raise max_completion_length."
            )
