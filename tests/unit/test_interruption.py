"""SIGTERM asks a run to stop after its step, and still ends the processes that the run has forked."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from colocate.checkpoints.stop_signals import StopRequest

ONE_PROCESS = SimpleNamespace(num_processes=1, is_main_process=True)
fork = multiprocessing.get_context("fork")


def ends_well(body: Callable[[], None], timeout_s: float = 100.0) -> bool:
    """Whether the body ends without an error in a process of its own, which is killed if it hangs."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def terminated(target: Callable, *args: object, after_s: float) -> None:
    process = fork.Process(target=target, args=args)
    process.start()
    process.join(after_s)
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def pool_that_times_out() -> None:
    with fork.Pool(1) as pool, pytest.raises(multiprocessing.TimeoutError):
        pool.apply_async(time.sleep, (60,)).get(timeout=0.1)


@pytest.mark.parametrize(
    "sandbox",
    [
        lambda: terminated(time.sleep, 60, after_s=0.1),
        lambda: terminated(sum, range(10**12), after_s=0.1),  # never comes back to Python's handlers
        lambda: [terminated(time.sleep, 60, after_s=0.0) for _ in range(4)],  # perhaps not yet set up
        pool_that_times_out,
    ],
    ids=["process", "C code", "at once", "pool"],
)
def test_forked_processes_can_be_terminated(sandbox):
    def run() -> None:
        with StopRequest(ONE_PROCESS) as stop:
            sandbox()
            assert not stop.received()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received()  # the run itself goes on to the end of its step

    assert ends_well(run)


def test_children_have_the_handler_from_before_the_run():
    def run() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        with StopRequest(ONE_PROCESS):
            process = fork.Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()
            process.join()
        assert process.exitcode == 7
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    assert ends_well(run)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(ONE_PROCESS):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_ctrl_c_waits_for_the_step_and_the_second_does_not(monkeypatch, capfd):
    monkeypatch.setattr("colocate.checkpoints.stop_signals.SAME_INTERRUPT_S", 0.05)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest(ONE_PROCESS) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # as a launcher passes it on
        assert stop.received() and stop.name == "Ctrl-C"
        assert isinstance(stop.exception(), KeyboardInterrupt)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second Ctrl-C does not stop at once")
    assert signal.getsignal(signal.SIGINT) is before
    assert "Press it again to stop at once" in capfd.readouterr().err


def test_sigterm_after_ctrl_c_aborts_nothing_and_ends_like_the_first():
    with StopRequest(ONE_PROCESS) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exception().code == 143
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.name == "SIGTERM"


def test_ctrl_c_does_not_end_the_processes_that_a_step_needs():
    def run() -> None:
        with StopRequest(ONE_PROCESS) as stop:
            process = fork.Process(target=time.sleep, args=(0.5,))
            process.start()
            os.killpg(os.getpgid(0), signal.SIGINT)  # what a terminal does
            process.join()
            assert process.exitcode == 0 and stop.received()

    assert ends_well(run)


def test_a_background_job_goes_on_ignoring_ctrl_c():
    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with StopRequest(ONE_PROCESS) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.received()

    assert ends_well(run)
