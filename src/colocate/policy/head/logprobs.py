"""Log-probabilities and entropies of tokens from hidden states, without ever holding [N, V] logits.

With V = 152k the logits of 16k tokens are 10 GB in fp32, more than the model. So they are made in chunks,
only a few numbers per token are kept, and they are made again in the backward pass; the extra matrix product
is a few per cent of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colocate.kernels.definitions import multiply, wide_product
from colocate.policy.head.output_head import OutputHead


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: OutputHead,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy_gradient: bool = True,
    keep_softmax: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution softmax(logits / temperature).

    The results are differentiable with respect to `hidden`, `head.weight` and `head.bias`. The softmax is in
    fp32 whatever the inputs are, and no more logits than those of `chunk_size` tokens exist at a time. The
    cost is counted in matrix products of the size hidden states times head, 2 · N · hidden · V operations
    each, forward + backward:

        trained head                              1 + 3   logits; logits again, gradients of both factors
        trained head, `keep_softmax`              2 + 1   2 · N · V bytes (of bf16) from forward to backward
        frozen head                               2 + 0   a token's gradient is scaled after its product
        either, with the entropies' gradient      1 + 3   or 1 + 2: nothing can be had in advance

    Args:
        hidden: [N, hidden]; targets: [N] int64.
        chunk_size: tokens whose logits exist at a time (see `logprob_bytes`). It changes time and memory, and
            the result by rounding at most.
        entropy_gradient: whether the entropies are differentiable, which makes the backward pass longer.
        keep_softmax: for a trained head, keep the logits' gradient [N, V], in the inputs' dtype, from forward
            to backward. It has no effect where the head is frozen or the entropies are differentiable.

    Returns:
        log-probabilities [N] and entropies [N] in nats, float32 (float64 for float64 inputs).
    """
    trains_head = head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
    mode = _mode(trains_head, entropy_gradient, keep_softmax)
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        mode = "later"  # nothing comes of a gradient in advance
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, head.weight, head.bias, targets, head, temperature, chunk_size, mode
    )
    return logprobs, entropies if entropy_gradient else entropies.detach()


Mode = Literal["later", "at_once", "kept"]
"""When the gradient of the logits is made. "later": in the backward pass. "at_once": in the forward pass, for
the hidden states' gradient only (a frozen head). "kept": in the forward pass, and kept for the head's."""


def _mode(trains_head: bool, entropy_gradient: bool, keep_softmax: bool) -> Mode:
    if entropy_gradient or (trains_head and not keep_softmax):
        return "later"
    return "kept" if trains_head else "at_once"


def logprob_bytes(
    num_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    chunk_size: int,
    trains_head: bool,
    entropy_gradient: bool = False,
    keep_softmax: bool = False,
) -> int:
    """Bytes that `token_logprobs` allocates at its peak on a GPU, forward or backward.

    Not counted are its inputs, its outputs and their gradients (those of the hidden states [N, hidden], and
    of the head if it is trained), a few numbers per token, and what the allocator rounds up. With b bytes of
    `dtype` and C = min(chunk, N):

        forward     4 · C · V of logits, + b · C · V of their gradient if it is made at once
        backward    (4 + b) · C · V, + 4 · N · hidden to sum the hidden states' gradient in fp32;
                    b · N · hidden and no logits if the gradient was made at once
        kept        b · N · V from forward to backward, there + 2 · b · N · hidden and no logits

    Args:
        num_tokens: N; hidden_size, vocab_size: the head's shape.
        dtype: type of hidden states and head.
        trains_head: whether the head's weight or bias is trained.
        chunk_size, entropy_gradient, keep_softmax: as passed to `token_logprobs`.
    """
    mode = _mode(trains_head, entropy_gradient, keep_softmax)
    product_bytes = torch.promote_types(dtype, torch.float32).itemsize
    logits = min(chunk_size, num_tokens) * vocab_size
    hidden_bytes = num_tokens * hidden_size * dtype.itemsize
    if mode == "kept":
        softmax_bytes = num_tokens * vocab_size * dtype.itemsize
        # The forward pass's logits take the place where the head's gradient will lie in the backward pass.
        weight_bytes = vocab_size * hidden_size * dtype.itemsize
        return softmax_bytes + max(logits * product_bytes - weight_bytes, 2 * hidden_bytes)
    if mode == "at_once":
        return max(logits * (product_bytes + dtype.itemsize), hidden_bytes)
    num_columns = _num_columns(num_tokens, vocab_size, chunk_size)
    backward_bytes = num_tokens * num_columns * (product_bytes + dtype.itemsize)
    if _sums_in_float32(num_columns, vocab_size, dtype):
        backward_bytes += num_tokens * hidden_size * product_bytes
    return max(logits * product_bytes, backward_bytes)


