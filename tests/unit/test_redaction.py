"""Which values are secrets, and that no other is touched."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_utils import SaveStrategy

from colocate.options.redaction import check_complete, is_secret, redacted


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, True) for name in ("hub_token", "token", "use_auth_token", "apiToken", "api_key", "apikey")],
        *[(name, True) for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "vllm_server_key", "api_keys")],
        *[(name, True) for name in ("password", "PASSWD", "db-password", "Authorization", "client_secret")],
        *[(name, False) for name in ("eos_token", "pad_token", "eos_token_id", "tokenizer", "num_tokens")],
        *[
            (name, False)
            for name in ("max_tokens_per_microbatch", "trust_remote_code", "sort_key", "key", "")
        ],
    ],
)
def test_names_of_secrets(name, expected):
    assert is_secret(name) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pa@ss@host:80/x", "http://<USER>@host:80/x"),
        ("GET https://h/v1?n=1&api_key=zz9#top", "GET https://h/v1?n=1&api_key=<API_KEY>#top"),
        ("kwargs={'token': 'zz9', 'eos_token': '</s>'}", "kwargs={'token': '<TOKEN>', 'eos_token': '</s>'}"),
        ('{"db": {"password": "z\\"z9"}}', '{"db": {"password": "<PASSWORD>"}}'),
        ("--hub_token zz9 --top_k 5", "--hub_token <HUB_TOKEN> --top_k 5"),
        ("no access with hf_" + "a" * 34, "no access with <REDACTED_SECRET>"),
        ("sent Authorization: Bearer abcdef123456", "sent Authorization: Bearer <REDACTED_SECRET>"),
        ("dataset_options='token=zz9' is not a mapping", "dataset_options='token=<TOKEN>' is not a mapping"),
        ("hub_token=None, {token: zz9, n: 5}", "hub_token=None, {token: <TOKEN>, n: 5}"),
        ("unexpected token: a brace", "unexpected token: a brace"),
        ("me@host, max_tokens=5, http://host/a@b", "me@host, max_tokens=5, http://host/a@b"),
    ],
)
def test_secrets_in_text(text, expected):
    assert redacted(text) == expected


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["a", "1 @ b"])
)
names = st.sampled_from(["revision", "eos_token", "n", "token", "api key", "nested"])
values = st.recursive(plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3))


@settings(max_examples=100)
@given(value=values, secret=st.text("xyz", min_size=4, max_size=9))
def test_a_secret_at_any_depth_is_found_and_nothing_else_changes(value, secret):
    """The same object comes back where there is no secret; what was found is asked for again."""

    def with_secret(item, key="nested"):
        if isinstance(item, dict):
            return {k: secret if k in ("token", "api key") else with_secret(v, k) for k, v in item.items()}
        return [with_secret(v) for v in item] if isinstance(item, list) else item

    given, hidden = with_secret(value), redacted(with_secret(value))
    before, after = json.dumps(given), json.dumps(hidden)
    assert secret not in after
    assert after.replace("<TOKEN>", secret).replace("<API_KEY>", secret) == before
    if secret in before:
        with pytest.raises(ValueError, match=r"option.*(token|api key).* stands for a secret.*--option"):
            check_complete({"option": hidden})
    else:
        assert redacted(given) is given
        check_complete({"option": given})


def test_what_is_no_secret_keeps_its_type():
    options = {
        "save_strategy": SaveStrategy.BEST,
        "token": True,
        "hub_token": None,
        "eos": {"start_token": 3},
    }
    assert redacted(options) is options
    assert redacted({"password": 1234, "stop_token": 5}) == {"password": "<PASSWORD>", "stop_token": 5}


@pytest.mark.parametrize(
    "text", ["a-" * 20_000, "token='" + "\\" * 20_000, "http://" * 5_000, "--" + "a." * 20_000]
)
def test_the_time_is_linear_in_the_text(text):
    started = time.process_time()
    assert redacted(text) == text
    assert time.process_time() - started < 15.0  # of 60 s that a quadratic search took
