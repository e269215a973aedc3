"""Requests, messages and answers between trainer and server, signed with the server's key.

Every request of a trainer is signed as a whole: method, path and body. Messages to the workers and their
answers have another signature, for two reasons: a server that was started by hand may lack the gate, and
nobody else must be able to answer that the right weights are loaded. The signature of an answer covers that
of its message, which is never repeated.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from colocate.http.key import ServerKey

RUN_HEADER = "X-Colocate-Run"
"""The header with the id of the run that asks, for routes that only the server's holder may use."""
WORKER_METHOD = "colocate_receive"
"""The method of our worker extension, the only one that is called through `/collective_rpc`."""

_SCHEME = "Colocate"
_REQUEST, _MESSAGE, _ANSWER = "request", "message to a worker", "answer of a worker"


def authorization(key: ServerKey, method: str, target: str, body: bytes) -> str:
    """The Authorization header of a request for `target`, a path with its query."""
    digest = hashlib.sha256(body).hexdigest()
    return f"{_SCHEME} {digest}:{key.sign(_REQUEST, method, target, digest)}"


def signed_digest(key: ServerKey, header: str, method: str, target: str) -> str | None:
    """SHA-256 of the body that an Authorization header was made for; None if the key did not make it."""
    scheme, _, credentials = header.partition(" ")
    digest, _, signature = credentials.partition(":")
    if scheme == _SCHEME and key.has_signed(signature, _REQUEST, method, target, digest):
        return digest
    return None


class Message:
    """A signed message to the workers, which also checks the signatures of their answers.

    Args:
        content: {"do": method, ...arguments}, sent as JSON.
    """

    def __init__(self, key: ServerKey, content: dict[str, Any]) -> None:
        self._key = key
        self._text = json.dumps({**content, "nonce": uuid.uuid4().hex})
        self._signature = key.sign(_MESSAGE, self._text)

    def call(self, timeout_s: float) -> dict[str, Any]:
        """The body of a request to `/collective_rpc`."""
        return {"method": WORKER_METHOD, "args": [self._text, self._signature], "timeout": timeout_s}

    def opened(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The content of a worker's answer.

        Raises:
            ValueError: the answer is not signed with the key as one to this message.
        """
        text, signature = answer.get("answer"), answer.get("signature")
        if (
            not isinstance(text, str)
            or not isinstance(signature, str)
            or not self._key.has_signed(signature, _ANSWER, self._signature, text)
        ):
            said = f"; it says: {str(answer['error'])[:300]}" if "error" in answer else ""
            raise ValueError(f"its answer is not signed with the server's key{said}")
        return json.loads(text)


def opened_message(key: ServerKey, text: str, signature: str) -> dict[str, Any]:
    """The content of a trainer's message.

    Raises:
        PermissionError: the message is not signed with the key.
    """
    if not key.has_signed(signature, _MESSAGE, text):
        raise PermissionError("the message is not signed with the server's key")
    content = json.loads(text)
    del content["nonce"]
    return content


def sealed_answer(key: ServerKey, answer: dict[str, Any], signature: str) -> dict[str, Any]:
    """Sign a worker's answer to the message that has this signature."""
    text = json.dumps(answer)
    return {"answer": text, "signature": key.sign(_ANSWER, signature, text)}
