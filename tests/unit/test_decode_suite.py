"""What is claimed of decode steps at few rows."""

from __future__ import annotations

import pytest

from benchmarks.rollout import decode, decode_suite


def record(commit: str, step_s: float, floor_s: float) -> dict:
    rows = [{"num_rows": rows, "step_s": step_s * rows, "floor_s": floor_s * rows} for rows in decode.ROWS]
    return {"commit": commit, "machine": "one", "rows": rows}


def test_claims_are_medians_of_the_commit_measured_last():
    records = [record("old", 4.0, 1.0), *(record("new", step_s, 1.0) for step_s in (2.0, 1.0, 8.0))]
    suite = decode_suite.DecodeSuite.__new__(decode_suite.DecodeSuite)
    claims = suite.claims(records)
    assert claims["decode_fraction_of_floor_64rows"] == pytest.approx(0.5)
    assert claims["decode_step_s_64rows"] == pytest.approx(128)
    runs = suite.setup(records)["runs"]
    assert runs["old on one"]["decode_fraction_of_floor_64rows"] == pytest.approx(0.25)
    assert set(suite.claims([]).values()) == {None}


def test_the_floor_is_bound_by_bytes_at_one_row_and_by_operations_at_many():
    """By hand for Qwen2.5 1.5B: 1,543,569,408 weights in products, 28,672 bytes of KV a token."""
    weights = 28 * (1536 * (2048 + 1536 + 3 * 8960)) + 151936 * 1536
    bytes_per_s = 4e12
    few = decode.floor_s(8, flops_per_s=1e18, bytes_per_s=bytes_per_s)
    kv_bytes = 8 * (256 + decode.LONG_TOKENS / 2) * 28672
    assert few == pytest.approx((2 * weights + kv_bytes) / bytes_per_s, rel=0.01)
    many = decode.floor_s(8, flops_per_s=1e12, bytes_per_s=1e18)
    assert many == pytest.approx(2 * 8 * weights / 1e12, rel=1e-3)
