"""Products of few rows that stream the weights, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hopper import compile_all, needs_hopper
from hypothesis import given
from hypothesis import strategies as st
from quantized_models import make_4bit_model
from rounding import ULP, assert_within, draw, few
from test_swiglu import assert_close_to_exact, make

from colocate.engines.native.projections import Projection
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.tensor_parallel import OneRank
from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.fp8 import e4m3
from colocate.kernels.layer.norms import add_rms_norm
from colocate.kernels.matmul import streamed
from colocate.weights.adapters import AdaptedLinear, Adapter, EightBitWeight
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters

pytestmark = pytest.mark.usefixtures("poisoned_memory")

rows = st.sampled_from([1, 7, 8, 9, 32, 33, 64, 100, 128])
depths = st.sampled_from([8, 64, 72, 200, 1536, 8960])
types = st.sampled_from([torch.float16, torch.bfloat16])


@pytest.mark.gpu
@needs_hopper
@few
@given(
    num_rows=rows, num_tiles=st.integers(1, 5), depth=depths, dtype=types, has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_product(num_rows, num_tiles, depth, dtype, has_bias, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, weight = make(generator, num_rows, 32 * num_tiles, depth, dtype)
    bias = draw(generator, 64 * num_tiles, dtype=dtype) if has_bias else None
    parts = streamed.product(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.double().abs().T + exact.abs()
    assert_within(parts.double().sum(0), exact, 8 * ULP[torch.float32] * terms + 2.0**-24)
    assert torch.equal(streamed.product(x, weight, bias), parts), "another run has another result"


@pytest.mark.gpu
@needs_hopper
@few
@given(num_rows=rows, num_tiles=st.integers(1, 5), depth=depths, dtype=types, seed=st.integers(0, 2**31))
def test_swiglu(num_rows, num_tiles, depth, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    x, weight = make(generator, num_rows, 32 * num_tiles, depth, dtype)
    output = streamed.swiglu(x, weight)
    assert_close_to_exact(output, x, weight)
    assert torch.equal(streamed.swiglu(x, weight), output), "another run has another result"


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_rows", [8, 64])
def test_a_row_does_not_depend_on_the_others(num_rows):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = make(generator, num_rows, 1536, 1536, torch.bfloat16)
    others = draw(generator, num_rows, 1536, dtype=torch.bfloat16)
    others[3] = x[3]
    others[5] = torch.nan
    for compute in (lambda x: streamed.product(x, weight), lambda x: streamed.swiglu(x, weight)):
        assert torch.equal(compute(x)[..., 3, :], compute(others)[..., 3, :])


@pytest.mark.gpu
@needs_hopper
def test_a_captured_graph_reads_what_the_kernel_before_it_writes():
    """The kernels of a layer start early, and each still sees the whole result of the one before."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = [draw(generator, 1536, 1536, dtype=torch.bfloat16) / 40 for _ in range(6)]
    gated = {weight: weight.repeat(2, 1) for weight in weights}
    x, norm = draw(generator, 8, 1536, dtype=torch.bfloat16), draw(generator, 1536, dtype=torch.bfloat16)

    def chain(after_each: Callable[[], None]) -> torch.Tensor:
        y = x
        for weight in weights:
            # Weights are read before the kernel ahead has ended, so it must not be what writes them.
            for kernel, of_kernel in ((streamed.product, weight), (streamed.swiglu, gated[weight])):
                parts = kernel(y, of_kernel)
                after_each()
                parts = parts if parts.dim() == 3 else parts.float()[None]
                y, _ = add_rms_norm(parts, x, norm, 1e-6)
                after_each()
        return y

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(lambda: None)
    for _ in range(50):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@given(num_tiles=st.integers(1, 300), num_steps=st.integers(1, 300), num_multiprocessors=st.integers(1, 200))
