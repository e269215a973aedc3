"""A native rollout server in a process of its own, on the trainer's GPU: weights come by CUDA IPC."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from engine_models import greedy_completions, greedy_references, make_model, make_prompts

from colocate.parallel.launching import free_port
from colocate.rollout_server.trainer.engine import RolloutServerEngine

pytestmark = pytest.mark.gpu

KEY = "the-key-of-a-test-on-a-gpu"


@pytest.fixture(params=[False, True], ids=["awake", "in turns"], name="served")
def server_on_this_gpu(request, tmp_path, monkeypatch) -> Iterator[tuple[Any, str, bool]]:
    monkeypatch.setenv("COLOCATE_SERVER_KEY", KEY)
    model, port = make_model("qwen3", head_dim=64).cuda(), free_port()
    model.config.save_pretrained(tmp_path)
    words = [
        *("-m", "colocate", "rollout-serve", str(tmp_path)),
        *("--dtype", "float32", "--port", str(port)),
    ]
    words += ["--enable_sleep_mode"] * request.param
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([sys.executable, *words], env=os.environ, stdout=log, stderr=log)
    yield model, f"http://127.0.0.1:{port}", request.param
    process.terminate()
    assert process.wait(30) == 0, (tmp_path / "log").read_text()


def test_each_publication_is_what_the_server_draws_with(served):
    model, url, takes_turns = served
    engine = RolloutServerEngine(model, base_url=url, bucket_bytes=2**16)
    engine.wake_up()
    prompts, drawn = make_prompts([1, 7, 30, 12], 2), set()
    assert engine.takes_turns == takes_turns
    for version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        before = torch.cuda.mem_get_info()[0]
        engine.sleep()
        engine.update_weights(version)
        engine.wake_up()
        assert engine._pusher._transport_is_to and type(engine._pusher._transport).__name__ == "IpcTransport"
        completions = greedy_completions(engine, prompts, 9)
        assert completions == greedy_references(model, prompts, 9)
        drawn.add(str(completions))
        assert torch.cuda.mem_get_info()[0] > before - 2**31, "publications do not pile memory up"
    assert len(drawn) == 3, "the weights differ enough to be told apart"
    engine.close()
