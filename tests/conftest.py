"""Fixtures for every test that trains. The helpers themselves are in `tiny.py`."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Kernels run in the interpreter then. transformers imports triton, which reads this at import.
    os.environ["TRITON_INTERPRET"] = "1"

from tiny import make_model, make_reward_model, make_tokenizer

# How long an example takes says something of the machine only, and on a busy one changes from run to run.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """With `--dist loadgroup` a file's tests stay in one process, unless they have a group of their own.

    Groups of a vLLM of their own and those marked `early` come first, so that no process is left alone with
    a long one at the end.
    """
    for item in items:
        if item.get_closest_marker("own_vllm") is not None:
            item.add_marker(pytest.mark.xdist_group(item.name))
            item.add_marker(pytest.mark.early)
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    items.sort(key=lambda item: item.get_closest_marker("early") is None)


def pytest_terminal_summary(terminalreporter):
    """How long each directory's tests took, over all processes: what a change adds to CI shows here."""
    seconds: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "when") and hasattr(report, "duration"):
                directory = str(Path(report.location[0]).parent)
                seconds[directory] += report.duration
                numbers[directory] += report.when == "call"
    terminalreporter.section("minutes by directory")
    for directory, duration in seconds.most_common():
        terminalreporter.line(f"{duration / 60:6.1f} min {numbers[directory]:6d} tests  {directory}")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)


# A shell's background job ignores Ctrl-C, and so would the tests that press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def ctrl_c_is_left_as_it_was():
    """A test that leaves a handler or a mask behind fails itself, not a later one that presses Ctrl-C."""
    yield
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert handler is signal.default_int_handler, f"the test left a handler of SIGINT behind: {handler}"
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert signal.SIGINT not in blocked, "the test left SIGINT blocked"


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    """A tiny model and its tokenizer, as `from_pretrained` finds them."""
    directory = str(tmp_path_factory.mktemp("model") / "tiny-qwen3")
    make_model("qwen3").save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def reward_model_dir(tmp_path_factory) -> str:
    """A tiny reward model and its tokenizer."""
    directory = str(tmp_path_factory.mktemp("reward") / "tiny-reward")
    make_reward_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory
