"""Groups that are too large for one micro-batch: they are cut into parts, and each part computes the prompt
again."""

from __future__ import annotations

from dataclasses import dataclass

from colocate.memory.workload import Workload


@dataclass(frozen=True)
class CutGroup:
    """A group with the longest prompt and completions, cut into parts that each fit a micro-batch.

    With 4 completions of 100 tokens, a prompt of 200 and a budget of 400, the group needs 600 tokens and is
    cut into two parts of 200 + 2 × 100 tokens, 800 in all: its `work` is 800 / 600.
    """

    prompt_tokens: int
    completion_tokens: int
    num_completions: int
    """Completions of the group that this rank trains on in one optimizer step."""
    num_parts: int

    @classmethod
    def of(cls, workload: Workload, budget: int) -> CutGroup:
        """Cut a group as `colocate.data.packing.pack` does. If prompts are not shared, a group is one
        completion.

        Args:
            budget: the most tokens in a micro-batch.
        """
        prompt, completion = workload.prompt_tokens, workload.completion_tokens
        group = min(workload.num_generations, workload.num_step_sequences) if workload.share_prompts else 1
        of_part = max(1, (budget - prompt) // completion)
        return cls(prompt, completion, group, -(-group // of_part))

    @property
    def whole_tokens(self) -> int:
        """Tokens of the whole group, which a micro-batch must hold to leave it uncut."""
        return self.prompt_tokens + self.num_completions * self.completion_tokens

    @property
    def computed_tokens(self) -> int:
        return self.num_parts * self.prompt_tokens + self.num_completions * self.completion_tokens

    @property
    def work(self) -> float:
        """Tokens that are computed, as a multiple of the whole group's; 1.0 for a group that is not cut."""
        return self.computed_tokens / self.whole_tokens
