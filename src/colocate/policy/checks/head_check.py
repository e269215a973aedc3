"""Compares a model's own logits with those that log-probabilities are made of, on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colocate.policy.head.logprobs import whole_logits
from colocate.policy.head.output_head import DIVISORS, FACTORS, SOFTCAPS, OutputHead, output_head
from colocate.weights.layouts import body, causal_lm


@torch.no_grad()
def check_output_head(model: torch.nn.Module) -> None:
    """Compare `OutputHead`'s logits with the model's own on a short input, before hours are spent in vain.

    The hidden states are enlarged on their way into the head so that a soft cap shows, which the small logits
    of an untrained or short input would hide.
    """
    lm = causal_lm(model)
    head = output_head(model)
    seen: list[Tensor] = []

    def enlarge(module, args, output):
        states = getattr(output, "last_hidden_state", None)
        if states is None:  # the head itself is called decoder
            return output
        if states.shape[-1] != head.weight.shape[-1]:
            raise ValueError(
                f"{_unknown_head(lm)}: the head reads {head.weight.shape[-1]} values and the layers below "
                f"it make {states.shape[-1]}."
            )
        largest = whole_logits(states[0], OutputHead(head.weight, head.bias, head.scale)).abs().max()
        output.last_hidden_state = states * (32 / largest.clamp(min=1e-6)).to(states.dtype)
        seen.append(output.last_hidden_state[0])
        return output

    training = lm.training
    lm.eval()
    # Some models call the decoder inside the body, not the body (OPT). Enlarging twice is harmless.
    modules = {id(module): module for module in (body(model), lm.get_decoder())}
    handles = [module.register_forward_hook(enlarge) for module in modules.values()]
    try:
        ids = torch.arange(1, 9, device=head.weight.device)[None] % len(head.weight)
        theirs = lm(input_ids=ids, use_cache=False).logits[0].float()
        if not seen:
            raise ValueError(f"{_unknown_head(lm)}: it makes logits without {type(body(model)).__name__}.")
    finally:
        for handle in handles:
            handle.remove()
        lm.train(training)
    error = (
        (F.log_softmax(whole_logits(seen[-1], head).float(), -1) - F.log_softmax(theirs, -1))
        .abs()
        .max()
        .item()
    )
    # Logits are up to 32: bf16 rounds them by up to 1/16, a log-softmax by twice that.
    tolerance = 1e-2 if theirs.dtype == head.weight.dtype == torch.float32 else 0.5
    if not error <= tolerance:
        raise ValueError(
            f"{_unknown_head(lm)}: log-probabilities from the hidden states differ from the model's own by "
            f"up to {error:.3g} (tolerance {tolerance})."
        )


def _unknown_head(lm: Any) -> str:
    return (
        f"{type(lm).__name__} computes its logits in a way this version does not know (a bias, "
        f"the factors config.{', '.join(FACTORS)}, the divisors config.{', '.join(DIVISORS)} and soft caps "
        f"config.{', '.join(SOFTCAPS)} are known), so it cannot be trained"
    )
