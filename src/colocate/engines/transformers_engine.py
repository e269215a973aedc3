"""Rollouts by `model.generate`, for architectures that the native engine has no layout for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from colocate.engines.batching import PADDED, batches, choose_batching
from colocate.engines.float32_weights import in_float32
from colocate.engines.logprob_noise import rounding_of
from colocate.engines.native.sampler import Sampler
from colocate.engines.requests import derived_seed
from colocate.engines.turns import Turn, TurnEngine
from colocate.reporting.work_counts import WorkCounts
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.adapters import unreproducible_adapter
from colocate.weights.context_length import longest_context
from colocate.weights.fully_sharded import gather_whole, is_fully_sharded, let_go, whole_bytes
from colocate.weights.layouts import causal_lm, num_embeddings

if TYPE_CHECKING:
    from colocate.engines.registry import EngineParts


class TransformersEngine(TurnEngine):
    """Generates with `model.generate`, for any causal language model of transformers.

    Batches are padded on the left, unless the first rollout finds that the architecture reads the padding
    (see `batching`). Then only prompts of equal length share a batch, or each sequence has its own.

    Tokens are drawn by the native engine's sampler inside a logits processor. So no global random state is
    read or changed, only one log-probability per token is kept instead of a step's logits, and completions
    with equal (seed, prompt key, member) are drawn with equal noise. The logits depend a little on the
    padding, hence on the rest of the batch, so a completion is reproducible only together with its batch.

    `poll` draws one batch of the turns that wait, and returns it when its longest turn has ended:
    `model.generate` neither lets a sequence go nor takes one in, and begun anew it reads all contexts again.

    With `generation_kwargs` transformers draws the tokens itself, from the device's random generator, which
    is seeded for each batch from its (seed, prompt key, member). Completions then have no log-probs, because
    the results of a beam search are not samples from the policy.

    Args:
        model: a Hugging Face causal language model, or a PEFT model around one.
        pad_token_id: fills the left of shorter prompts; it is masked out.
        max_num_seqs: sequences per batch; each beam counts as one.
        generation_kwargs: arguments of a `GenerationConfig` that `SamplingParams` does not have.

    Raises:
        ValueError: the PEFT method works in the wrapper's `forward` (prompt learning), which is not called.
    """

    # `kv_cache_bytes` stays 0, because `generate` makes and drops its cache within each batch.
    _counts_each_token = True

    def __init__(
        self,
        model: nn.Module,
        *,
        pad_token_id: int,
        max_num_seqs: int = 64,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1.")
        if (reason := unreproducible_adapter(model)) is not None:
            raise ValueError(reason)
        self._base: Any = causal_lm(model)
        longest = longest_context(self._base.config)
        self._max_len = longest.num_tokens or sys.maxsize
        self._max_len_reason = longest.reason
        self._vocab_size = num_embeddings(self._base)
        self._pad_token_id = pad_token_id
        self._generation_kwargs = dict(generation_kwargs or {})
        self._max_num_seqs = max(1, max_num_seqs // self._generation_kwargs.get("num_beams", 1))
        self._batching: str | None = None

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        self._check(prompts, sampling)
        self._count_requests(prompts, sampling)
        requests = [
            (prompt, sample, limit)
            for prompt in prompts
            for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True)
        ]
        completions: dict[int, Completion] = {}
        for generated in self._batch_by_batch(requests, sampling):
            completions.update(generated)
            self.counts.add("completions", len(generated))
        return [completions[index] for index in range(len(requests))]

    def _draw(self, waiting: Mapping[int, Turn], sampling: SamplingParams) -> dict[int, Completion]:
        numbers = sorted(waiting)  # a sequence that goes on comes before those that have not begun
        turns = [waiting[number] for number in numbers]
        requests = [(turn.as_prompt(), turn.sample, turn.limit) for turn in turns]
        first = next(self._batch_by_batch(requests, sampling))
        return {numbers[index]: completion for index, completion in first.items()}

    def _batch_by_batch(
        self, requests: Sequence[tuple[Prompt, int, int]], sampling: SamplingParams
    ) -> Iterator[dict[int, Completion]]:
        """Completions by the indices of their requests, which are as in `_generate_batch`."""
        if requests and self._batching is None:
            with torch.no_grad(), _set_up_for_generation(self._base):
                self._batching = self._choose_batching()
        lengths = [len(prompt.token_ids) for prompt, _, _ in requests]
        for batch in batches(lengths, self._batching or PADDED, self._max_num_seqs):
            chosen = [requests[index] for index in batch]
            with torch.no_grad(), _set_up_for_generation(self._base):
                generated = self._generate_batch(chosen, sampling, self._generation_kwargs, self.counts)
            yield dict(zip(batch, generated, strict=True))

    @property
    def rollout_weight_bytes(self) -> int:
        """Bytes of the whole weights that are gathered from the ranks with parts of them; 0 asleep."""
        return whole_bytes(self._base) if self._is_awake and is_fully_sharded(self._base) else 0

    def wake_up(self) -> None:
        """Allow `generate`. Weights that FSDP2 has split are gathered whole: ranks draw other numbers of
        tokens, and cannot gather block by block together."""
        was_awake = self._is_awake
        super().wake_up()
        if not was_awake and is_fully_sharded(self._base):
            gather_whole(self._base)

    def sleep(self, keep_bytes: int = 0) -> None:
        """Refuse `generate`, and let go of weights that were gathered."""
        if self._is_awake and is_fully_sharded(self._base):
            let_go(self._base)
        super().sleep(keep_bytes)

    def close(self) -> None:
        """Let go of the model."""
        self.sleep()
        super().close()
        self._base = None

    def _choose_batching(self) -> str:
        """Try batches out in float32 if there is memory for it: bfloat16 rounds more than some architectures
        change by padding that they read."""
        with in_float32(self._base) as is_float32:
            if is_float32:
                with contextlib.suppress(RuntimeError):  # code that computes in one type only
                    return self._tried_batching()
        return self._tried_batching()

    def _tried_batching(self) -> str:
        embedding = self._base.get_input_embeddings().weight
        sampling = SamplingParams(max_tokens=4)

        def score(prompt: Prompt, completion: Completion) -> Tensor:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=embedding.device)
            logits = self._base(ids, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]
            drawn = ids[0, len(prompt.token_ids) :, None]
            return logits.float().log_softmax(dim=-1).gather(1, drawn)[:, 0].cpu()

        return choose_batching(
            lambda prompts: self._generate_batch(
                [(prompt, 0, 4) for prompt in prompts], sampling, {}, WorkCounts()
            ),
            score,
            vocab_size=len(embedding),
            rounding=rounding_of(embedding.dtype, embedding.device),
            name=type(self._base).__name__,
        )

    def _generate_batch(
        self,
        requests: Sequence[tuple[Prompt, int, int]],
        sampling: SamplingParams,
        generation_kwargs: Mapping[str, Any],
        counts: WorkCounts,
    ) -> list[Completion]:
        """Complete each request, a (prompt, number in its group, largest number of tokens)."""
        device = self._base.get_input_embeddings().weight.device
        width = max(len(prompt.token_ids) for prompt, _, _ in requests)
        input_ids = torch.full((len(requests), width), self._pad_token_id, device=device)
        attention_mask = torch.zeros_like(input_ids)
        for row, (prompt, _, _) in enumerate(requests):
            input_ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids, device=device)
            attention_mask[row, width - len(prompt.token_ids) :] = 1
        members = [(prompt, sample) for prompt, sample, _ in requests]
        limits = [limit for _, _, limit in requests]
        draw = _DrawTokens(Sampler(sampling), members, width)
        drawing = {**_drawing(sampling), **generation_kwargs} if generation_kwargs else {"do_sample": False}
        seed = derived_seed(
            sampling.seed, *(n for prompt, sample in members for n in (prompt.key, sample)), num_bits=63
        )
        with _seeded(device, seed) if generation_kwargs else nullcontext():
            sequences = self._base.generate(
                input_ids,
                attention_mask=attention_mask,
                logits_processor=[] if generation_kwargs else [draw],
                stopping_criteria=[_CountTokens(counts, limits, sampling.stop_token_ids)],
                synced_gpus=False,  # weights are whole here, and ranks have other numbers of batches
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    eos_token_id=list(sampling.stop_token_ids) or None,
                    pad_token_id=self._pad_token_id,
                    use_cache=True,
                    **drawing,
                ),
            )
        token_ids = sequences[:, width:].tolist()
        logprobs = [None] * len(requests) if generation_kwargs else torch.stack(draw.logprobs, dim=1).tolist()
        stop_token_ids = set(sampling.stop_token_ids)
        completions = []
        for tokens, values, limit in zip(token_ids, logprobs, limits, strict=True):
            stops = (i for i, token in enumerate(tokens[:limit]) if token in stop_token_ids)
            stop = next(stops, None)
            length = limit if stop is None else stop + 1
            completions.append(
                Completion(
                    token_ids=tuple(tokens[:length]),
                    logprobs=None if values is None else tuple(values[:length]),
                    finish_reason="length" if stop is None else "stop",
                    policy_version=self.policy_version,
                )
            )
        return completions


def build(parts: EngineParts) -> TransformersEngine:
    """`model.generate` of the run's model, with the arguments that only it knows."""
    return TransformersEngine(
        parts.model,
        pad_token_id=causal_lm(parts.model).generation_config.pad_token_id,
        max_num_seqs=parts.options.max_num_seqs or 64,
        generation_kwargs=parts.generate_kwargs,
    )


