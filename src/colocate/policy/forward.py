"""Hidden states by transformers' own modules, for models that have no layout: slower, exact for anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from colocate.types import Sample
from colocate.weights.layouts import causal_lm


def padded_hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Last hidden states at the positions that predict completion tokens, by a right-padded batch.

    Returns:
        [N, hidden] with N completion tokens, sample after sample.
    """
    # Nothing is predicted from the last completion token, so it is not read.
    rows = [torch.cat([sample.prompt_ids, sample.completion_ids[:-1]]) for sample in samples]
    output = causal_lm(model).base_model(
        input_ids=pad_sequence(rows, batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        use_cache=False,
    )
    states = zip(output.last_hidden_state, rows, samples, strict=True)
    return torch.cat([state[len(s.prompt_ids) - 1 : len(row)] for state, row, s in states])
