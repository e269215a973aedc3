"""The records that travel between the parts of a step.

Shapes: B sequences, T tokens, P prompt tokens, C completion tokens, G completions per prompt.

    Prompt, SamplingParams ──engine──▶ Completion ──rewards, advantages──▶ Sample ──policy──▶ metrics

Where completions have several turns, or histories that fork, they are made into an `Episode`
(`episodes/episode.py`), of which each row becomes a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A prompt and which completions of its group are wanted.

    A group of G completions may be split over data-parallel ranks, so a prompt names the members it wants
    rather than a count: rank 0 may ask for `range(0, 4)` and rank 1 for `range(4, 8)` of the same `key`.

    Example: the run's third prompt, "2 + 2 =", four completions of it:

        Prompt(token_ids=(17, 489, 17, 284), key=2, samples=range(4))
    """

    token_ids: tuple[int, ...]
    """The prompt's tokens, never padded. Must not be empty."""
    key: int
    """Identifies the prompt in the run. With `SamplingParams.seed`, the member's number and the position it
    determines the random draw, so a completion does not depend on its neighbours in the batch."""
    samples: range = range(1)
    """The members of the group to generate; the engine returns them in this order."""
    max_tokens: tuple[int, ...] | None = None
    """Completion tokens at most for each of `samples`, from 1 to the rollout's `max_tokens`, which is the
    limit of all if None. It serves completions that are continued after they were cut short, and fixed
    lengths."""

    def limits(self, max_tokens: int) -> tuple[int, ...]:
        """Completion tokens at most for each of `samples` in a rollout of `max_tokens`."""
        return (max_tokens,) * len(self.samples) if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True)
class SamplingParams:
    """The parameters by which tokens are drawn; one set for a whole rollout. Filters apply in the order
    listed.

    Example: at most 256 tokens, as likely as the policy has them, until token 2 ends the completion:

        SamplingParams(max_tokens=256, temperature=1.0, stop_token_ids=(2,), seed=42)
    """

    max_tokens: int
    """Completion tokens at most, the stop token included."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or completion."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the arg max (greedy)."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these, which it includes."""
    seed: int = 0
    """The run's seed. Two rollouts with equal seed, prompt keys and weights draw equal completions."""

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn by temperature alone, with no filter and no penalty."""
        filters = (self.top_k, self.top_p, self.min_p)
        return filters == (0, 1.0, 0.0) and self.repetition_penalty == 1.0


@dataclass(frozen=True)
class Completion:
    """The completion that an engine has generated for one member of one prompt's group.

    Example: a space, "4" and the stop token, drawn with probabilities 0.98, 0.9 and 0.8 after five updates:

        Completion(
            token_ids=(220, 19, 2), logprobs=(-0.02, -0.11, -0.22), finish_reason="stop", policy_version=5
        )
    """

    token_ids: tuple[int, ...]
    """[C] token ids of the completion, the stop token included if one was drawn."""
    logprobs: tuple[float, ...] | None
    """[C] log-probability of each token under the policy, softmax(logits / temperature), whatever filters and
    penalties it was drawn with: what training computes, so that the two may be compared and divided. Greedy
    decoding counts as temperature 1. None when the engine cannot tell."""
    finish_reason: Literal["stop", "length"]
    policy_version: int
    """The version of the weights that generated it, or its last token."""
    policy_versions: tuple[int, ...] | None = None
    """[C] the version that drew each token, where the engine got new weights in between. None: there was only
    `policy_version`."""
    num_cached_tokens: int | None = field(default=None, compare=False)
    """Tokens before the completion that earlier turns or other prompts had left in the engine's KV cache, so
    that they were not read for it. None when the engine cannot tell. Completions that differ in this alone
    are equal."""

    @property
    def versions(self) -> tuple[int, ...]:
        """[C] the version of the weights that drew each token."""
        return self.policy_versions or (self.policy_version,) * len(self.token_ids)


@dataclass(frozen=True)
class Sample:
    """A scored row of an episode: all that training needs to know of it. Tensors live on the policy's device.

    Example: a completion of three tokens, better than its group by 0.7, one of 64 equally weighted in a step:

        Sample(
            prompt_ids=tensor([17, 489, 17, 284]), completion_ids=tensor([220, 19, 2]),
            completion_mask=tensor([1.0, 1.0, 1.0]), advantage=0.7,
            rollout_logprobs=tensor([-0.02, -0.11, -0.22]), loss_weight=1 / (64 * 3), prompt_key=2,
        )
    """

    prompt_ids: Tensor  # [P] int64
    completion_ids: Tensor  # [C] int64
    completion_mask: Tensor  # [C] float32, 1 where the token counts in the loss: not what tools answered
    advantage: float | Tensor  # of the whole sequence, or [C] float32 in all samples of a rollout
    rollout_logprobs: Tensor | None = None  # [C] float32, from the engine; NaN where it could not tell
    old_logprobs: Tensor | None = None  # [C] float32, from the policy that generated; None: this very policy
    logprobs_without_dropout: Tensor | None = None
    """[C] float32, from the policy that is trained, if that has dropout and `old_logprobs` is None: what an
    engine's log-probs, which have no dropout, can be compared with."""
    reference_logprobs: Tensor | None = None  # [C] float32, None without KL penalty
    loss_weight: float = 0.0
    """Factor on the sum of this sequence's token losses: the loss type's normalisation, worked out over the
    whole optimizer step, so that cutting the step into other micro-batches does not change the gradient."""
    entropy_weight: float = 0.0
    """Factor on the sum of this sequence's token entropies in the entropy bonus, worked out over the whole
    optimizer step as `loss_weight` is."""
    entropy_threshold: float | None = None
    """Tokens with less entropy than this are left out of the policy loss; None keeps all."""
    prompt_key: int | None = None
    """Samples with an equal key have the same prompt, which training then computes once for all of them that
    share a micro-batch. A sample without a key (None) shares its prompt with no other."""
    fork: tuple[int, int, int] | None = None
    """Set for a row of an episode whose rows have much more in common than the prompt: the prompt's key, the
    episode's number in its group, and how many tokens all its rows begin with. Samples of one fork share
    these tokens in training, instead of the prompt with all of the group."""

    @property
    def has_advantage(self) -> bool:
        """Whether a token that counts in the loss has an advantage other than 0."""
        return bool((self.completion_mask * self.advantage).any()) and self.loss_weight != 0

    @property
    def shared_key(self) -> object:
        """Samples with an equal key begin with the same `num_shared` tokens; None: shared with no other."""
        return self.prompt_key if self.fork is None else self.fork

    @property
    def num_shared(self) -> int:
        """The number of tokens at the beginning that are computed once for samples with an equal key."""
        return len(self.prompt_ids) if self.fork is None else self.fork[2]

    @property
    def num_tokens(self) -> int:
        return self.prompt_ids.numel() + self.completion_ids.numel()  # faster than `len`
