"""The gate in front of the service: it checks keys, and finds the handler for each."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from colocate.http.gate import KNOWN, Refused, check_it_is_no_browser, headers_of
from colocate.http.key import ServerKey
from colocate.serving.handlers import RequestHandler
from colocate.serving.refusal import Refusal

KeyCheck = Callable[[str | None], RequestHandler | None]
"""The key that a request carries -> the handler that serves it; None: the key is missing or wrong."""

_OPEN = ("GET", "/health")


class KeyGate:
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
                scope["colocate.handler"] = self._handler(headers)
                scope[KNOWN] = "authorization" in headers  # else anybody is served
        except Refused as refused:
            return await _refuse(Refusal(refused.status, str(refused)), scope, receive, send)
        except Refusal as refusal:
            return await _refuse(refusal, scope, receive, send)
        await self._app(scope, receive, send)

    def _handler(self, headers: dict[str, str]) -> RequestHandler:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        handler = self._check_key(key.strip() if scheme.lower() == "bearer" else None)
        if handler is None:
            raise Refusal(401, "The API key is missing or wrong.", code="invalid_api_key")
        return handler


def with_key(key: ServerKey | None, handler: RequestHandler) -> KeyCheck:
    """The check of a service with one handler, and with one key or without any."""

    def check(given: str | None) -> RequestHandler | None:
        return handler if key is None or (given is not None and key.is_text(given)) else None

    return check


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {**refusal.headers, "connection": "close"}  # the body was not read
    await JSONResponse(refusal.content, refusal.status, headers)(scope, receive, send)
