"""Fixtures for every test that trains. The helpers themselves are in `tiny.py`."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Kernels run in the interpreter then. transformers imports triton, which reads this at import.
    os.environ["TRITON_INTERPRET"] = "1"
    # Nothing is compiled by TorchDynamo; bitsandbytes would load it in every process, for more than a second.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from colocate.memory import garbage
from processes import Searches, leave_out_lasting_objects
from tiny import make_model, make_reward_model, make_tokenizer

# The same examples are drawn each time, so that a failure is one of what was changed and none of chance;
# `make test-all` draws new ones (--hypothesis-profile=new). How long an example takes says something of the
# machine only, and on a busy one changes from run to run.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items):
    """With `--dist loadgroup` a file's tests stay in one process, unless they have a group of their own.

    Groups of a vLLM of their own and those marked `early` come first, so that no process is left alone with
    a long one at the end. Of the cases of a test with `share(n)` every n-th is run, and the rest is slow.
    """
    numbers: Counter[str] = Counter()
    for item in items:
        share = item.get_closest_marker("share")
        if share is not None:
            test = item.nodeid.partition("[")[0]
            if numbers[test] % share.args[0]:
                item.add_marker(pytest.mark.slow)
            numbers[test] += 1
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


@pytest.fixture(scope="module", autouse=True)
def libraries_are_left_out_of_searches_for_garbage():
    """See `Searches`. What runs leave in cycles is freed when a file's tests have ended.

    Not on a GPU, of whose memory tests count the bytes.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(garbage, "gc", Searches)
            leave_out_lasting_objects()
        yield


@pytest.fixture
def all_garbage_is_found(monkeypatch):
    """For tests of what is freed, also by runs."""
    monkeypatch.setattr(garbage, "gc", gc)
    gc.unfreeze()


# A shell's background job ignores Ctrl-C, and so would the tests that press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A test draws the same numbers, and logs as much, alone, in any order and in any process."""
    logging.getLogger("colocate").setLevel(logging.NOTSET)  # a run has set it
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def state_of_process() -> dict[str, Any]:
    """What one test could leave to the next. Environment variables and the other handlers are not among it:
    Ray and scripts of TRL's set them when they are first used, in whichever test that is."""
    numbers = (signal.SIGINT, signal.SIGVTALRM)
    return {
        **{f"the handler of {number.name}": signal.getsignal(number) for number in numbers},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "a timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        "the working directory": os.getcwd(),
        "the default dtype": torch.get_default_dtype(),
        "PyTorch's threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def process_is_left_as_it_was():
    """A test that leaves something changed fails itself, and not a later one that relies on it."""
    before = state_of_process()
    yield
    after = state_of_process()
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    if changed:
        restore(before)
    told = [f"{name} from {before.get(name)} to {after.get(name)}" for name in sorted(changed)]
    assert not told, "the test left changed: " + "; ".join(told)


def restore(state: dict[str, Any]) -> None:
    """What later tests need most."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, state["blocked signals"])
    os.chdir(state["the working directory"])
    torch.set_default_dtype(state["the default dtype"])
    torch.set_grad_enabled(state["gradients"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])


@pytest.fixture
def nothing_is_collected():
    """Keeps the garbage collector from running in a test that presses Ctrl-C or waits for another signal.

    Python drops what a handler raises within a finalizer or within a callback of the collector, and
    Hypothesis installs such a callback in any process in which it has run.
    """
    gc.disable()
    yield
    gc.enable()


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