def _num_columns(num_tokens: int, vocab_size: int, chunk_size: int) -> int:
    """The number of vocabulary columns whose logits for all tokens are as many numbers as the logits of
    `chunk_size` tokens for all columns.

    It is rounded down to whole tiles of the matrix products (128 columns), or, if there is not one tile, to
    whole vectors of 16 bytes.
    """
    columns = chunk_size * vocab_size // max(num_tokens, 1)
    if columns >= vocab_size:
        return vocab_size
    tile = 128 if columns >= 128 else 8 if columns >= 8 else 1
    return max(columns - columns % tile, 1)


def _sums_in_float32(num_columns: int, vocab_size: int, dtype: torch.dtype) -> bool:
    """Whether a sum over chunks, the hidden states' gradient, would be rounded by its type at every chunk."""
    return num_columns < vocab_size and dtype.itemsize < 4


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, temperature, chunk_size, mode):
        grad_dtype = torch.promote_types(hidden.dtype, weight.dtype)
        dtype = torch.promote_types(grad_dtype, torch.float32)
        num_tokens, num_rows = len(hidden), min(chunk_size, len(hidden))
        logprobs = torch.empty(num_tokens, dtype=dtype, device=hidden.device)
        log_z, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        # One buffer for all chunks: a new tensor per chunk would be made while its name still held the
        # previous chunk's logits, so that two would exist at a time.
        buffer = torch.empty(num_rows, len(weight), dtype=dtype, device=hidden.device)
        unscaled = torch.empty_like(hidden) if mode != "later" else None
        softmax = None
        if mode != "later":
            kept_rows = num_tokens if mode == "kept" else num_rows
            softmax = torch.empty(kept_rows, len(weight), dtype=grad_dtype, device=hidden.device)
        for start in range(0, num_tokens, chunk_size):
            rows = slice(start, start + chunk_size)
            products = buffer[: num_tokens - start]
            multiply(hidden[rows], weight.T, out=products)
            logits = _Logits.of(products, targets[rows], head, temperature, log_z[rows])
            logits.statistics(logprobs[rows], entropies[rows])
            if unscaled is not None and softmax is not None:
                grad = softmax[rows] if mode == "kept" else softmax[: len(products)]
                logits.gradient(torch.ones_like(log_z[rows]), None, None, out=grad)
                multiply(grad, weight, out=unscaled[rows])
        ctx.save_for_backward(
            hidden if mode != "at_once" else None,
            weight if mode == "later" else None,
            targets if mode == "later" else None,
            log_z,
            entropies,
            unscaled,
            softmax if mode == "kept" else None,
        )
        # Of the weight only type and shape: a graph that referred to a gathered one would keep it until the
        # layers' backward pass is over.
        ctx.head = replace(head, weight=weight.detach().to("meta"))
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        nothing = (None,) * 5
        if grad_logprobs is None and grad_entropies is None:
            return (None, None, None, *nothing)
        unscaled = ctx.saved_tensors[5]
        if unscaled is None:
            return (*_gradients_by_columns(ctx, grad_logprobs, grad_entropies), *nothing)
        # Row i of the logits' gradient was made for a gradient of 1: both products are linear in it.
        scales = grad_logprobs[:, None]
        grad_hidden = torch.mul(unscaled, scales, out=torch.empty_like(unscaled))
        hidden, softmax = ctx.saved_tensors[0], ctx.saved_tensors[6]
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            scaled = torch.mul(hidden, scales, out=torch.empty_like(hidden))
            grad_weight = torch.empty_like(ctx.head.weight, device=hidden.device)
            multiply(softmax.T, scaled, out=grad_weight)
        if ctx.needs_input_grad[2]:
            grad_bias = torch.empty(len(ctx.head.weight), 1, dtype=scales.dtype, device=scales.device)
            multiply(softmax.T, scales.to(softmax.dtype), out=grad_bias)
            grad_bias = grad_bias[:, 0]
        return (grad_hidden, grad_weight, grad_bias, *nothing)


