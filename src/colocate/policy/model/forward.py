"""Hidden states by transformers' own modules, for models that have no layout: slower, exact for anything.

The load-balancing loss of a mixture of experts' routers is also here (Switch Transformer, arXiv:2101.03961,
eqs. 4-6). Over the tokens of a batch, padding left out, with f_i the share of (token, choice) pairs that go
to expert i and P_i the mean probability that the router gives it: aux_loss = E · sum_i f_i P_i. The
architecture's own code computes it. A product of two means is no sum over tokens, so the loss of a step
depends on how the step is cut. TRL takes the mean over its micro-batches; here each micro-batch counts by its
number of sequences, which gives TRL's mean where all have equally many.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colocate.policy.attention.pack import padded
from colocate.types import Sample
from colocate.weights.fully_sharded import is_fully_sharded
from colocate.weights.layouts import body, causal_lm


def padded_hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """The last hidden states that predict completion tokens, computed in a right-padded batch.

    Returns:
        [N, hidden] with N completion tokens, sample after sample.
    """
    # Nothing is predicted from the last completion token, so it is not read.
    rows = [torch.cat([sample.prompt_ids, sample.completion_ids[:-1]]) for sample in samples]
    return _predicting(body(model)(**_padded(rows)).last_hidden_state, samples)


def padded_with_router_loss(model: torch.nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """The result of `padded_hidden_states`, and the loss of a mixture of experts' routers over all tokens.

    Returns:
        [N, hidden] and a scalar.
    """
    rows = [torch.cat([sample.prompt_ids, sample.completion_ids]) for sample in samples]
    seen: list[Tensor] = []
    handle = body(model).register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
    try:
        # The causal language model knows the loss, and need not make more logits than one row's.
        output = causal_lm(model)(**_padded(rows), output_router_logits=True, logits_to_keep=1)
    finally:
        handle.remove()
    return _predicting(seen[0], samples), output.aux_loss


def _padded(rows: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "input_ids": padded(rows),
        "attention_mask": padded([torch.ones_like(row) for row in rows]),
        "use_cache": False,
    }


def _predicting(states: Tensor, samples: Sequence[Sample]) -> Tensor:
    starts = [len(sample.prompt_ids) - 1 for sample in samples]
    parts = zip(states, starts, samples, strict=True)
    return torch.cat([state[start : start + len(s.completion_ids)] for state, start, s in parts])


@torch.no_grad()
def check_causal(model: torch.nn.Module) -> None:
    """Refuse a model that is not causal: change the tokens after the first four, and compare the hidden
    states of those four."""
    lm = causal_lm(model)
    num_rows = len(lm.get_input_embeddings().weight)
    ids = torch.arange(1, 9, device=lm.device)[None].repeat(2, 1)
    ids[1, 4:] += 4
    training = lm.training
    lm.eval()
    try:
        one, other = (body(model)(input_ids=row[None] % num_rows, use_cache=False) for row in ids)
    finally:
        lm.train(training)
    states, changed = one.last_hidden_state[0, :4].float(), other.last_hidden_state[0, :4].float()
    # A mixture of experts may sum in another order; half precision rounds that to a few per cent.
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.1
    if not (states - changed).norm() <= tolerance * states.norm():
        raise ValueError(
            f"{type(lm).__name__} is not causal as it is configured: hidden states depend on the tokens that "
            "follow, so the model would see what it is asked to predict. Use a decoder (is_decoder=True in "
            "the configuration of a model that can be both)."
        )


logger = logging.getLogger(__name__)


@torch.no_grad()
def router_loss_coef(model: nn.Module, asked: float | None) -> float:
    """The weight of the router's loss by TRL's rule: `asked` (0 turns it off), else the configuration's; 0.0
    for a model without such a loss."""
    lm = causal_lm(model)
    config = lm.config.get_text_config()
    coef = getattr(config, "router_aux_loss_coef", 0.0) if asked is None else asked
    if not coef:
        return 0.0
    if hasattr(config, "output_router_logits") and _has_router_loss(lm):
        if is_fully_sharded(lm):
            raise ValueError(
                f"The routers' auxiliary loss (router_aux_loss_coef={coef}) is not computed for a model "
                "without a layout whose weights are split by FSDP2. Set router_aux_loss_coef=0, or shard=1."
            )
        return float(coef)
    if asked is not None:
        raise ValueError(
            f"router_aux_loss_coef={asked}, but {type(lm).__name__} is not a mixture of experts that returns "
            "its routers' logits, so there is no auxiliary loss to weigh. Remove it."
        )
    if hasattr(config, "output_router_logits"):
        logger.warning(
            f"{type(lm).__name__} is trained without an auxiliary loss of its routers: its configuration has "
            f"router_aux_loss_coef={coef}, but transformers computes none for it."
        )
    return 0.0


def _has_router_loss(lm: nn.Module) -> bool:
    ids = torch.arange(1, 5, device=next(lm.parameters()).device)[None]
    training = lm.training
    lm.eval()
    try:
        output = lm(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, output_router_logits=True
        )
    except (TypeError, IndexError):  # the model does not know the argument, or no layer has experts
        return False
    finally:
        lm.train(training)
    return isinstance(getattr(output, "aux_loss", None), torch.Tensor)
