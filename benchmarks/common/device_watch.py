"""Memory in use on the GPU, read from the driver by a process beside the one that is measured.

    watch = DeviceWatch(leave_bytes=80 * 10**9)   # before the measured process touches the GPU
    ...
    watch.peak_bytes()                            # most that others took since the last look
    watch.close()

A thread of the measured process would have to wait for the interpreter's lock, and its calls may break a CUDA
graph that is being captured. A process of its own does neither. It holds a CUDA context, and with
`leave_bytes` a ballast allocation that leaves so much of the GPU free, before anything is measured: what is
measured is then everything that the other processes take, their CUDA contexts included.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any

INTERVAL_S = 0.002
BALLAST_UNIT_BYTES = 2 * 2**20
"""What the driver rounds an allocation up to."""


class DeviceWatch:
    """Watches one device.

    Args:
        leave_bytes: the cap: at most so much stays free for others, less than 2 MiB below. None: all.
        gpu: the device as CUDA_VISIBLE_DEVICES names it; None: device 0, or the first of
            CUDA_VISIBLE_DEVICES.

    Raises:
        RuntimeError: there is no GPU, or less than `leave_bytes` of it is free.
    """

    def __init__(self, leave_bytes: int | None = None, gpu: str | None = None) -> None:
        command = [sys.executable, __file__, *([] if leave_bytes is None else [str(leave_bytes)])]
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        start = self._read()
        self.total_bytes: int = start["total_bytes"]
        self.free_bytes: int = start["free_bytes"]
        """Free when the watch began, the cap where there is one."""

    def peak_bytes(self) -> int:
        """The most that was in use at one time beyond what was when the watch began, since the last call."""
        assert self._process.stdin is not None, "it was opened as a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.free_bytes - self._read()["least_free_bytes"]

    def close(self) -> None:
        """Give the ballast back."""
        assert self._process.stdin is not None, "it was opened as a pipe"
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{__file__} ended with status {self._process.wait()}: see its error above.")
        return json.loads(line)


def ballast_bytes(free_bytes: int, leave_bytes: int) -> int:
    """What to allocate so that at most `leave_bytes` stay free.

    Raises:
        RuntimeError: less than that is free.
    """
    if free_bytes < leave_bytes:
        raise RuntimeError(
            f"{leave_bytes:,} bytes were to be left and {free_bytes:,} are free: the GPU is smaller than the "
            "cap, or in use."
        )
    return -(-(free_bytes - leave_bytes) // BALLAST_UNIT_BYTES) * BALLAST_UNIT_BYTES


def main() -> None:
    from cuda.bindings import driver

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else results

    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    free, total = call("cuMemGetInfo")
    if len(sys.argv) > 1 and (size := ballast_bytes(free, int(sys.argv[1]))):
        call("cuMemAlloc", size)
        free, total = call("cuMemGetInfo")
    print(json.dumps({"total_bytes": total, "free_bytes": free}), flush=True)
    least = free
    while True:
        is_asked = bool(select.select([sys.stdin], [], [], INTERVAL_S)[0])
        least = min(least, call("cuMemGetInfo")[0])
        if is_asked:
            if not sys.stdin.readline():
                return
            print(json.dumps({"least_free_bytes": least}), flush=True)
            least = call("cuMemGetInfo")[0]


if __name__ == "__main__":
    main()
