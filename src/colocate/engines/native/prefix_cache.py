"""`PrefixCache`: keys and values that were computed for earlier prompts, found again by later ones.

A page that is full of tokens is named by a hash of these tokens and of the name of the page before it. So a
name stands for all tokens from the first one on, as keys and values depend on all of them. The first page's
name depends on the weights and adapters, so that pages of other weights or adapters are never found.

    tokens   [ 17 489 17 284 | 220 19 2 11 | 46 5 ...            pages of four tokens
    names       a = h(salt, ·)   b = h(a, ·)   (not full: no name)

Kwon et al. 2023, section 4.4, https://arxiv.org/abs/2309.06180, has shared prefixes that are known in
advance; the chain of hashes is vLLM's automatic prefix caching.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from colocate.engines.native.pages import PagePool
from colocate.weights.layouts import Layout

NAME_BYTES = 32
"""Nobody can construct two lists of tokens with the same name of 256 bits."""


def salt_of(layout: Layout, policy_version: int) -> bytes:
    """All that keys and values depend on besides tokens: the weights' version, and which adapters are on."""
    return repr((policy_version, layout.adapter_states())).encode()


class PrefixCache:
    """Names pages of a pool after the tokens in them, and finds them.

    Args:
        salt: names under different salts differ.
    """

    def __init__(self, pool: PagePool, page_size: int, salt: bytes = b"") -> None:
        self.pool = pool
        self.page_size = page_size
        self.salt = salt
        self._root = _hash(salt, b"")

    def names(self, token_ids: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """The names of all pages that are full of `token_ids`, in order.

        Args:
            known: the first of them, if they were found before.
        """
        names, size = list(known), 4 * self.page_size
        name = names[-1] if names else self._root
        tokens = array("i", token_ids[len(names) * self.page_size :]).tobytes()
        for end in range(size, len(tokens) + 1, size):
            name = _hash(name, tokens[end - size : end])
            names.append(name)
        return names

    def find(self, names: Sequence[bytes], num_tokens: int, num_held: int = 0) -> list[int]:
        """The pages named `names` that hold the beginning of `num_tokens` tokens. The last token is left out,
        because the next one is drawn from its logits. `num_held` leading pages are held already."""
        return self.pool.find(names[num_held : (num_tokens - 1) // self.page_size])

    def enter(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """Let the first pages of a sequence, which it holds, be found by their names."""
        for page, name in zip(pages, names, strict=False):
            self.pool.name(page, name)


def _hash(before: bytes, tokens: bytes) -> bytes:
    return blake2b(before + tokens, digest_size=NAME_BYTES).digest()
