"""`Limits`: what a client may take of the service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes and times. A request beyond one is refused, or disconnected where no answer can be given."""

    max_requests: int = 256
    """Requests under way at once; further ones get 429."""
    max_connections: int = 1024
    """Connections at once. For a further one the oldest is closed on which no request with a key has come and
    none is under way; where there is none of these, requests on it get 503."""
    max_header_bytes: int = 2**15
    """Bytes of a request's first line and headers."""
    max_body_bytes: int = 2**23
    header_s: float = 10.0
    """Seconds from a connection's beginning, or from the last answer, to the end of a request's headers."""
    known_header_s: float = 10.0
    """Seconds for that on a connection which has carried a request with the key."""
    body_s: float = 30.0
    """Seconds for a request's body."""
    reader_s: float = 30.0
    """Seconds for which a client may read nothing of what waits for it."""
    num_readers: int = 4
    """Bodies that are read at the same time; a tokenizer in Python reads one."""
    late_s: float = 10.0
    """Seconds after which /health tells that bodies are not read."""
    max_wait_s: float = 60.0
    """Seconds that a request waits for the engine, which may be asleep or draw others; then it gets 503."""
