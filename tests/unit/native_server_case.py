"""Native rollout servers for tests: of tiny models, in threads of this process, asked by real HTTP."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from engine_models import make_model

from colocate.http.key import key_file, key_of_new_server
from colocate.rollout_server.native.serve import RolloutServer, ServedOptions
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.watch import Timeouts
from colocate.serving.server import bound_socket

TIMEOUTS = Timeouts(
    answer_s=20.0, silence_s=1.0, max_attempts=3, first_delay_s=0.02, message_s=20.0,
    poll_s=0.005, has_substitute=True,
)  # fmt: skip


def config_only(model: Any, directory: Path) -> Path:
    """A model's directory without its weights, which is all that a server needs."""
    model.config.save_pretrained(directory)
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    return directory


class NativeServer:
    """A server at a port of its own, which can be ended and started again there.

    Args:
        model: whose configuration it has.
        options: see `ServedOptions`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._model = model
        self._options = ServedOptions(**{"max_num_seqs": 4, "dtype": "float32", "use_cpu": True, **options})
        self.port = 0
        self.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._directory = config_only(self._model, Path(tempfile.mkdtemp(prefix="native-server-")))
        listening = bound_socket("127.0.0.1", self.port)
        self.port = listening.getsockname()[1]
        self.key = key_of_new_server(self.port)
        self._server = RolloutServer(str(self._directory), listening, self._options, self.key)
        self.loop = self._server.loop
        self._may_go_on = threading.Event()

    def hang(self, limit_s: float) -> None:
        """The engine's thread hangs until the server is closed, at something that may take so long."""

        def wait() -> None:
            self.loop._stepper._doing = (time.monotonic(), limit_s)
            self._may_go_on.wait()

        self.loop._call(wait, lambda refusal: None)

    def end_thread(self) -> None:
        """The engine's thread ends by an error that is none of a step."""
        self.loop._call(lambda: sys.exit("the end"), lambda refusal: None)

    def close(self) -> None:
        self._may_go_on.set()
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        key_file(socket.gethostname(), self.port).unlink(missing_ok=True)


@functools.cache
def _shared(number: int) -> NativeServer:
    server = NativeServer(make_model("qwen3"))
    atexit.register(server.close)
    return server


def make_native_server_pool(model: Any, num_engines: int) -> EnginePool:
    """For the contract suite: a pool of the engines of so many servers, which all tests share."""
    run_id = os.urandom(8).hex()
    return EnginePool(
        [
            RolloutServerEngine(
                model, base_url=_shared(number).base_url, run_id=run_id, bucket_bytes=20_000,
                timeouts=TIMEOUTS,
            )
            for number in range(num_engines)
        ]
    )  # fmt: skip
