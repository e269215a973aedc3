"""An episode: one member of a group, from its prompt over all its turns to the rows that are trained on.

Every call of the engine is a node of a trie: the tokens that it was given, and those that it sampled. Tokens
are kept as they were read and drawn; nothing is ever encoded again. A path from a root to a leaf is a row of
training. Where each turn goes on from the last there is one path. Where the history was rewritten (a chat
template strips the reasoning of earlier turns, an agent summarises) or a call was made twice, paths fork:

    node   parent   given                sampled
    0      None     prompt               call a tool          rows   0 → 1
    1      0        the tool's result    an answer                   0 → 2, in which node 0 is context only
    2      0        another result       another answer

A sampled span is trained once, in the first row that has it; in later rows it is context, as given tokens
are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from colocate.types import Completion


@dataclass(frozen=True)
class Node:
    """A call of the engine: the given tokens, and the sampled ones."""

    parent: int | None
    """The number of the node that this one goes on from; None: it begins a history."""
    given_ids: tuple[int, ...]
    """The tokens given before this call: a root's whole context, and what was added to the parent's tokens
    elsewhere (a tool's result, the next generation prompt; nothing, if the call goes on in mid-sentence)."""
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """The sampled tokens' log-probabilities, as in `Completion`."""
    policy_versions: tuple[int, ...]
    """The versions of the weights that sampled each of the tokens."""
    finish_reason: Literal["stop", "length"]
    num_cached_tokens: int | None = None
    """The tokens of its context that the engine did not read, as in `Completion`."""


@dataclass(frozen=True)
class Row:
    """A path through an episode as training reads it: P prompt tokens, then C others."""

    prompt_ids: tuple[int, ...]
    """The episode's prompt, or the whole context of the path's root if that does not begin with the
    prompt."""
    completion_ids: tuple[int, ...]
    """[C] sampled and given tokens."""
    is_sampled: tuple[bool, ...]
    """[C], True where the token was sampled and is trained on in this row."""
    logprobs: tuple[float, ...] | None
    """[C], NaN where `is_sampled` is False; None if the engine has told none at all."""
    policy_versions: tuple[int, ...]
    """[C] versions of the weights that read or sampled the token first."""
    nodes: tuple[int, ...]
    """[C] numbers of the nodes that the tokens belong to."""

    @property
    def num_sampled(self) -> int:
        """The number of tokens that are trained on in this row."""
        return sum(self.is_sampled)

    def lags(self, policy_version: int) -> list[int]:
        """[C] by how many versions the weights that sampled a token are older than `policy_version`; 0 for
        tokens that are not trained on in this row."""
        pairs = zip(self.is_sampled, self.policy_versions, strict=True)
        return [policy_version - version if is_sampled else 0 for is_sampled, version in pairs]


@dataclass(eq=False)
class Episode:
    """One member of a group: its calls of the engine, and further facts for rewards and metrics."""

    nodes: list[Node] = field(default_factory=list)
    """The calls in their order; a node's parent comes before it. The first one's context is the prompt."""
    prompt: Any = None
    """The prompt as reward functions see it, if an environment has added to that of the dataset's row."""
    messages: list[dict[str, Any]] | str | None = None
    """The completion as reward functions see it: the messages after the prompt's, those of tools and users
    included, or text for a prompt of plain text. None: the tokens of the last row, decoded."""
    environment: object | None = None
    """The environment that the episode was played in."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of this episode for reward functions, by name."""
    tool_calls: int = 0
    """How many tools were called, unknown ones included."""
    tool_failures: int = 0
    """How many of these calls failed."""
    tool_timeouts: int = 0
    """How many of these calls took too long; these also count as failures."""
    tool_s: float = 0.0
    """The seconds that these calls took together, each from the tool's beginning to its end."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """The rewards that turns have earned by themselves, by the number of the node that ended the turn."""
    is_truncated: bool = False
    """Whether the episode was cut short. `add` sets it from the finish reason of the call that it adds; what
    ends an episode for another reason sets it anew."""

    @classmethod
    def of_turn(cls, prompt_ids: Sequence[int], completion: Completion) -> Episode:
        """The episode of a single turn."""
        episode = cls()
        episode.add(None, prompt_ids, completion)
        return episode

    def add(self, parent: int | None, given_ids: Sequence[int], completion: Completion) -> int:
        """Note a call of the engine.

        Args:
            parent: the number of the node that the call goes on from; None: it begins a history of its own.
            given_ids: the tokens between the parent's and the sampled ones; without a parent all of the
                context, which must not be empty.
            completion: the sampled tokens.

        Returns:
            The number of the new node.

        Raises:
            ValueError: there is no such parent, a root has no context, or the completion has log-probs for
                more or fewer tokens than it has.
        """
        if parent is None and not given_ids:
            raise ValueError("A call of the engine without a parent was given no tokens: it needs a prompt.")
        if parent is not None and parent not in range(len(self.nodes)):
            raise ValueError(
                f"Node {parent} cannot be gone on from: the episode has {len(self.nodes)} nodes."
            )
        ids, logprobs = completion.token_ids, completion.logprobs
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(
                f"A completion of {len(ids)} tokens has {len(logprobs)} log-probs: it needs one each."
            )
        versions, reason = completion.versions, completion.finish_reason
        cached = completion.num_cached_tokens
        self.nodes.append(Node(parent, tuple(given_ids), ids, logprobs, versions, reason, cached))
        self.is_truncated = reason == "length"
        return len(self.nodes) - 1

    def find_parent(self, context_ids: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Where a call with this whole context belongs, for a caller that does not know its history.

        Returns:
            The node with the most tokens that the context begins with, and the tokens that follow these; None
            and all of the context if it begins with no node's.
        """
        context = tuple(context_ids)
        ends: dict[int | None, int] = {None: 0}  # of the nodes that the context begins with
        for number, node in enumerate(self.nodes):
            if (start := ends.get(node.parent)) is not None:
                own = node.given_ids + node.sampled_ids
                if context[start : start + len(own)] == own:
                    ends[number] = start + len(own)
        parent = max(ends, key=lambda number: ends[number])
        return parent, context[ends[parent] :]

    def context_tokens(self) -> tuple[int, int]:
        """Context tokens and, of these, cached tokens, summed over the calls whose cached tokens the engine
        has told."""
        ends: list[int] = []
        num_tokens = num_cached = 0
        for node in self.nodes:
            context = (0 if node.parent is None else ends[node.parent]) + len(node.given_ids)
            ends.append(context + len(node.sampled_ids))
            if node.num_cached_tokens is not None:
                num_tokens, num_cached = num_tokens + context, num_cached + node.num_cached_tokens
        return num_tokens, num_cached

    def returns(self) -> tuple[float, ...]:
        """The summed rewards of each node's turn and of the turns after it."""
        rewards = [self.turn_rewards.get(number, 0.0) for number in range(len(self.nodes))]
        return tuple(itertools.accumulate(reversed(rewards)))[::-1]

    def rows(self) -> list[Row]:
        """The paths from roots to leaves, in the order of the leaves; every sampled span is trained on in
        exactly one of them."""
        parents = {node.parent for node in self.nodes}
        trained: set[int] = set()
        rows = []
        for leaf in range(len(self.nodes)):
            if leaf not in parents:
                path = self._path(leaf)
                rows.append(self._row(path, trained))
                trained.update(path)
        return rows

    def _path(self, leaf: int) -> list[int]:
        """The numbers of the nodes from a root to `leaf`."""
        path, number = [], leaf
        while True:
            path.append(number)
            parent = self.nodes[number].parent
            if parent is None:
                return path[::-1]
            number = parent

    def _row(self, path: Sequence[int], trained: set[int]) -> Row:
        """The row of a path, in which the spans of the nodes `trained` are context."""
        prompt_ids, context = self.nodes[0].given_ids, self.nodes[path[0]].given_ids
        if context[: len(prompt_ids)] != prompt_ids:
            prompt_ids = context
        ids: list[int] = []
        is_sampled: list[bool] = []
        logprobs: list[float] = []
        versions: list[int] = []
        nodes: list[int] = []
        for number in path:
            node, is_new = self.nodes[number], number not in trained
            given_ids = node.given_ids if node.parent is not None else context[len(prompt_ids) :]
            num_given, num_sampled = len(given_ids), len(node.sampled_ids)
            ids += given_ids + node.sampled_ids
            is_sampled += [False] * num_given + [is_new] * num_sampled
            told = node.logprobs if is_new else None
            logprobs += [math.nan] * num_given
            logprobs += [math.nan] * num_sampled if told is None else told
            versions += [*node.policy_versions[:1] * num_given, *node.policy_versions]
            nodes += [number] * (num_given + num_sampled)
        return Row(
            prompt_ids,
            tuple(ids),
            tuple(is_sampled),
            None if all(self.nodes[number].logprobs is None for number in path) else tuple(logprobs),
            tuple(versions),
            tuple(nodes),
        )


def num_shared(rows: Sequence[Row]) -> int:
    """The number of tokens that all rows begin with, without a row's last token, which is never read."""
    sequences = [row.prompt_ids + row.completion_ids[:-1] for row in rows]
    in_step = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))
    return sum(1 for _ in in_step)
