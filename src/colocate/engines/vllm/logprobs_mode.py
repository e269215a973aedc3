"""The mode in which vLLM's log-probs are the policy's own, log softmax(logits / temperature).

vLLM keeps one mode from its start to its end: "processed_logprobs" are computed after penalties, temperature
and filters, "raw_logprobs" before all three. They are the policy's own if

    sampling                         processed_logprobs   raw_logprobs
    temperature alone                always               temperature is 1
    filters or penalty               never                temperature is 1
    greedy, which no filter changes  there is no penalty  always

so that neither mode is right for a filter or penalty at a temperature other than 1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from colocate.types import Completion, SamplingParams

logger = logging.getLogger(__name__)

PROCESSED = "processed_logprobs"
RAW = "raw_logprobs"
MODES = (PROCESSED, RAW)
POLICY = "policy"
"""No mode of vLLM's: the native engine's log-probs, which are the policy's own with any sampling."""


def tells_policys(mode: str, sampling: SamplingParams) -> bool:
    """Whether an engine in `mode` gives log-probs of the policy's own distribution."""
    if mode == POLICY:
        return True
    if mode == RAW:
        return sampling.temperature in (0, 1.0)
    return sampling.is_plain or (sampling.temperature == 0 and sampling.repetition_penalty == 1.0)


def mode_for(sampling: SamplingParams) -> str:
    """The mode to start vLLM in for `sampling`; "processed_logprobs" if neither mode is right."""
    return RAW if tells_policys(RAW, sampling) and not tells_policys(PROCESSED, sampling) else PROCESSED


class ReportedLogprobs:
    """Drops vLLM's log-probs where they are not the policy's own, with one warning.

    Args:
        mode: the mode that vLLM was started in.
        how_to_start: advice how to start vLLM in another mode, with "{}" for the mode; None if the engine
            starts vLLM itself.
        is_main: this process of the run gives the warning.
        engine: whose log-probs they are.
    """

    def __init__(
        self, mode: str, *, how_to_start: str | None = None, is_main: bool = True, engine: str = "vLLM"
    ) -> None:
        self.mode = mode
        self._engine = engine
        self._how_to_start = how_to_start
        self._is_silent = is_main

    def of(self, completions: Iterable[Completion], sampling: SamplingParams) -> list[Completion]:
        """The completions, without log-probs if vLLM's are those of another distribution."""
        if tells_policys(self.mode, sampling):
            return list(completions)
        if self._is_silent:
            self._is_silent = False
            logger.warning(self._explanation(sampling))
        return [replace(completion, logprobs=None) for completion in completions]

    def _explanation(self, sampling: SamplingParams) -> str:
        needed = mode_for(sampling)
        if needed == self.mode or self._how_to_start is None:
            remedy = (
                f"No mode of {self._engine} has them with this sampling: set temperature=1, or "
                "engine='native'"
            )
        else:
            remedy = self._how_to_start.format(needed)
        return (
            f"With temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}, "
            f"min_p={sampling.min_p} and repetition_penalty={sampling.repetition_penalty}, "
            f"{self._engine}'s {self.mode} are not log-probs of the policy. They are not used: nothing is "
            "corrected for differences between engine and trainer (vllm_importance_sampling_correction), "
            f"and ratios are those to the policy itself. {remedy}."
        )