def test_no_part_is_empty_and_no_multiprocessor_has_two(num_tiles, num_steps, num_multiprocessors):
    num_parts = streamed.num_parts_for(num_tiles, num_steps, num_multiprocessors)
    steps_per_part = -(-num_steps // num_parts)
    assert 1 <= num_parts <= streamed.MAX_PARTS and (num_parts - 1) * steps_per_part < num_steps
    assert num_parts == 1 or num_parts * num_tiles <= num_multiprocessors


def test_only_whole_and_lasting_weights_stream(monkeypatch):
    """Adapters, split weights, and weights that are dequantised before every product take other ways."""
    streams: list[torch.Tensor] = []
    monkeypatch.setattr(streamed, "can_stream", lambda x, weight: True)
    monkeypatch.setattr(streamed, "product", lambda x, weight, bias: streams.append(weight) or x)
    x, weight = torch.randn(4, 16), torch.randn(24, 16)
    adapter = Adapter(torch.randn(3, 16), torch.randn(24, 3), None, scaling=1.0, dropout=0.0)
    plain = AdaptedLinear(weight, None, [], None)
    backend, rank = TritonBackend(), TritonBackend()
    rank.parallel = OneRank()
    rank.parallel.num_parts = 2
    backend.linear_in_parts(x, plain)
    assert len(streams) == 1
    for other, adapted in [
        (backend, dataclasses.replace(plain, adapters=[(slice(0, 24), adapter)])),
        (backend, dataclasses.replace(plain, is_written_before_use=True)),
        (rank, plain),
    ]:
        delta = adapter.b @ adapter.a if adapted.adapters else 0
        torch.testing.assert_close(other.linear_in_parts(x, adapted), x @ (weight + delta).T)
    assert len(streams) == 1


def test_weights_in_8_bits_take_their_own_product(monkeypatch):
    """Whether the input comes in 16 bits, in 8, or in 8 with a factor for each row."""
    monkeypatch.setattr(streamed, "can_stream", lambda x, weight: True)
    x, factor = torch.randn(4, 16), torch.tensor(2.0**-4)
    values = (torch.randn(32, 16) / factor).to(e4m3.DTYPE)
    backend, exact = TritonBackend(), x @ (values.float() * factor).T
    for by_row in (False, True):
        weight = EightBitWeight(values, factor, torch.tensor(1.0), by_row, torch.float32)
        adapted = AdaptedLinear(values, None, [], None, in_8bit=weight)
        for rows in (x, backend.rounded(x, weight)):
            product = backend.linear_in_parts(rows, adapted)
            torch.testing.assert_close(product, exact, atol=0.6, rtol=0.1)
    gate, up = product.chunk(2, dim=1)
    torch.testing.assert_close(backend.gated_linear(F.silu, x, adapted), F.silu(gate) * up)


@pytest.mark.parametrize("is_copy", [True, False])
def test_weights_of_one_at_a_time_are_written_before_use(is_copy):
    model = make_4bit_model("qwen2", device="cpu")
    layout = layout_for(model)
    fuse_parameters(layout)
    weights = RolloutWeights(stacks_adapters=True)
    weights.allocate(layout, is_copy=is_copy)
    weights.prepare(layout)
    qkv, _, _, _ = layout.layers[0].projection_groups()
    seen: list[AdaptedLinear] = []
    backend = TritonBackend()
    backend.linear_in_parts = lambda x, adapted: seen.append(adapted) or x
    Projection(weights, qkv, layout.part)(backend, torch.zeros(1), in_parts=True)
    assert [adapted.is_written_before_use for adapted in seen] == [not is_copy]


def test_compiles_for_every_number_of_rows(tmp_path):
    """Within a program's shared memory and registers, on tensor cores."""
    jobs = []
    for num_rows, is_gated, dtype in [
        (8, False, "fp16"),
        (128, False, "bf16"),
        (8, True, "bf16"),
        (64, True, "fp16"),
    ]:
        ring_bytes = streamed.SHARED_RING_BYTES if is_gated else streamed.RING_BYTES
        num_stages = ring_bytes // ((streamed.COLUMN_TILE + num_rows) * streamed.DEPTH * 2)
        constants = dict(ROWS=num_rows, STAGES=num_stages, IS_GATED=is_gated)
        types = dict(out="*fp32", bias=f"*{dtype}")
        if is_gated:
            constants["bias"], types = None, dict(out=f"*{dtype}")
        block = streamed.COLUMN_TILE // 2 if is_gated else streamed.COLUMN_TILE
        jobs.append(
            dict(
                module=streamed.__name__,
                kernel="streamed_kernel",
                dtype=dtype,
                blocks=dict(x=(num_rows, streamed.DEPTH), weight=(block, streamed.DEPTH)),
                constants=constants,
                types=types,
            )
        )
    for compiled in compile_all(jobs, tmp_path):
        assert compiled["num_products"] == 4  # one loop, four times 16 along the sum
