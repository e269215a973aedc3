"""Weights from a trainer on one GPU to vLLM servers on the same and on other GPUs: `ipc`, `nccl`, `file`.

Needs vLLM in this environment. With one GPU the server shares it; the other cases want two or three.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from engine_models import make_prompts, plain_logits
from vllm_server_case import ServerProcess, make_server_model

from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

# Name: the server's CUDA_VISIBLE_DEVICES, its tensor-parallel size, and how weights shall go there.
CASES = {
    "same GPU, auto": ("0", 1, "auto", "ipc"),
    "same GPU, file": ("0", 1, "file", "file"),
    "other GPU, auto": ("1", 1, "auto", "nccl"),
    "other GPU that sees ours, auto": ("1,0", 1, "auto", "ipc"),
    "two other GPUs, auto": ("1,2", 2, "auto", "nccl"),
    "two other GPUs that see ours, ipc": ("1,2,0", 2, "ipc", "ipc"),
}
ATOL = 0.5
"""How far, in logits, the server's arg max in bf16 may lie below the trainer's in float32."""


def shortfall(model: Any, engine: RolloutServerEngine) -> float:
    """The most by which a token that the server took greedily misses the trainer's largest logit."""
    prompts = make_prompts([1, 7, 30, 12], 2)
    completions = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
    worst = 0.0
    for prompt, completion in zip([p for p in prompts for _ in p.samples], completions, strict=True):
        logits = plain_logits(model.float(), prompt.token_ids, completion.token_ids)
        taken = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, float((logits.max(-1).values - taken).max()))
    model.bfloat16()
    return worst


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    visible, tensor_parallel_size, transport, expected = CASES[request.param]
    needed = 1 + max(map(int, visible.split(",")))
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    directory = tmp_path_factory.mktemp("server")
    make_server_model().bfloat16().save_pretrained(directory)
    (directory / "model.safetensors").unlink()
    # vLLM's own option comes behind ours and wins.
    options = ("--dtype", "bfloat16", "--load-format", "dummy")
    options += ("--tensor-parallel-size", str(tensor_parallel_size))
    server = ServerProcess(directory, options=options, environment={"CUDA_VISIBLE_DEVICES": visible})
    server.wait_until_ready()
    yield server, transport, expected
    server.kill()


@pytest.mark.parametrize("bucket_bytes", [30_000, 2**30], ids=["many chunks", "one chunk"])
def test_every_push_arrives(case, bucket_bytes, caplog):
    server, transport, expected = case
    model = make_server_model().cuda(0).bfloat16()
    engine = RolloutServerEngine(
        model, base_url=server.base_url, transport=transport, bucket_bytes=bucket_bytes, push_timeout_s=120
    )
    engine.wake_up()
    try:
        with caplog.at_level("INFO", logger="colocate"):
            assert shortfall(model, engine) < ATOL
        assert f"by {expected}." in caplog.text
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in filter(lambda p: p.ndim > 1, model.parameters()):
                    parameter.normal_(0, 0.25)
            assert shortfall(model, engine) > 4 * ATOL, "the change is too small to tell the weights apart"
            engine.update_weights(version)
            assert shortfall(model, engine) < ATOL
    finally:
        engine.close()


def test_a_server_killed_within_a_push_leaves_the_trainer_alive(case, monkeypatch):
    server, transport, _ = case
    model = make_server_model().cuda(0).bfloat16()
    engine = RolloutServerEngine(
        model, base_url=server.base_url, transport=transport, bucket_bytes=30_000, push_timeout_s=30
    )
    engine.wake_up()
    try:
        engine.generate(make_prompts([3]), SamplingParams(max_tokens=2))
        from colocate.rollout_server.trainer.client import HttpClient

        real = HttpClient.submit_message

        def start(self: HttpClient, do: str, **arguments: Any) -> Any:
            if do == "receive_chunk" and arguments["chunk"] == 1:
                server.kill()
            return real(self, do, **arguments)

        monkeypatch.setattr(HttpClient, "submit_message", start)
        with pytest.raises(RuntimeError, match="was lost when it should take weights"):
            engine.update_weights(version=1)
        # The GPU and its present stream are in order: nothing of the broadcast is left in the way.
        assert float((torch.ones(8, device="cuda:0") * 2).sum()) == 16
    finally:
        engine.close()
