"""Two processes that split the weights draw in 8 bits what one process draws in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from precision_worker import PRECISIONS, SAMPLING, model, prompts

from colocate.engines.native.engine import NativeEngine
from processes import run_ranks


@pytest.mark.slow
def test_ranks_draw_in_8_bits_what_one_draws(tmp_path):
    out = tmp_path / "drawn.pt"
    run_ranks(2, Path(__file__).with_name("precision_worker.py"), out, timeout_s=120)
    drawn = torch.load(out, weights_only=False)
    for precision in PRECISIONS:
        engine = NativeEngine(model(), max_num_seqs=8, page_size=4, rollout_precision=precision)
        engine.wake_up()
        expected = engine.generate(prompts(), SAMPLING)
        for (tokens, logprobs), completion in zip(drawn[precision], expected, strict=True):
            assert tokens == completion.token_ids
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(completion.logprobs))
        engine.close()
