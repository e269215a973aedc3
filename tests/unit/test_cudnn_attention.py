"""What cuDNN's graphs are made for, without a GPU; tests/gpu has the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colocate.policy.attention import cudnn_attention
from colocate.policy.attention.pack import Runs

LENGTHS = st.lists(st.integers(0, 3000), min_size=1, max_size=40).filter(any)


@given(lengths=LENGTHS, keys=st.none() | st.integers(1, 3000))
def test_a_graph_is_made_for_a_little_more_than_the_pack(lengths, keys):
    if keys is None:
        lengths = [length or 1 for length in lengths]
    runs = Runs.of(lengths, None if keys is None else [keys] * len(lengths), torch.device("cpu"))
    q, k = torch.empty(sum(runs.query_lengths), 4, 64), torch.empty(sum(runs.key_lengths), 2, 64)
    case = cudnn_attention._AttentionCase.of(q, k, runs, 1.0, has_workspace=True)
    for bound, number, smallest, slack in [
        (case.max_runs, len(lengths), 1, 2.0),
        (case.max_queries, max(runs.query_lengths), 128, 1.5),
        (case.max_keys, max(runs.key_lengths), 128, 1.5),
        (case.max_total_queries, len(q), 128, 1.0625),
        (case.max_total_keys, len(k), 128, 1.0625),
    ]:
        assert number <= bound < max(slack * number, number + smallest) + 1
    integers = {uid.name: tensor.tolist() for uid, tensor in cudnn_attention._integers(runs, case).items()}
    empty = [0] * (case.max_runs - len(lengths))
    assert integers["QUERY_LENGTHS"] == [*runs.query_lengths, *empty]
    assert integers["KEY_LENGTHS"] == [*runs.key_lengths, *empty]
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)] + [sum(lengths)] * len(empty)
    assert integers["LSE_STARTS"] == [4 * start for start in starts]
    assert integers["QUERY_STARTS"] == [4 * 64 * start for start in starts]
    assert integers["KEY_STARTS"][-1] == 2 * 64 * len(k)


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 64), (torch.bfloat16, 80)])
def test_what_it_does_not_take(dtype, head_size):
    assert cudnn_attention.why_not_cudnn_on((9, 0), dtype, head_size) is not None
    assert not cudnn_attention.has_cudnn(torch.device("cpu"), torch.bfloat16, 64)