def _gradients_by_columns(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states [N, hidden], weight [V, hidden] and bias [V], with the logits made again.

    The forward pass cuts the logits [N, V] into chunks of rows, since a softmax needs whole rows. The
    backward pass cuts them into chunks of columns: `log_z` of every row is known by then, so p_v = exp(z_v -
    log_z) needs no other column. With x = hidden @ weight^T and d_x its gradient, d_hidden = d_x @ weight
    sums over the columns and d_weight = d_x^T @ hidden over the rows. Cut by columns, the head's gradient
    therefore comes out one finished piece after the other, and only the hidden states' gradient is summed
    over chunks. Cut by rows, the head's gradient would be the sum: reading and writing [V, hidden] in float32
    for every chunk takes as long as a third of the chunk's matrix products (V = 152k, 1,024 rows).
    """
    hidden, weight, targets, log_z, entropies, _, _ = ctx.saved_tensors
    head, (num_tokens, vocab_size) = ctx.head, (len(hidden), len(weight))
    num_columns = _num_columns(num_tokens, vocab_size, ctx.chunk_size)
    grad_dtype = torch.promote_types(hidden.dtype, weight.dtype)
    buffer = torch.empty(num_tokens * num_columns, dtype=log_z.dtype, device=hidden.device)
    grad_buffer = torch.empty_like(buffer, dtype=grad_dtype)
    grad_hidden = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        is_wide = _sums_in_float32(num_columns, vocab_size, hidden.dtype)
        grad_hidden = torch.empty_like(hidden, dtype=log_z.dtype if is_wide else hidden.dtype)
    if ctx.needs_input_grad[1]:
        grad_weight = torch.empty_like(weight)
    if ctx.needs_input_grad[2]:
        grad_bias = torch.empty_like(head.bias, dtype=log_z.dtype)
    for start in range(0, vocab_size, num_columns):
        columns = slice(start, start + num_columns)
        shape = num_tokens, min(num_columns, vocab_size - start)
        products = buffer[: math.prod(shape)].view(shape)
        grad = grad_buffer[: math.prod(shape)].view(shape)
        multiply(hidden, weight[columns].T, out=products)
        logits = _Logits.of(products, targets, head, ctx.temperature, log_z, columns)
        logits.gradient(grad_logprobs, grad_entropies, entropies, out=grad)
        if grad_hidden is not None:
            multiply(grad, weight[columns], out=grad_hidden, accumulate=start > 0)
        if grad_weight is not None:
            multiply(grad.T, hidden, out=grad_weight[columns])
        if grad_bias is not None:
            torch.sum(grad, 0, dtype=log_z.dtype, out=grad_bias[columns])
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


@dataclass(frozen=True)
class _Logits:
    """Logits z of some tokens and columns, held as the products x = hidden @ weight^T they follow from.

    z = inner * (x + bias), or with a soft cap z = outer * tanh(inner * (x + bias)).
    """

    products: Tensor  # [n, columns]
    targets: Tensor  # [n], as tokens of the whole vocabulary
    bias: Tensor | None  # [columns]
    inner: float
    outer: float | None
    log_z: Tensor  # [n], over the whole vocabulary
    first_column: int

    @classmethod
    def of(
        cls,
        products: Tensor,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
        log_z: Tensor,
        columns: slice = slice(0, None),
    ) -> _Logits:
        bias = None if head.bias is None else head.bias[columns]
        inner, outer = head.scale / temperature, None
        if head.softcap is not None:
            inner, outer = head.scale / head.softcap, head.softcap / temperature
        return cls(products, targets, bias, inner, outer, log_z, columns.start)

    def statistics(self, logprobs: Tensor, entropies: Tensor) -> None:
        """Write log_z, log-probability and entropy, [n] each; the logits must be whole rows."""
        if _runs_kernels(self.products):
            from colocate.kernels.train.softmax import softmax_statistics

            softmax_statistics(*self._inputs(), log_z=self.log_z, logprobs=logprobs, entropies=entropies)
            return
        z = self.values()
        self.log_z[:] = z.logsumexp(-1)
        log_p = z - self.log_z[:, None]
        logprobs[:] = log_p.gather(-1, self.targets[:, None])[:, 0]
        # Not log_z - sum(p * z), a small difference of large numbers where the model is sure.
        entropies[:] = -torch.linalg.vecdot(log_p.exp(), log_p)

    def gradient(
        self,
        grad_logprobs: Tensor | None,
        grad_entropies: Tensor | None,
        entropies: Tensor | None,
        out: Tensor,
    ) -> None:
        """Write the gradient with respect to the products x, [n, columns], to `out`.

        d(logp_t)/dz_v = 1[v = t] - p_v;  dH/dz_v = -p_v (log p_v + H);  dz/dx = inner, or with a soft cap
        inner * outer * (1 - (z / outer)^2).
        """
        if _runs_kernels(self.products):
            from colocate.kernels.train.softmax import softmax_gradient

            softmax_gradient(
                *self._inputs(),
                log_z=self.log_z,
                entropies=entropies,
                grad_logprobs=grad_logprobs,
                grad_entropies=grad_entropies,
                first_column=self.first_column,
                out=out,
            )
            return
        z = self.values()
        log_p = z - self.log_z[:, None]
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if grad_logprobs is not None:
            columns = torch.arange(self.first_column, self.first_column + p.shape[1], device=p.device)
            grad += grad_logprobs[:, None] * ((columns == self.targets[:, None]).to(p.dtype) - p)
        if grad_entropies is not None:
            assert entropies is not None, "the entropy's gradient needs the entropy"
            grad -= grad_entropies[:, None] * p * (log_p + entropies[:, None])
        if self.outer is not None:
            grad *= self.outer * (1 - (z / self.outer).square_())
        out.copy_(grad.mul_(self.inner))

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor | None, float, float | None]:
        return self.products, self.targets, self.bias, self.inner, self.outer

    def values(self) -> Tensor:
        """The logits z, [n, columns]."""
        x = self.products if self.bias is None else self.products + self.bias
        return x * self.inner if self.outer is None else (x * self.inner).tanh_() * self.outer


def _runs_kernels(products: Tensor) -> bool:
    """Whether the softmax kernels run here: Triton writes bfloat16 from compute capability 8.0 on."""
    return (
        products.is_cuda
        and products.dtype == torch.float32
        and torch.cuda.get_device_capability(products.device) >= (8, 0)
    )


def whole_logits(hidden: Tensor, head: OutputHead) -> Tensor:
    """The logits [n, V] of hidden states [n, hidden]."""
    products = wide_product(hidden, head.weight.T)
    nothing = torch.empty(0, device=hidden.device)
    return _Logits.of(products, nothing, head, 1.0, nothing).values()
