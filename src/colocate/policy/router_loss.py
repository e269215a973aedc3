"""The load-balancing loss of a mixture of experts' routers (Switch Transformer, arXiv:2101.03961, eqs. 4-6).

Over the tokens of a batch, padding left out, with f_i the share of (token, choice) pairs that go to expert i
and P_i the mean probability that the router gives it: aux_loss = E · sum_i f_i P_i. The architecture's own
code computes it. A product of two means is no sum over tokens, so the loss of a step depends on how the step
is cut. TRL takes the mean over its micro-batches; here each micro-batch counts by its number of sequences,
which gives TRL's mean where all have equally many.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from colocate.weights.fully_sharded import is_fully_sharded
from colocate.weights.layouts import causal_lm

logger = logging.getLogger(__name__)


@torch.no_grad()
def router_loss_coef(model: nn.Module, asked: float | None) -> float:
    """The weight of the router's loss, by TRL's rule: `asked`, or else what the model's configuration says.

    Args:
        asked: `router_aux_loss_coef`; None leaves it to the model, 0 turns the loss off.

    Returns:
        0.0 for a model that has no such loss.

    Raises:
        ValueError: it is asked for, and the model has none; or the model has one, and FSDP2 splits it.
    """
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
