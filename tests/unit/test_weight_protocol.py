"""A worker's side of a push, message by message: in whatever order they come, weights are of one version.

It is asked of vLLM's worker and of the native server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_models import make_model
from fake_server import BUCKET_BYTES, KEY, FakeVLLM, install_fake_vllm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from colocate.engines.native.engine import NativeEngine
from colocate.http.key import ServerKey
from colocate.http.messages import Message
from colocate.rollout_server.native.weights import NativeWeights
from colocate.rollout_server.trainer.transports import FileTransport
from colocate.rollout_server.wire.receiver import Receiver
from colocate.weights.chunks import checksum_of, layout_hash
from colocate.weights.source import WeightSource


@pytest.fixture(scope="module", name="model")
def one_model() -> Any:
    return make_model("qwen3")


class CountedWeights(NativeWeights):
    """Notes how often each weight was loaded."""

    num_loads: dict[str, int]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self._parameters

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().load(tensors)
        for name, _ in tensors:
            self.num_loads[name] = self.num_loads.get(name, 0) + 1


class NativeWorker:
    """The worker of a native server, without the server. `FakeVLLM` is one of vLLM."""

    def __init__(self, model: Any) -> None:
        self._config = model.config
        self.worker = self
        self.restart()

    def restart(self) -> None:
        """Forget everything, as a new process would."""
        model = Qwen3ForCausalLM(self._config).eval()
        self.loaded = CountedWeights(model, NativeEngine(model, max_num_seqs=1))
        self.loaded.num_loads = {}
        self._receiver = Receiver(self.loaded)

    def colocate_receive(self, message: str, signature: str) -> dict[str, Any]:
        return self._receiver.answer(message, signature)

    def close(self) -> None:
        """Nothing is open."""


class Sender:
    """The chunks of two versions of a model, ready to be sent again, doubled, left out or out of order."""

    def __init__(self, model: Any, fake: FakeVLLM | NativeWorker, transport: FileTransport) -> None:
        self.fake, self.layout, self.directory = fake, WeightSource(model).layout, str(transport.directory)
        self.run = {"id": "run"}
        self.versions: list[dict[str, torch.Tensor]] = []
        self.chunks: list[list[dict[str, Any]]] = []
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            self.versions.append({name: p.detach().clone() for name, p in model.named_parameters()})
            found = []
            for flat, places in WeightSource(model, BUCKET_BYTES).chunks(transport.buffer):
                offer = transport.offer(flat)
                found.append(
                    dict(places=places, size_bytes=len(flat), checksum=checksum_of(flat), offer=offer)
                )
            self.chunks.append(found)
        (transport.directory / "probe").write_text("mark")
        self.share()

    def share(self) -> None:
        assert self.tell("share", directory=self.directory, mark="mark") == {"is_shared": True}

    def tell(self, do: str, **arguments: Any) -> dict[str, Any]:
        message = Message(ServerKey(KEY, "a test"), {"do": do, "run": self.run, **arguments})
        return message.opened(self.fake.worker.colocate_receive(*message.call(1)["args"]))

    def begin(self, version: int, **changes: Any) -> dict[str, Any]:
        asked = dict(push=f"push{version}", unless=None, replaces=f"push{1 - version}", tied_head=None)
        return self.tell("begin", **{**asked, "layout": self.layout, **changes})

    def chunk(self, version: int, number: int) -> dict[str, Any]:
        chunk = self.chunks[version][number]
        return self.tell("receive_chunk", push=f"push{version}", chunk=number, **chunk)

    def finish(self, version: int) -> dict[str, Any]:
        num_chunks = len(self.chunks[version])
        return self.tell("finish", push=f"push{version}", version=f"run:{version}", num_chunks=num_chunks)

    def whole_version(self) -> int | None:
        """The version that all weights are of; None: they are a mixture, or those of the start."""
        loaded = self.fake.loaded.weights
        for version, weights in enumerate(self.versions):
            if all(torch.equal(loaded[name], weights[name]) for name in weights):
                return version
        return None


@pytest.fixture(params=[FakeVLLM, NativeWorker], ids=["vllm", "native"])
def sender(request, model, monkeypatch, tmp_path):
    install_fake_vllm(monkeypatch)
    fake, transport = request.param(model), FileTransport(str(tmp_path))
    made = Sender(model, fake, transport)
    yield made
    transport.close()
    fake.close()


MESSAGES = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 1)),
    st.tuples(st.just("chunk"), st.integers(0, 1), st.integers(0, 4)),
    st.tuples(st.just("finish"), st.integers(0, 1)),
    st.tuples(st.just("all"), st.integers(0, 1)),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES, max_size=30))
def test_messages_doubled_left_out_and_out_of_order_name_no_mixture(sender, messages):
    """After each message: if the worker names its weights, all of them are of that version."""
    sender.fake.restart()
    sender.share()
    num_chunks = len(sender.chunks[0])
    for kind, version, *number in messages:
        if kind == "begin":
            assert sender.begin(version)["is"] == "ready"
        elif kind == "chunk":
            sender.chunk(version, min(number[0], num_chunks - 1))
        elif kind == "finish":
            sender.finish(version)
        else:
            sender.begin(version)
            for position in range(num_chunks):
                sender.chunk(version, position)
            sender.finish(version)
        named = sender.tell("state")["version"]
        assert named is None or sender.whole_version() == int(named.removeprefix("run:"))


def test_what_comes_again_is_acknowledged_and_not_applied(sender):
    assert sender.begin(0)["is"] == sender.begin(0)["is"] == "ready"
    for number in range(len(sender.chunks[0])):
        for _ in range(3):
            assert sender.chunk(0, number) == {"is": "loaded"}
    assert sender.finish(0) == sender.finish(0) == {"is": "finished"}
    assert set(sender.fake.loaded.num_loads.values()) == {1} and sender.whole_version() == 0


def test_what_is_out_of_order_is_refused_with_what_is_there(sender):
    sender.begin(0)
    sender.chunk(0, 0)
    assert "chunk 2 came where chunk 1 was due" in sender.chunk(0, 2)["error"]
    here = {"is": "unknown", "push": "push0", "num_chunks": 1, "version": None}
    assert sender.chunk(1, 0) == sender.finish(1) == here
    assert "1 chunks came and" in sender.finish(0)["error"]
    assert sender.tell("state")["version"] is None


def test_weights_of_another_layout_are_refused_and_the_old_ones_stay(sender, model):
    sender.begin(0)
    for number in range(len(sender.chunks[0])):
        sender.chunk(0, number)
    sender.finish(0)
    other = layout_hash([*WeightSource(model).sizes, ("another", 4)])
    assert "another layout" in sender.begin(1, layout=other)["error"]
    assert sender.tell("state")["version"] == "run:0" and sender.whole_version() == 0
    # The next run may have another precision.
    sender.tell("release")
    sender.run = {"id": "next"}
    assert sender.begin(1, layout=other)["is"] == "ready"


def test_other_weights_than_were_announced_have_no_name(sender, model):
    sender.begin(0, layout=layout_hash([*WeightSource(model).sizes, ("another", 4)]))
    for number in range(len(sender.chunks[0])):
        sender.chunk(0, number)
    assert "other weights came" in sender.finish(0)["error"]
    assert sender.tell("state")["version"] is None


def test_a_layout_is_that_of_what_is_sent(model):
    source = WeightSource(model, BUCKET_BYTES)
    sent = [(name, tensor.nbytes) for name, tensor in source.tensors()]
    assert source.sizes == sent and sum(size for _, size in sent) == source.num_bytes
    assert layout_hash(sent) == source.layout != layout_hash(reversed(sent))
