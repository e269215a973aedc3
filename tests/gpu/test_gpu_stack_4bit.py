"""QLoRA on a GPU in bfloat16: the engine's log-probs are the trainer's, up to rounding."""

import pytest
import torch
from test_stack_4bit import logprobs_of_both, make_qlora_model, peft_logprobs

pytestmark = pytest.mark.gpu


def test_engine_and_trainer_are_equally_near_to_exact_log_probs():
    model = make_qlora_model(torch.bfloat16, "cuda")
    samples, engine, trainer = logprobs_of_both(model, "cuda")
    want = peft_logprobs(model, samples)
    error_of_engine, error_of_trainer = (engine - want).abs().mean(), (trainer - want).abs().mean()
    print(f"engine {error_of_engine:.4f}, trainer {error_of_trainer:.4f} from float32")
    # Both round where bfloat16 must, but not in the same places.
    assert error_of_engine < 1.3 * error_of_trainer + 1e-3 and error_of_trainer < 0.03
    assert (engine - trainer).mean().abs() < 0.3 * error_of_trainer + 1e-3
