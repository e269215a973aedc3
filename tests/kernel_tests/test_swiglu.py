"""SwiGLU's product in one kernel: against float64, and against a product and an activation kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hopper import compile_all, needs_hopper
from hypothesis import given
from hypothesis import strategies as st
from rounding import ULP, assert_within, draw, few

from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.matmul import ping_pong, swiglu
from colocate.kernels.matmul import swiglu_many_rows as many
from colocate.kernels.matmul.gate import silu_mul
from colocate.weights.adapters import AdaptedLinear, Adapter

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TYPES = [torch.float16, torch.bfloat16]
H200_MULTIPROCESSORS = 132

tilings = st.tuples(
    st.integers(1, 5000), st.integers(1, 30_000), st.sampled_from([H200_MULTIPROCESSORS, 114, 78, 1])
)


def make(generator, num_rows: int, width: int, depth: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weights, the rows of both followed by NaN in memory."""
    x = draw(generator, num_rows, depth, dtype=dtype)
    weight = 2 * draw(generator, 2 * width, depth, dtype=dtype) / depth**0.5
    return tuple(torch.cat((t, torch.full_like(t[:1], torch.nan)))[:-1] for t in (x, weight))


def assert_close_to_exact(output, x, weight) -> None:
    """Within the roundings of gate, up, silu(gate) and the product."""
    dtype = output.dtype
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    size = (x.double().abs() @ weight.double().abs().T).chunk(2, dim=1)
    exact = F.silu(gate) * up
    half = 0.51 * ULP[dtype]
    gate_error, up_error = (
        half * value.abs() + 8 * ULP[torch.float32] * terms
        for value, terms in zip((gate, up), size, strict=True)
    )
    # silu's slope is at most 1.1.
    silu_error = 1.1 * gate_error + half * (F.silu(gate).abs() + gate_error)
    bound = silu_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    bound += half * (exact.abs() + bound) + 2.0**-24
    assert_within(output, exact, bound)


@few
@given(
    num_rows=st.sampled_from([1, 8, 63, 64, 65, 128]),
    width=st.sampled_from([8, 40, 64, 104]),
    depth=st.sampled_from([8, 64, 72, 200]),
    seed=st.integers(0, 2**31),
)
def test_few_rows(device, num_rows, width, depth, seed):
    generator = torch.Generator(device).manual_seed(seed)
    # Triton's interpreter cuts bfloat16 off instead of rounding it.
    for dtype in TYPES if device.type == "cuda" else TYPES[:1]:
        x, weight = make(generator, num_rows, width, depth, dtype)
        output = x.new_empty(num_rows, width)
        swiglu.few_rows(x, weight, output)
        assert_close_to_exact(output, x, weight)


