"""`Refusal`: a request that is not answered, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """An error of the service, told to its caller.

    Args:
        status: the HTTP status.
        param: the field of the request that is to blame.
        code: a word by which programs tell errors apart, such as "model_not_found".
        retry_after_s: seconds after which the same request may be answered; None: it never will.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def content(self) -> dict[str, Any]:
        """The body of the answer: `{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def too_long(field: str, why: str) -> Refusal:
    """The refusal of a prompt, in a field of the request, that leaves no room for the completion."""
    why = f"{why} Shorten the {field} or lower max_tokens."
    return Refusal(400, why, param=field, code="context_length_exceeded")


def busy(why: str, retry_after_s: int) -> Refusal:
    """The refusal of a request that would have had to wait too long."""
    return Refusal(503, why, code="engine_unavailable", retry_after_s=retry_after_s)
