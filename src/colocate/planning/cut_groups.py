"""Groups of completions that no micro-batch holds whole: each part of one computes the prompt again."""

from __future__ import annotations

from dataclasses import dataclass

from colocate.memory.workload import Workload


@dataclass(frozen=True)
class CutGroup:
    """A group of the longest prompt and completions, in the parts that fit a micro-batch each."""

    prompt_tokens: int
    completion_tokens: int
    num_completions: int
    """Of the group in one optimizer step of this rank."""
    num_parts: int

    @classmethod
    def of(cls, workload: Workload, budget: int) -> CutGroup:
        """As `colocate.data.packing.pack` cuts it. Prompts that are not shared make groups of one.

        Args:
            budget: tokens per micro-batch.
        """
        prompt, completion = workload.prompt_tokens, workload.completion_tokens
        group = min(workload.num_generations, workload.num_step_sequences) if workload.share_prompts else 1
        of_part = max(1, (budget - prompt) // completion)
        return cls(prompt, completion, group, -(-group // of_part))

    @property
    def whole_tokens(self) -> int:
        """What a micro-batch must hold to leave the group whole."""
        return self.prompt_tokens + self.num_completions * self.completion_tokens

    @property
    def computed_tokens(self) -> int:
        return self.num_parts * self.prompt_tokens + self.num_completions * self.completion_tokens

    @property
    def work(self) -> float:
        """Tokens that are computed for each that a whole group has; 1.0 of one that is not cut."""
        return self.computed_tokens / self.whole_tokens
