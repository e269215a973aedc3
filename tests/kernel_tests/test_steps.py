"""Row state of a decode step against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import examples

from colocate.kernels.decode.steps import begin_step, end_step

few = examples(40)
UNTOUCHED = -77


@few
@given(
    num_rows=st.sampled_from([1, 5, 128, 200]),
    page_size=st.sampled_from([1, 16, 24]),
    seed=st.integers(0, 2**31),
)
def test_begin_step(device, num_rows, page_size, seed):
    generator = torch.Generator().manual_seed(seed)
    num_pages = 4
    finished = torch.randint(0, 2, (num_rows,), generator=generator)
    positions = torch.randint(0, num_pages * page_size, (num_rows,), generator=generator)
    # A row that has finished at its limit stands one past its table, at worst past the whole tensor.
    positions[finished == 1] = 2**30
    tables = torch.randint(0, 1000, (num_rows, num_pages + 3), generator=generator)
    slots, context_lens = torch.full((2, num_rows), UNTOUCHED, dtype=torch.int32, device=device)
    step = torch.full((1,), 4, dtype=torch.int32, device=device)
    begin_step(
        positions.int().to(device),
        finished.int().to(device),
        tables.int().to(device)[:, :num_pages],
        page_size,
        slots,
        context_lens,
        step,
    )
    assert step.item() == 5
    for row in range(num_rows):
        position = int(positions[row])
        if finished[row]:
            expected = -1, 0
        else:
            page, offset = divmod(position, page_size)
            expected = int(tables[row, page]) * page_size + offset, position + 1
        assert (int(slots[row]), int(context_lens[row])) == expected


@few
@given(
    num_rows=st.sampled_from([1, 5, 128, 200]),
    stop_token_ids=st.lists(st.integers(0, 6), max_size=3),
    token_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**31),
)
def test_end_step(device, num_rows, stop_token_ids, token_dtype, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> torch.Tensor:
        return torch.randint(0, high, (num_rows,), generator=generator).int()

    tokens, limits, finished = draw(7), 1 + draw(4), draw(2)
    before = {"last_tokens": draw(7), "positions": draw(99), "num_generated": draw(4), "finished": finished}
    tokens[finished == 1] = -1
    logprobs = torch.rand(num_rows, generator=generator)
    after = {name: value.clone().to(device) for name, value in before.items()}
    out_tokens = torch.full((3, num_rows), UNTOUCHED, dtype=torch.int32, device=device)
    out_logprobs = torch.full((3, num_rows), torch.nan, device=device)
    end_step(
        tokens.to(device, token_dtype),
        logprobs.to(device),
        torch.tensor(stop_token_ids, dtype=torch.int32, device=device),
        limits.to(device),
        after["last_tokens"],
        after["positions"],
        after["num_generated"],
        after["finished"],
        torch.ones(1, dtype=torch.int32, device=device),
        out_tokens,
        out_logprobs,
    )
    for row in range(num_rows):
        old = {name: int(value[row]) for name, value in before.items()}
        new = {name: int(value[row]) for name, value in after.items()}
        token = int(tokens[row])
        if old["finished"]:
            assert new == old
            assert out_tokens[1, row] == -1 and out_logprobs[1, row].isnan()
            continue
        count = old["num_generated"] + 1
        assert new == {
            "last_tokens": token,
            "positions": old["positions"] + 1,
            "num_generated": count,
            "finished": int(token in stop_token_ids or count >= limits[row]),
        }
        assert out_tokens[1, row] == token and out_logprobs[1, row].cpu() == logprobs[row]
    for other in (0, 2):
        assert (out_tokens[other] == UNTOUCHED).all() and out_logprobs[other].isnan().all()


@pytest.mark.gpu
def test_steps_replay_in_a_captured_graph():
    """The state lives on the GPU: three replays are three steps."""
    num_rows, page_size = 300, 16
    state = torch.zeros(6, num_rows, dtype=torch.int32, device="cuda")
    last_tokens, positions, num_generated, finished, slots, context_lens = state
    limits = torch.arange(num_rows, device="cuda", dtype=torch.int32) % 4 + 1
    tables = torch.arange(num_rows, device="cuda", dtype=torch.int32)[:, None].contiguous()
    tokens = torch.full((num_rows,), 5, dtype=torch.int32, device="cuda")
    logprobs = torch.zeros(num_rows, device="cuda")
    stop = torch.empty(0, dtype=torch.int32, device="cuda")
    out_tokens = torch.empty(4, num_rows, dtype=torch.int32, device="cuda")
    out_logprobs = torch.empty(4, num_rows, device="cuda")
    index = torch.full((1,), -1, dtype=torch.int32, device="cuda")

    def step() -> None:
        begin_step(positions, finished, tables, page_size, slots, context_lens, index)
        end_step(
            tokens,
            logprobs,
            stop,
            limits,
            last_tokens,
            positions,
            num_generated,
            finished,
            index,
            out_tokens,
            out_logprobs,
        )

    step()  # compiles
    torch.cuda.synchronize()
    state.zero_()
    index.fill_(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    assert torch.equal(num_generated, limits.clamp(max=3))
    assert torch.equal(positions, num_generated)
    assert torch.equal(finished, (limits <= 3).int())
    assert torch.equal(out_tokens[2], torch.where(limits >= 3, 5, -1).int())
    live = torch.arange(num_rows, device="cuda", dtype=torch.int32) * page_size + 2
    assert torch.equal(slots, torch.where(limits >= 3, live, -1).int())
