"""The longest sequence that a model was made for, or computes equally alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class LongestContext(NamedTuple):
    """A limit on prompt and completion together."""

    num_tokens: int | None
    """None: the configuration knows none."""
    reason: str
    """The setting of the model that says so, for messages."""
    is_exact: bool
    """Whether the model computes all of a longer batch differently, so that nothing longer may be read."""

    def check(self, asked: int | None, option: str) -> None:
        """Refuse to let sequences become longer than an exact limit.

        Args:
            asked: the tokens that `option` allows them; None: it is not set.

        Raises:
            ValueError: with both numbers.
        """
        if self.is_exact and asked is not None and self.num_tokens is not None and asked > self.num_tokens:
            raise ValueError(
                f"{option}={asked} allows longer sequences than this model computes consistently: "
                f"{self.reason}. Lower {option} to {self.num_tokens}, or leave it out."
            )

    def check_sample(self, num_tokens: int) -> None:
        """Refuse a sample that is longer than an exact limit. Rollouts stay below it; a `rollout_func` may
        bring longer ones."""
        if self.is_exact and self.num_tokens is not None and num_tokens > self.num_tokens:
            raise ValueError(
                f"A sample has {num_tokens} tokens, prompt and completion together, and this model computes "
                f"at most {self.num_tokens} consistently: {self.reason}. Let rollout_func, the tools or the "
                "agent return less."
            )


def longest_context(config: Any) -> LongestContext:
    """The limit of a model's configuration.

    With RoPE of the type "longrope" one sequence beyond `original_max_position_embeddings` switches the
    factors of every token in its batch, also of cached keys: a cached decode, a batch and a single sequence
    would disagree about the same tokens (LongRoPE, Ding et al. 2024, arXiv:2402.13753, has two sets of
    factors, and transformers takes one of them by the longest sequence of a batch).
    """
    text = config.get_text_config()
    originals = [
        int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
        for rope in _rope_parameters(text)
        if rope.get("rope_type", rope.get("type")) == "longrope"
    ]
    if originals:
        shortest = min(originals)
        return LongestContext(
            shortest,
            f"original_max_position_embeddings of 'longrope' = {shortest}, beyond which the rotary factors "
            "of all tokens change",
            True,
        )
    most = getattr(text, "max_position_embeddings", None)
    if most is None or most <= 0:  # XLNet's is -1
        return LongestContext(None, "the model's configuration has no limit", False)
    return LongestContext(most, f"max_position_embeddings = {most}", False)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of each kind of layer; a model's own code may have them under their older name."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in rope or "type" in rope:
        yield rope
    else:
        yield from (value for value in rope.values() if isinstance(value, Mapping))
