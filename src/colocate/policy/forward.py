"""Hidden states by transformers' own modules, for models that have no layout: slower, exact for anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from colocate.types import Sample
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
    """What `padded_hidden_states` returns, and the loss of a mixture of experts' routers over all tokens.

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
        "input_ids": pad_sequence(list(rows), batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "use_cache": False,
    }


def _predicting(states: Tensor, samples: Sequence[Sample]) -> Tensor:
    starts = [len(sample.prompt_ids) - 1 for sample in samples]
    parts = zip(states, starts, samples, strict=True)
    return torch.cat([state[start : start + len(s.completion_ids)] for state, start, s in parts])


@torch.no_grad()
def check_causal(model: torch.nn.Module) -> None:
    """Refuse a model that is not causal: change what follows four tokens, and compare their hidden states.

    Raises:
        ValueError: they change, so a token's log-probability would depend on the tokens that come after it:
            in a forward pass of the whole sequence the model would see what it is asked to predict.
    """
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
