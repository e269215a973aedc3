"""QLoRA on a GPU in bfloat16: the engine's log-probs are the trainer's, up to rounding."""

import pytest
import torch
from test_stack_4bit import logprob_gap, make_qlora_model

pytestmark = pytest.mark.gpu


def test_engine_and_trainer_agree():
    gaps = logprob_gap(make_qlora_model(torch.bfloat16, "cuda"), "cuda")
    # Log-probs around 4 of logits around 1, rounded to 8 bits on the way through two layers.
    assert gaps.abs().mean() < 0.01 and gaps.mean().abs() < 0.003
