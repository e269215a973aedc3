"""Log-probabilities and entropies of tokens from hidden states, without ever holding [N, V] logits.

With V = 152k the logits of 16k tokens are 10 GB in fp32, more than the model. They are made in chunks and
made again in backward; the extra matrix product is a few per cent of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colocate.policy.forward import causal_lm


@dataclass(frozen=True)
class OutputHead:
    """logits = cap(scale * (weight @ h + bias)), with cap(x) = softcap * tanh(x / softcap)."""

    weight: Tensor  # [V, hidden]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


def output_head(model: torch.nn.Module) -> OutputHead:
    """The head as it is now: with PEFT, which weights are active depends on the adapter.

    Raises:
        ValueError: the head carries an adapter of its own, or there is none.
    """
    lm = causal_lm(model)
    module = lm.get_output_embeddings()
    if hasattr(module, "modules_to_save"):  # PEFT trains a copy of the whole head
        trained = bool(module.active_adapters) and not module.disable_adapters
        module = module.modules_to_save[module.active_adapters[0]] if trained else module.original_module
    if hasattr(module, "base_layer"):
        raise ValueError(
            "The LM head carries a PEFT adapter, which log-probabilities in chunks would ignore. Take "
            "'lm_head' out of target_modules; to train the whole head put it into modules_to_save."
        )
    if not isinstance(getattr(module, "weight", None), Tensor):
        raise ValueError(f"{type(lm).__name__} has no output embeddings: it is not a causal language model.")
    config = lm.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return OutputHead(module.weight, getattr(module, "bias", None), float(scale), softcap)


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: OutputHead, *, temperature: float = 1.0, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution softmax(logits / temperature).

    Both are differentiable with respect to `hidden`, `head.weight` and `head.bias`. The softmax is in fp32
    whatever the inputs are; `chunk_size` tokens' logits exist at a time.

    Args:
        hidden: [N, hidden]; targets: [N] int64.

    Returns:
        log-probabilities [N] and entropies [N] in nats, float32 (float64 for float64 inputs).
    """
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, head, temperature, chunk_size)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head, temperature, chunk_size):
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        log_z, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = _logits(hidden[rows], head, temperature)
            log_z[rows] = logits.logsumexp(-1)
            log_p = logits.sub_(log_z[rows, None])
            logprobs[rows] = log_p.gather(-1, targets[rows, None])[:, 0]
            # Not log_z - sum(p * logits), a small difference of large numbers where the model is sure.
            entropies[rows] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies)
        ctx.head, ctx.temperature, ctx.chunk_size = head, temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        if grad_logprobs is None and grad_entropies is None:
            return (None,) * 7
        hidden, weight, bias, targets, log_z, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # The head's gradient is a sum over all tokens, so it is summed in fp32.
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=log_z.dtype) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            logits = _logits(hidden[rows], ctx.head, ctx.temperature)
            grad = _grad_logits(logits, rows, targets, log_z, entropies, grad_logprobs, grad_entropies)
            if ctx.head.softcap is not None:  # d cap(x) / dx = 1 - (cap(x) / softcap)^2
                grad *= 1 - (logits * (ctx.temperature / ctx.head.softcap)).square_()
            grad *= ctx.head.scale / ctx.temperature
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(torch.promote_types(hidden.dtype, weight.dtype))
            grad_hidden[rows] = _product(grad, weight)
            if grad_weight is not None:
                grad_weight += _product(grad.T, hidden[rows])
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_logits(logits, rows, targets, log_z, entropies, grad_logprobs, grad_entropies):
    """d(logp_t)/dz_v = 1[v = t] - p_v;  d(H)/dz_v = -p_v (log p_v + H).  [n, V]"""
    log_p = logits - log_z[rows, None]
    grad = log_p.exp()
    if grad_entropies is None:
        grad *= -grad_logprobs[rows, None]
    else:
        # A factor per token and one per entry, multiplied into p in place: [n, V] is the costly shape here.
        factor = log_p.add_(entropies[rows, None]).mul_(grad_entropies[rows, None])
        if grad_logprobs is not None:
            factor += grad_logprobs[rows, None]
        grad *= factor.neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(-1, targets[rows, None], grad_logprobs[rows, None])
    return grad


def _logits(hidden: Tensor, head: OutputHead, temperature: float) -> Tensor:
    logits = _product(hidden, head.weight.T)
    if head.bias is not None:
        logits += head.bias
    if head.scale != 1.0:
        logits *= head.scale
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits.div_(temperature)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, rounded to fp32 and no further: bf16 logits around 20 would be off by 0.06."""
    if a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16) and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype) @ b.to(dtype)


@torch.no_grad()
def check_output_head(model: torch.nn.Module) -> None:
    """Compare the head with the model's own logits on a short input, before hours are spent on a wrong one.

    The hidden states are enlarged on their way into the head so that a soft cap shows, which the small logits
    of an untrained or short input would hide.

    Raises:
        ValueError: they disagree: the architecture does something to its logits that `OutputHead` does not
            know.
    """
    lm = causal_lm(model)
    head = output_head(model)
    seen: list[Tensor] = []

    def enlarge(module, args, output):
        states = output.last_hidden_state
        largest = _logits(states[0], OutputHead(head.weight, head.bias, head.scale), 1.0).abs().max()
        output.last_hidden_state = states * (32 / largest.clamp(min=1e-6)).to(states.dtype)
        seen.append(output.last_hidden_state[0])
        return output

    training = lm.training
    lm.eval()
    handle = lm.base_model.register_forward_hook(enlarge)
    try:
        ids = torch.arange(1, 9, device=head.weight.device)[None] % len(head.weight)
        theirs = lm(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        handle.remove()
        lm.train(training)
    error = (
        (F.log_softmax(_logits(seen[0], head, 1.0).float(), -1) - F.log_softmax(theirs, -1))
        .abs()
        .max()
        .item()
    )
    # Logits up to 32: bf16 rounds them by up to 1/16, a log-softmax by twice that.
    tolerance = 1e-2 if theirs.dtype == head.weight.dtype == torch.float32 else 0.5
    if not error <= tolerance:
        raise ValueError(
            f"{type(lm).__name__} computes its logits in a way this version does not know: log-probabilities "
            f"from the hidden states differ from the model's own by up to {error:.3g} (tolerance "
            f"{tolerance}). Known are a bias, config.logit_scale, config.logits_scaling (a divisor) and "
            "config.final_logit_softcapping."
        )
