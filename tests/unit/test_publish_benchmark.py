"""The benchmark of publications to several servers, rehearsed with stand-ins of vLLM, and what it claims."""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_models import make_model, make_prompts
from fake_server import BUCKET_BYTES, FakeVLLM, install_fake_vllm
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.pool import publish
from benchmarks.pool.publish_suite import PublishSuite, is_matched
from colocate.rollout_server.trainer import pool as pool_module
from colocate.rollout_server.trainer import transports, weight_push
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import Timeouts
from colocate.types import Completion, Prompt

TIMEOUTS = Timeouts(
    answer_s=1.0, silence_s=0.2, max_attempts=2, first_delay_s=0.01, message_s=2.0, poll_s=0.005,
    has_substitute=True,
)  # fmt: skip
NUM_PUBLICATIONS = 6


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_rehearsal_with_stand_ins(takes_turns, monkeypatch, tmp_path):
    install_fake_vllm(monkeypatch)
    monkeypatch.setattr(pool_module, "_FIRST_PROBE_S", 0.02)
    model, fakes = make_model("qwen3"), []
    for _ in range(3):
        fakes.append(fake := FakeVLLM(model))
        fake.settings["enable_sleep_mode"] = takes_turns and len(fakes) < 3
        fake.restart()
    *servers, sound = [
        RolloutServerEngine(
            model, base_url=fake.base_url, run_id="run", bucket_bytes=BUCKET_BYTES, directory=str(tmp_path),
            timeouts=TIMEOUTS,
        )
        for fake in fakes
    ]  # fmt: skip
    prompts, pool, doomed = make_prompts([3, 5]), EnginePool(servers), fakes[1]

    def change(number: int) -> None:
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        sound.update_weights(number)

    def shortfall(completions: Sequence[Completion]) -> float:
        """0 for what a sound server draws of the present weights."""
        expected = [c.token_ids for c in sound.generate(prompts, publish.GREEDY)]
        return 0.0 if [c.token_ids for c in completions] == expected else 9.0

    def kill() -> None:
        doomed.restart()
        doomed.gone_until_s = time.monotonic() + 1000

    def start_again() -> None:
        doomed.gone_until_s = 0.0

    try:
        pool.wake_up()
        sound.wake_up()
        record = {"kind": "publish", "engine": "vllm"} | publish.measure(
            pool, model, prompts, change, shortfall,
            num_publications=NUM_PUBLICATIONS, kill=kill, start_again=start_again,
        )  # fmt: skip
    finally:
        for part in (pool, sound, *fakes):
            part.close()
    rows = record["publications"]
    assert [row["num_servers"] for row in rows] == [2, 2, 2, 1, 2, 2]
    assert all(map(is_matched, rows)) and record["takes_turns"] == takes_turns
    assert record["loss"]["killed_at_chunk"] == 1
    assert set(record["loss"]["shortfall"].values()) == {0.0} and len(record["loss"]["shortfall"]) == 2
    suite: Any = PublishSuite.__new__(PublishSuite)
    claims = suite.claims([record])
    assert claims["publish_matched"] == NUM_PUBLICATIONS and claims["publish_loss_survived"] == 1.0
    # Both servers', but for the push that was cut, and the sound one's; they went by file, through the host.
    sizes = sum(p.nbytes for p in model.parameters())
    assert claims["publish_host_bytes"] >= 2 * NUM_PUBLICATIONS * sizes
    assert claims["publish_ipc_7b_s"] > 0
    # The first server was never lost, and each publication has a push to it, after those of the start.
    pushes_s = record["pushes"]["seconds"][fakes[0].base_url][-len(rows) :]
    assert all(0 < push_s < row["wall_s"] for push_s, row in zip(pushes_s, rows, strict=True))


@pytest.mark.parametrize("name", ["file", "http"])
def test_what_goes_through_the_host_is_counted_whatever_carries_it(name, monkeypatch, tmp_path):
    """What a stand-in has loaded is what was counted."""
    install_fake_vllm(monkeypatch)
    model = make_model("qwen3")
    fake = FakeVLLM(model)
    engine = RolloutServerEngine(
        model, base_url=fake.base_url, bucket_bytes=BUCKET_BYTES, directory=str(tmp_path), transport=name
    )
    pushes = publish.Pushes()
    with pushes.timed():
        engine.update_weights(1)
    loaded = sum(fake.loaded.weights[weight].nbytes for weight in fake.loaded.num_loads)
    engine.close()
    fake.close()
    assert pushes.transports == [f"{name.capitalize()}Transport"]
    assert pushes.host_bytes == pushes.num_bytes and sum(pushes.host_bytes) >= loaded > 0


