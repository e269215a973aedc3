"""Work for a client is given up when the client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from colocate.serving.refusal import Refusal

T = TypeVar("T")


async def unless_gone(receive: Receive, answering: Coroutine[Any, Any, T]) -> T:
    """The result of `answering`, which is cancelled if the client leaves before.

    Raises:
        Refusal: the client has left, and nobody will read this.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, leaving = asyncio.create_task(answering), asyncio.create_task(gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise Refusal(499, "The client has closed the connection.")
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)
