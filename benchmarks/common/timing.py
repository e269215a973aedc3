"""Seconds on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

REPETITIONS = 20


def median_s(body: Callable[[], Any]) -> float:
    """Median seconds of `body`, after three runs that do not count."""
    seconds = []
    for _ in range(REPETITIONS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(seconds[3:])


def captured(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `body` launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()  # cuBLAS makes its workspace outside of the graph
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy of 4 GiB within the GPU's memory."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda")
    destination = torch.empty_like(source)
    # Not in a graph: there the copy becomes a memcpy node, which runs on a copy engine at two thirds of the
    # rate (2.67 against 4.28 TB/s on an H200). Next to the copy's two milliseconds its
    # launch does not count.
    return 2 * source.nbytes / median_s(lambda: destination.copy_(source))