@pytest.mark.parametrize("transport", [transports.IpcTransport, transports.NcclTransport, None])
def test_only_what_stays_on_gpus_is_not_counted(transport, monkeypatch):
    """A stand-in's pushes, as there is no GPU; a transport that nobody has named counts as the host's."""

    class Unheard(transports.HttpTransport): ...

    kind = transport or Unheard
    pusher: Any = types.SimpleNamespace(
        client=types.SimpleNamespace(base_url="http://a:1"), _transport=kind.__new__(kind)
    )
    monkeypatch.setattr(weight_push.WeightPusher, "_push", lambda pusher: 7)
    pushes = publish.Pushes()
    with pushes.timed():
        assert weight_push.WeightPusher._push(pusher) == 7
    assert pushes.transports == [kind.__name__] and pushes.num_bytes == [7]
    assert pushes.host_bytes == [0 if transport else 7]


def test_the_claims_are_those_of_the_records():
    rows = [{"stale": {"a": 4.0, "b": 3.0}, "shortfall": {"a": 0.1, "b": 0.2}} for _ in range(3)]
    rows[1]["shortfall"]["b"] = 2.0  # a server with old weights
    rows[2]["stale"]["a"] = 0.3  # weights that cannot be told apart
    record: dict[str, Any] = {
        "kind": "publish",
        "engine": "native",
        "publications": rows,
        "pushes": {"seconds": {"a": [0.2, 0.4], "b": [0.3]}, "num_bytes": [9, 9, 9], "host_bytes": [0, 0, 7]},
        "loss": {"shortfall": {"a": 0.1, "b": 0.1}},
    }
    suite: Any = PublishSuite.__new__(PublishSuite)
    claims = {"ipc_7b_s": 0.3, "host_bytes": 7, "matched": 1, "loss_survived": 1.0}
    assert suite.claims([record]) == {f"publish_native_{name}": value for name, value in claims.items()} | {
        f"publish_{name}": None for name in claims
    }
    record["loss"]["shortfall"] = {"a": 0.1}
    assert suite.claims([record])["publish_native_loss_survived"] == 0.0
    assert set(suite.claims([]).values()) == {None}


def test_rounding_is_matched_and_a_stale_matrix_is_not() -> None:
    """Of the weights that are published, in as many layers as 7B has."""
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=28,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
        eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    publish.redraw(model, 3)
    rounded = copy.deepcopy(model).bfloat16()
    rounded.model.rotary_emb = model.model.rotary_emb  # loaded in bfloat16, it stays float32
    model.load_state_dict(rounded.state_dict())
    prompt = Prompt(tuple(range(4, 21)), 0)

    def taken_by(server: Any) -> Completion:
        ids = server.generate(torch.tensor([prompt.token_ids]), max_new_tokens=8, do_sample=False)
        return Completion(tuple(ids[0, len(prompt.token_ids) :].tolist()), None, "length", policy_version=0)

    assert publish.shortfall_of(model, [prompt], [taken_by(rounded)]) < publish.MOST_SHORTFALL
    # The trainer's own weights are rounded, too; its logits are not, and its weights stay where they are.
    before = {name: (p.data_ptr(), p.dtype) for name, p in rounded.named_parameters()}
    for name in ("0.self_attn.o_proj", "14.mlp.up_proj", "27.mlp.down_proj"):
        stale = copy.deepcopy(rounded)
        weight = stale.get_submodule(f"model.layers.{name}").weight
        torch.nn.init.normal_(weight, std=float(weight.detach().float().std()))
        shortfall = publish.shortfall_of(rounded, [prompt], [taken_by(stale)])
        assert shortfall == publish.shortfall_of(model, [prompt], [taken_by(stale)]), name
        assert shortfall > publish.MOST_SHORTFALL, name
    assert before == {name: (p.data_ptr(), p.dtype) for name, p in rounded.named_parameters()}
