"""A request for a completion, in vLLM's terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from colocate.engines.requests import derived_seed
from colocate.types import Completion, Prompt, SamplingParams


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`, which are also those of its server's `/v1/completions`.

    They give the distribution to draw from, the tokens that end a completion, and which log-probs to return.
    """
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # stop_token_ids alone say which tokens end a completion
        "logprobs": 0,  # the log-prob of the token drawn, and of 0 others
    }


class LLMRequest:
    """A request for one completion by `vllm.LLM`; it can be sent to other processes of a group."""

    def __init__(self, prompt: Prompt, sample: int, max_tokens: int, sampling: SamplingParams) -> None:
        self.prompt = prompt.token_ids
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.seed = derived_seed(sampling.seed, prompt.key, sample, num_bits=63)

    def params(self) -> Any:
        """This request as vLLM's `SamplingParams`."""
        import vllm

        return vllm.SamplingParams(
            **sampling_fields(self.sampling),
            max_tokens=self.max_tokens,
            seed=None if self.sampling.temperature == 0 else self.seed,
            detokenize=False,
            flat_logprobs=True,
        )

    def completion(self, output: Any, version: int) -> Completion:
        """vLLM's `RequestOutput` for this request as a completion of policy version `version`."""
        (drawn,) = output.outputs
        token_ids = tuple(drawn.token_ids)
        # One log-prob per position, that of the sampled token.
        logprobs = tuple(drawn.logprobs.logprobs)
        assert len(logprobs) == len(token_ids), f"{len(logprobs)} log-probs for {len(token_ids)} tokens"
        is_stopped = token_ids[-1] in self.sampling.stop_token_ids
        reason: Literal["stop", "length"] = "stop" if is_stopped else "length"
        return Completion(token_ids, logprobs, reason, version, num_cached_tokens=output.num_cached_tokens)


def llm_requests(prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[LLMRequest]:
    """A request for every completion of a rollout, prompt by prompt."""
    for prompt in prompts:
        for sample, limit in zip(prompt.samples, prompt.limits(sampling.max_tokens), strict=True):
            yield LLMRequest(prompt, sample, limit, sampling)
