"""The benchmark of a conversation: what it asks a service, and what is claimed of its rows."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.serving import conversation
from colocate.engines.native.engine import NativeEngine
from serving_case import MODEL, TOKENIZER, random_model, serving


def test_one_conversation_finds_its_earlier_turns_and_the_other_nothing(monkeypatch):
    sizes = dict(NUM_TURNS=3, FIRST_TOKENS=9, GIVEN_TOKENS=5, DRAWN_TOKENS=4, MODEL=MODEL)
    for name, size in sizes.items():
        monkeypatch.setattr(conversation, name, size)
    monkeypatch.setitem(conversation.SHAPE, "vocab_size", len(TOKENIZER))
    with serving(NativeEngine(random_model(), page_size=4, kv_cache_tokens=2048), stops=()) as served:
        rows = conversation.measured(served.client(), 2)
    assert [row["round"] for row in rows] == [1] * 6 + [2] * 6, "the first round does not count"
    assert [row["prompt_tokens"] for row in rows] == [9, 18, 27] * 4
    # Of 9 + 4 tokens the last was never fed, and the last whole page ends at 12; then of 18 + 4 at 20.
    assert [row["cached_tokens"] for row in rows] == [0, 12, 20, 0, 0, 0] * 2
    assert all(row["first_token_s"] > 0 for row in rows)
    assert conversation.claims_of(rows)["tokens_read_ratio"] == (9 + 18 + 27) / (9 + 6 + 7)


def test_claims_are_of_the_last_turns_medians():
    rows = [
        {
            "round": number,
            "finds": finds,
            "turn": turn,
            "prompt_tokens": 10 * (turn + 1),
            "cached_tokens": 8 if finds and turn else 0,
            "first_token_s": (turn + 1) * (1.0 if finds else 3.0) * (5.0 if number == 2 else 1.0),
        }
        for number, finds, turn in itertools.product((1, 2, 3), (True, False), range(conversation.NUM_TURNS))
    ]
    claims = conversation.claims_of(rows)
    num_turns = conversation.NUM_TURNS
    assert claims["tokens_read_anew"] == 10 * num_turns * (num_turns + 1) / 2
    assert claims["tokens_read_found"] == claims["tokens_read_anew"] - 8 * (num_turns - 1)
    assert claims["last_first_token_s_found"] == num_turns
    assert claims["last_first_token_ratio"] == pytest.approx(3.0)
