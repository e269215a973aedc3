"""Hidden states by transformers' own modules, for models that have no layout: slower, exact for anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from colocate.types import Sample
from colocate.weights.layouts import body, causal_lm


def padded_hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Last hidden states at the positions that predict completion tokens, by a right-padded batch.

    Returns:
        [N, hidden] with N completion tokens, sample after sample.
    """
    # Nothing is predicted from the last completion token, so it is not read.
    rows = [torch.cat([sample.prompt_ids, sample.completion_ids[:-1]]) for sample in samples]
    output = body(model)(
        input_ids=pad_sequence(rows, batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        use_cache=False,
    )
    states = zip(output.last_hidden_state, rows, samples, strict=True)
    return torch.cat([state[len(s.prompt_ids) - 1 : len(row)] for state, row, s in states])


@torch.no_grad()
def check_causal(model: torch.nn.Module) -> None:
    """Change what follows four tokens and see that their hidden states stay.

    Raises:
        ValueError: they change: a token's log-probability would depend on the tokens that come after it, and
            by a forward pass of the whole sequence the model would see what it is asked to predict.
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
