"""Why a rank has failed, in a file that its launcher reads: of several ranks that end, the launcher shows the
one that failed first, and not one that ended because of it.

torchrun names the file, and so does accelerate, which starts torchrun; the launcher on Ray names one, too.
See https://docs.pytorch.org/docs/stable/elastic/errors.html.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from colocate.options.redaction import redacted

VARIABLE = "TORCHELASTIC_ERROR_FILE"


class Failure(NamedTuple):
    """What an error file says."""

    at_s: int
    """When the rank failed, in seconds of its node's clock."""
    text: str


def record_failure(error: BaseException, text: str = "") -> None:
    """Write down why this rank fails, unless it has done so already, or no launcher has asked for it.

    A rank that ends because another one has failed must not call it.

    Args:
        text: what the user is told; empty: the traceback.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    lines = text or "".join(traceback.format_exception(error))
    extra = {"py_callstack": redacted(lines), "timestamp": str(int(time.time()))}
    message = {"message": redacted(f"{type(error).__name__}: {error}"), "extraInfo": extra}
    with suppress(OSError), open(name, "x", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def read_failure(path: Path) -> Failure | None:
    """What a rank has written; None: nothing, or it was cut short."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        extra: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
        return Failure(int(extra["timestamp"]), str(extra["py_callstack"]))
    return None
