"""Which of vLLM's log-probs are the policy's own, log softmax(logits / temperature).

vLLM has one mode from its start to its end: "processed_logprobs" are taken after penalties, temperature and
filters, "raw_logprobs" before all three. So

    sampling                         processed   raw
    temperature alone                yes         at temperature 1
    filters or penalty               no          at temperature 1
    greedy, which no filter changes  no penalty  yes

and with a filter at another temperature neither will do.
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


def tells_policys(mode: str, sampling: SamplingParams) -> bool:
    """Whether the log-probs of a vLLM in this mode are those of the policy's own distribution."""
    if mode == RAW:
        return sampling.temperature in (0, 1.0)
    return sampling.is_plain or (sampling.temperature == 0 and sampling.repetition_penalty == 1.0)


def mode_for(sampling: SamplingParams) -> str:
    """The mode to start vLLM in for this sampling; where neither will do, the one that others expect."""
    return RAW if tells_policys(RAW, sampling) and not tells_policys(PROCESSED, sampling) else PROCESSED


class ReportedLogprobs:
    """Lets through what log-probs of a vLLM are the policy's own, and says once where they are not.

    Args:
        mode: that vLLM was started in.
        how_to_start: in another mode, with "{}" for it; None if the engine has chosen the mode itself.
        is_main: of this run's processes, the one that says it.
    """

    def __init__(self, mode: str, *, how_to_start: str | None = None, is_main: bool = True) -> None:
        self.mode = mode
        self._how_to_start = how_to_start
        self._is_silent = is_main

    def of(self, completions: Iterable[Completion], sampling: SamplingParams) -> list[Completion]:
        """The completions, without log-probs where vLLM's are those of another distribution."""
        if tells_policys(self.mode, sampling):
            return list(completions)
        if self._is_silent:
            self._is_silent = False
            logger.warning(self._explanation(sampling))
        return [replace(completion, logprobs=None) for completion in completions]

    def _explanation(self, sampling: SamplingParams) -> str:
        needed = mode_for(sampling)
        if needed == self.mode or self._how_to_start is None:
            remedy = "No mode of vLLM has them with this sampling: set temperature=1, or engine='native'"
        else:
            remedy = self._how_to_start.format(needed)
        return (
            f"With temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}, "
            f"min_p={sampling.min_p} and repetition_penalty={sampling.repetition_penalty}, vLLM's "
            f"{self.mode} are not log-probs of the policy. They are not used: nothing is corrected for "
            "differences between engine and trainer (vllm_importance_sampling_correction), and ratios are "
            f"those to the policy itself. {remedy}."
        )
