"""The claims of the benchmark of the first minute, from records whose figures are known."""

from __future__ import annotations

from typing import Any

from benchmarks.start.suite import compute_claims


def cold(seconds: float) -> dict[str, Any]:
    return {"kind": "cold_start", "seconds": seconds}


def run(*seconds: float) -> dict[str, Any]:
    return {"kind": "step", "steps": [{"step_s": s} for s in seconds]}


def test_a_cold_start_is_the_median_of_three() -> None:
    assert compute_claims([cold(9.0), cold(30.0)])["start_cold_s"] is None
    assert compute_claims([cold(9.0), cold(30.0), cold(7.0)])["start_cold_s"] == 9.0


def test_the_second_step_counts_for_neither_side() -> None:
    name = "first_step_over_steady"
    assert compute_claims([run(8.0, 100.0, 4.0, 2.0, 4.0)])[name] is None
    assert compute_claims([run(8.0, 100.0, 4.0, 2.0, 4.0), run(12.0, 0.1, 3.0, 4.0, 5.0)])[name] == 2.5
