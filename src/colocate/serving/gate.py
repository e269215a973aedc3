"""The gate in front of the service: who may come in, and at which desk each is served."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from colocate.http.gate import KNOWN, Refused, check_it_is_no_browser, headers_of
from colocate.http.key import ServerKey
from colocate.serving.desk import Desk
from colocate.serving.refusal import Refusal

KeyCheck = Callable[[str | None], Desk | None]
"""The key that a request carries -> the desk that serves it; None: the key is missing or wrong."""

_OPEN = ("GET", "/health")


class Gate:
    """ASGI middleware that lets requests with the right key in."""

    def __init__(self, app: ASGIApp, check_key: KeyCheck) -> None:
        self._app = app
        self._check_key = check_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"There is no {scope['type']} here.")
        try:
            headers = headers_of(scope)
            check_it_is_no_browser(dict(scope), headers)
            if (scope["method"], scope["path"]) != _OPEN:
                scope["colocate.desk"] = self._desk(headers)
                scope[KNOWN] = "authorization" in headers  # else anybody is served
        except Refused as refused:
            return await _refuse(Refusal(refused.status, str(refused)), scope, receive, send)
        except Refusal as refusal:
            return await _refuse(refusal, scope, receive, send)
        await self._app(scope, receive, send)

    def _desk(self, headers: dict[str, str]) -> Desk:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        desk = self._check_key(key.strip() if scheme.lower() == "bearer" else None)
        if desk is None:
            raise Refusal(401, "The API key is missing or wrong.", code="invalid_api_key")
        return desk


def with_key(key: ServerKey | None, desk: Desk) -> KeyCheck:
    """The check of a service with one desk, and with one key or without any."""

    def check(given: str | None) -> Desk | None:
        return desk if key is None or (given is not None and key.is_text(given)) else None

    return check


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {**refusal.headers, "connection": "close"}  # the body was not read
    await JSONResponse(refusal.content, refusal.status, headers)(scope, receive, send)