@pytest.mark.gpu
@needs_hopper
@few
@given(
    num_rows=st.sampled_from([1, 100, 128, 129, 256, 300, 512]),
    width=st.sampled_from([16, 64, 200, 1000]),
    depth=st.sampled_from([8, 64, 72, 520]),
    num_programs=st.sampled_from([1, 3, 8, H200_MULTIPROCESSORS]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_many_rows(num_rows, width, depth, num_programs, dtype, seed):
    """Many tiles for each program, and fewer than there are programs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, weight = make(generator, num_rows, width, depth, dtype)
    output = x.new_empty(num_rows, width)
    many.many_rows(x, weight, output, many.Tiling.of(num_rows, width, num_programs))
    assert_close_to_exact(output, x, weight)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("num_rows", [64, 128, 512, 1024])
@pytest.mark.parametrize(("width", "depth"), [(8960, 1536), (18944, 3584), (4864, 896)])
def test_a_captured_graph_follows_its_inputs(num_rows, width, depth):
    """As two kernels do; a graph holds descriptors of its tensors, not of their values."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    x, weight = make(generator, num_rows, width, depth, torch.bfloat16)
    assert swiglu.is_faster(x, weight)
    swiglu.swiglu(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = swiglu.swiglu(x, weight)
    for _ in range(3):
        x.normal_(generator=generator)
        weight.normal_(std=0.05, generator=generator)
        graph.replay()
        torch.testing.assert_close(output, silu_mul(x @ weight.T), rtol=2.0**-6, atol=1e-3)


@given(tilings)
def test_tiles_cover_every_column_once(case):
    num_rows, width, num_multiprocessors = case
    tiling = many.Tiling.of(num_rows, width, num_multiprocessors)
    row_tiles = -(-num_rows // ping_pong.ROW_TILE)
    assert tiling.num_tiles % row_tiles == tiling.num_narrow % row_tiles == 0
    large = tiling.num_tiles // row_tiles * many.COLUMN_TILE
    assert tiling.first_narrow == min(large, width)
    left = width - tiling.first_narrow
    narrow = tiling.num_narrow // row_tiles
    assert (narrow - 1) * tiling.narrow_columns < left <= narrow * tiling.narrow_columns
    assert 1 <= tiling.num_programs <= num_multiprocessors


def test_what_is_left_of_whole_waves_is_one_narrow_tile_for_each_program():
    tiling = many.Tiling.of(512, 8960, H200_MULTIPROCESSORS)
    assert (tiling.num_tiles, tiling.first_narrow) == (4 * H200_MULTIPROCESSORS, 8448)
    assert (tiling.narrow_columns, tiling.num_narrow) == (16, 128)


def test_the_kernel_for_many_rows_compiles_without_a_gpu(tmp_path):
    rows, depth = ping_pong.ROW_TILE, ping_pong.DEPTH
    jobs = [
        dict(
            module=many.__name__,
            kernel="swiglu_many_rows_kernel",
            dtype=dtype,
            blocks=dict(
                x=(rows, depth),
                weight=(many.COLUMN_TILE, depth),
                narrow_weight=(narrow, depth),
                output=(rows, many.COLUMN_TILE),
                narrow_output=(rows, narrow),
            ),
            constants=dict(COLUMNS=many.COLUMN_TILE, NARROW=narrow),
        )
        for dtype, narrow in [("fp16", 16), *(("bf16", narrow) for narrow in many.NARROW_TILES)]
    ]
    for compiled in compile_all(jobs, tmp_path):
        # Two groups of warps, large and narrow tiles, 2 x 64 rows and 4 times 16 along the sum.
        assert compiled["num_products"] == 2 * 2 * 2 * 4


def test_rows_of_tiles_that_would_be_mostly_empty_take_two_kernels():
    numbers = (1, 32, 64, 65, 128, 192, 256, 320, 384, 448, 512, 1000, 8192)
    tilings = {num_rows: many.Tiling.of(num_rows, 18944, H200_MULTIPROCESSORS) for num_rows in numbers}
    taken = [num_rows for num_rows, tiling in tilings.items() if swiglu.has_kernel_for(num_rows, tiling)]
    assert taken == [64, 128, 256, 384, 448, 512, 1000, 8192]


def test_less_than_two_waves_take_two_kernels():
    """Of the shapes that were measured on an H200; 64 and 128 rows have the kernel for few rows, too."""
    taken = {
        width: [
            num_rows
            for num_rows in (64, 128, 256, 384, 512, 1024)
            if swiglu.is_for_many_rows(num_rows, many.Tiling.of(num_rows, width, H200_MULTIPROCESSORS))
        ]
        for width in (4864, 8960, 18944)
    }
    assert taken == {4864: [512, 1024], 8960: [384, 512, 1024], 18944: [128, 256, 384, 512, 1024]}


def test_only_a_plain_silu_takes_one_kernel(device, monkeypatch):
    """Adapters, biases and other activations need gate and up."""
    monkeypatch.setattr(swiglu, "is_faster", lambda x, weight: True)
    fused: list[tuple[int, ...]] = []

    def record(x, weight):
        fused.append(tuple(weight.shape))
        return silu_mul(F.linear(x, weight))

    monkeypatch.setattr(swiglu, "swiglu", record)
    generator = torch.Generator(device).manual_seed(0)
    x, weight = make(generator, 4, 24, 16, torch.float32)
    bias = draw(generator, 48, dtype=torch.float32)
    adapter = Adapter(
        a=draw(generator, 3, 16, dtype=torch.float32),
        b=draw(generator, 24, 3, dtype=torch.float32),
        bias=None,
        scaling=1.0,
        dropout=0.0,
    )
    on_gate = [(slice(0, 24), adapter)]
    delta = torch.cat((adapter.b @ adapter.a, torch.zeros_like(weight[24:])))
    silu = torch.nn.SiLU()
    for adapted, activation, whole, offset in [
        (AdaptedLinear(weight, None, [], None), silu, weight, 0.0),
        (AdaptedLinear(weight, bias, [], None), silu, weight, bias),
        (AdaptedLinear(weight, None, on_gate, None), silu, weight + delta, 0.0),
        (AdaptedLinear(weight, None, [], None), torch.nn.GELU(), weight, 0.0),
    ]:
        output = TritonBackend().gated_linear(activation, x, adapted)
        gate, up = (x @ whole.T + offset).chunk(2, dim=1)
        torch.testing.assert_close(output, activation(gate) * up, rtol=1e-4, atol=1e-5)
    assert fused == [(48, 16)]
    backend = TritonBackend()
    backend.broken = {"swiglu"}
    backend.gated_linear(silu, x, AdaptedLinear(weight, None, [], None))
    assert fused == [(48, 16)]
