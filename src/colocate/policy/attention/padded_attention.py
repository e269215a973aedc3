"""Attention over runs of different lengths in padded batches, for any device and type.

Runs of similar lengths lie side by side, each filled up to the longest. On a CPU PyTorch's FlashAttention for
CPUs takes such a batch; elsewhere matrix products do, and all scores of a batch exist at once.

Letters in shapes: n runs of a batch, H query heads, K key-value heads, Lq queries and Lk keys of the longest
run, D head size. Batches are computed in float32, or in float64 where the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from colocate.kernels.definitions import wide
from colocate.policy.attention.pack import Runs

_MAX_SCORES = 2**25
"""The most scores that one padded batch may have: 128 MiB of them in float32."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """`attention` of each run's queries over its keys; only causal runs have a window."""
    num_heads = q.shape[1]
    attend = _flash_forward if q.device.type == "cpu" else _plain_forward
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide(q[:0]).dtype, device=q.device)
    for batch in _batches(runs, num_heads, window, q.device):
        rows, columns = batch.rows, batch.columns
        batch_out, batch_lse = attend(
            rows.pad(q), columns.pad(k, num_heads), columns.pad(v, num_heads), batch, scale
        )
        rows.put(batch_out, out)
        rows.put(batch_lse, lse)
    return out, lse.T


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` with respect to q, k and v; see `attention_backward`."""
    attend_backward = _flash_backward if q.device.type == "cpu" else _plain_backward
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for batch in _batches(runs, num_heads, window, q.device):
        rows, columns = batch.rows, batch.columns
        # Padded queries have no gradient, and with an infinite sum of scores no share in any key either.
        d_out = rows.pad(grad).masked_fill_(rows.is_padding[:, None, :, None], 0.0)
        sums = rows.pad(lse.T).masked_fill_(rows.is_padding[:, None], torch.inf)
        d_queries, *per_head = attend_backward(
            d_out, rows.pad(q), columns.pad(k, num_heads), columns.pad(v, num_heads), rows.pad(out), sums,
            batch, scale,
        )  # fmt: skip
        rows.put(d_queries, grads[0])
        for total, part in zip(grads[1:], per_head, strict=True):
            # [n, H, Lk, D] -> [n, K, Lk, D]: the query heads of one key head add up.
            columns.put(part.unflatten(1, (num_kv_heads, -1)).sum(2), total)
    return grads


# ── A batch ──────────────────────────────────────────────────────────────────────────────────────────────


class _Padded:
    """n runs of tokens, filled up to the longest one's L tokens.

    Args:
        runs: the first token and the number of tokens of each.
    """

    def __init__(self, runs: list[tuple[int, int]], device: torch.device) -> None:
        start, length = torch.tensor(runs).T[..., None]
        offset = torch.arange(int(length.max()))
        is_token = offset < length
        self.has_padding = not bool(is_token.all())
        indices = torch.where(is_token, start + offset, 0)
        self.num_runs, self.longest = indices.shape
        self.is_padding = ~is_token.to(device)  # [n, L]
        self._indices = indices.flatten().to(device)
        self._tokens = indices[is_token].to(device)
        self._places = is_token.flatten().nonzero()[:, 0].to(device)

    def pad(self, x: Tensor, num_heads: int | None = None) -> Tensor:
        """[T, heads, ...] -> [n, heads, L, ...], or with heads repeated up to `num_heads`."""
        if num_heads is not None:
            x = x.repeat_interleave(num_heads // x.shape[1], dim=1)
        padded = wide(x).index_select(0, self._indices)
        return padded.view(self.num_runs, self.longest, *x.shape[1:]).transpose(1, 2)

    def put(self, padded: Tensor, out: Tensor) -> None:
        """Write the tokens of [n, heads, L, ...] to their places in `out` [T, heads, ...]."""
        tokens = padded.transpose(1, 2).flatten(0, 1).index_select(0, self._places)
        out.index_copy_(0, self._tokens, tokens.to(out.dtype))


@dataclass(frozen=True)
class _PaddedBatch:
    """Runs of similar lengths."""

    rows: _Padded
    """The queries."""
    columns: _Padded
    """The keys."""
    is_causal: bool
    """Whether each query sees the keys up to its own, all of them; `mask` is None then."""
    mask: Tensor | None  # [n, 1, 1, Lk] or [Lq, Lk] float32: 0 for keys that a query sees, -inf for others


_batches_of: WeakKeyDictionary[Runs, dict[tuple[int, int | None], list[_PaddedBatch]]] = WeakKeyDictionary()
"""The batches of a pack's runs, made once: every layer asks for the same ones."""


def _batches(runs: Runs, num_heads: int, window: int | None, device: torch.device) -> list[_PaddedBatch]:
    made = _batches_of.setdefault(runs, {})
    if (num_heads, window) not in made:
        made[num_heads, window] = list(_make_batches(runs, num_heads, window, device))
    return made[num_heads, window]


def _make_batches(
    runs: Runs, num_heads: int, window: int | None, device: torch.device
) -> Iterator[_PaddedBatch]:
    queries, keys = (list(accumulate(x, initial=0)) for x in (runs.query_lengths, runs.key_lengths))
    order = sorted(range(len(runs.query_lengths)), key=lambda n: (runs.query_lengths[n], runs.key_lengths[n]))
    while order:
        batch: list[int] = []
        longest = [0, 0]
        while order:
            grown = [
                max(longest[0], runs.query_lengths[order[-1]]),
                max(longest[1], runs.key_lengths[order[-1]]),
            ]
            if batch and (len(batch) + 1) * num_heads * grown[0] * grown[1] > _MAX_SCORES:
                break
            longest = grown
            batch.append(order.pop())
        if longest[0] == 0:
            continue
        rows = _Padded([(queries[n], runs.query_lengths[n]) for n in batch], device)
        columns = _Padded([(keys[n], runs.key_lengths[n]) for n in batch], device)
        yield _batch(rows, columns, is_causal=runs.is_causal, window=window)


def _batch(rows: _Padded, columns: _Padded, *, is_causal: bool, window: int | None) -> _PaddedBatch:
    if not is_causal:
        is_hidden = columns.is_padding[:, None, None]
        if not columns.has_padding:
            return _PaddedBatch(rows, columns, is_causal=False, mask=None)
    elif window is None or window >= columns.longest:
        # A key that is padding comes after all keys of its run, and so no query of the run sees it.
        return _PaddedBatch(rows, columns, is_causal=True, mask=None)
    else:
        offset = torch.arange(columns.longest, device=columns.is_padding.device)
        distance = offset[:, None] - offset
        is_hidden = (distance < 0) | (distance >= window)
    mask = torch.zeros(is_hidden.shape, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)
    return _PaddedBatch(rows, columns, is_causal=False, mask=mask)


# ── Attention of a batch ─────────────────────────────────────────────────────────────────────────────────
#
# q, out, grad: [n, H, Lq, D]; k, v: [n, H, Lk, D], heads repeated; lse: [n, H, Lq].


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: _PaddedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    mask = None if batch.mask is None else batch.mask.to(q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, batch.is_causal, attn_mask=mask, scale=scale
    )


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: _PaddedBatch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    mask = None if batch.mask is None else batch.mask.to(q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, batch.is_causal, attn_mask=mask, scale=scale
    )


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: _PaddedBatch, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, batch, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: _PaddedBatch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute, where P = exp(scale Q K^T - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale
    dS K, dK = scale dS^T Q."""
    p = (_scores(q, k, batch, scale) - lse[..., None]).exp()
    d_scores = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return d_scores @ k, d_scores.mT @ q, p.mT @ grad


def _scores(q: Tensor, k: Tensor, batch: _PaddedBatch, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if batch.is_causal:
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill_(is_later, -torch.inf)
    return scores if batch.mask is None else scores + batch.mask
