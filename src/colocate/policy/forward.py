"""From token ids to the hidden states that predict completion tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from colocate.policy.attention import PACKED_ATTENTION, PackedLayout
from colocate.types import Sample

PACKED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures whose only exchange between tokens is attention through transformers' attention interface
with plain causal or sliding-window semantics. Every other one runs padded: slower, but exact for anything."""


def causal_lm(model: torch.nn.Module) -> PreTrainedModel:
    """The causal language model itself, inside a PEFT wrapper or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore


def runs_packed(model: torch.nn.Module) -> bool:
    return causal_lm(model).config.model_type in PACKED_MODEL_TYPES


@contextmanager
def training_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let the model attend over packs while the context lasts; nothing to do where it runs padded.

    Must enclose backward too: with gradient checkpointing, backward runs the attention a second time.
    Outside, the model keeps its own attention, so `model.generate` and padded calls by others work.
    """
    if not runs_packed(model):
        yield
        return
    config = causal_lm(model).config
    own = config._attn_implementation
    config._attn_implementation = PACKED_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = own


def hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Last hidden states at the positions that predict completion tokens; call within `training_attention`.

    Returns:
        [N, hidden] with N completion tokens, sample after sample.
    """
    return (packed_hidden_states if runs_packed(model) else padded_hidden_states)(model, samples)


def packed_hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """`hidden_states` with all sequences laid end to end in one row of tokens."""
    lm = causal_lm(model)
    assert lm.config._attn_implementation == PACKED_ATTENTION, "call within training_attention"
    tokens, layout = _pack_tokens(samples)
    output = lm.base_model(
        input_ids=tokens[None], position_ids=layout.position_ids[None], use_cache=False, packed=layout
    )
    return output.last_hidden_state[0, _predicting(samples)]


def padded_hidden_states(model: torch.nn.Module, samples: Sequence[Sample]) -> Tensor:
    """`hidden_states` by a right-padded batch with an attention mask and the model's own attention."""
    tokens, layout = _pack_tokens(samples)
    shape = (len(samples), layout.max_length)
    padding = tokens.new_zeros(len(samples) * layout.max_length)
    output = causal_lm(model).base_model(
        input_ids=padding.index_copy(0, layout.slots, tokens).view(shape),
        attention_mask=padding.index_fill(0, layout.slots, 1).view(shape),
        use_cache=False,
    )
    return output.last_hidden_state.flatten(0, 1)[layout.slots[_predicting(samples)]]


def _pack_tokens(samples: Sequence[Sample]) -> tuple[Tensor, PackedLayout]:
    """All input tokens end to end [T], and where which sequence is."""
    # Nothing is predicted from the last completion token, so it is not read.
    inputs = [ids for sample in samples for ids in (sample.prompt_ids, sample.completion_ids[:-1])]
    tokens = torch.cat(inputs)
    return tokens, PackedLayout.of([sample.num_tokens - 1 for sample in samples], tokens.device)


def _predicting(samples: Sequence[Sample]) -> Tensor:
    """Which tokens of the pack predict a completion token: the last C of each sequence.  [N]"""
    ends = itertools.accumulate(sample.num_tokens - 1 for sample in samples)
    spans = [torch.arange(end - len(s.completion_ids), end) for s, end in zip(samples, ends, strict=True)]
    return torch.cat(spans).to(samples[0].prompt_ids.device)