class _DrawTokens(LogitsProcessor):
    """Draws the next tokens itself: it gives them logit 0 and all others -inf, so `generate` takes them."""

    def __init__(self, sampler: Sampler, requests: Sequence[tuple[Prompt, int]], width: int) -> None:
        self.logprobs: list[Tensor] = []
        self._sampler = sampler
        self._requests = requests
        self._width = width
        self._seen: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        keys = torch.tensor([prompt.key for prompt, _ in self._requests], device=scores.device)
        samples = torch.tensor([sample for _, sample in self._requests], device=scores.device)
        positions = torch.full_like(keys, input_ids.shape[1] - self._width)
        if self._sampler.needs_seen_tokens:
            self._note_seen_tokens(input_ids, scores)
        tokens, logprobs = self._sampler(scores.float(), keys, samples, positions, self._seen)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def _note_seen_tokens(self, input_ids: Tensor, scores: Tensor) -> None:
        if self._seen is None:
            # `input_ids` would count the padding as seen; the prompts do not have any.
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            for row, (prompt, _) in enumerate(self._requests):
                self._seen[row, torch.tensor(prompt.token_ids, device=scores.device)] = True
        else:
            self._seen.scatter_(1, input_ids[:, -1:], True)


class _CountTokens(StoppingCriteria):
    """Counts the tokens of rows that have not ended, and never stops any.

    It is asked where `model.generate` is about to wait for the device in any case.

    Args:
        limits: the largest number of tokens of each request.
    """

    def __init__(self, counts: WorkCounts, limits: Sequence[int], stop_token_ids: Sequence[int]) -> None:
        self._counts = counts
        self._limits = torch.tensor(limits)
        self._stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.int64)
        self._num_drawn = 0
        self._is_going: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        none = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if self._is_going is None:
            num_rows = len(input_ids) // len(self._limits)  # several with beams, of which one is kept
            self._every = num_rows
            self._limits = self._limits.repeat_interleave(num_rows).to(input_ids.device)
            self._stop_token_ids = self._stop_token_ids.to(input_ids.device)
            self._is_going = ~none
        self._counts.add("tokens", int(self._is_going.sum()) // self._every)
        self._num_drawn += 1
        stops = torch.isin(input_ids[:, -1], self._stop_token_ids)
        self._is_going = self._is_going & ~stops & (self._num_drawn < self._limits)
        return none


def _drawing(sampling: SamplingParams) -> dict[str, Any]:
    """The arguments of a `GenerationConfig` that draws as `sampling` says."""
    drawing: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty, "do_sample": False}
    if sampling.temperature > 0:
        filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
        drawing.update(do_sample=True, temperature=sampling.temperature, **filters)
    return drawing


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's global random generator for a block, and put its old state back afterwards."""
    generator = (
        torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    )
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)


@contextmanager
def _set_up_for_generation(base: Any) -> Iterator[None]:
    """Set evaluation mode, an attention with a KV cache and neutral generation defaults for a block.

    The trainer's attention may work for packed sequences only, and a checkpoint's generation_config may
    bring processors (Qwen's has a repetition penalty) that nobody asked for. All three are put back.
    """
    training = [module for module in base.modules() if module.training]
    attention, generation_config = base.config._attn_implementation, base.generation_config
    switches_attention = attention not in ("sdpa", "eager")
    try:
        base.eval()
        base.generation_config = GenerationConfig()
        if switches_attention:
            base.set_attn_implementation("sdpa")
        yield
    finally:
        if switches_attention:
            base.set_attn_implementation(attention)
        base.generation_config = generation_config
        for module in training:
            module.training = True
