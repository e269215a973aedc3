"""The key of a rollout server, without which nobody can use the server.

A trainer does not send the key. It signs its requests with HMAC-SHA256 (RFC 2104), and the server's workers
sign their answers. So another program that listens on the port while the server is down neither learns the
key nor can answer in the server's place.

It uses the standard library alone, as trainer, vLLM's API servers and vLLM's workers import it.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "COLOCATE_SERVER_KEY"
_FORM = re.compile(r"[!-~]{16,512}")


class ServerKey:
    """A key that appears neither in its `repr` nor in a pickle.

    Raises:
        ValueError: `text` is not 16 to 512 printable ASCII characters without blanks.
    """

    def __init__(self, text: str, source: str) -> None:
        if _FORM.fullmatch(text) is None:
            raise ValueError(
                f"The server's key in {source} has {len(text)} characters; it must be 16 to 512 printable "
                "ASCII characters without blanks, such as `openssl rand -hex 32` writes."
            )
        self._key = text.encode()
        self.source = source

    def __repr__(self) -> str:
        return f"ServerKey(from {self.source})"

    def __reduce__(self) -> str:
        raise TypeError("a server's key is not pickled")

    def reveal(self) -> str:
        """The key as text, only for the environment of a server's processes."""
        return self._key.decode()

    def is_text(self, text: str) -> bool:
        """Whether `text` is the key, in a time that does not depend on how many characters agree."""
        return hmac.compare_digest(text.encode(errors="replace"), self._key)

    def sign(self, purpose: str, *parts: str) -> str:
        """A signature of the texts `parts`, valid for `purpose` only; 64 hexadecimal digits."""
        return hmac.digest(self._key, json.dumps([purpose, *parts]).encode(), "sha256").hex()

    def has_signed(self, signature: str, purpose: str, *parts: str) -> bool:
        """Whether `signature` is the result of `sign` for this purpose and these texts."""
        return hmac.compare_digest(signature.encode(errors="replace"), self.sign(purpose, *parts).encode())


def key_from_environment() -> ServerKey | None:
    """The key in COLOCATE_SERVER_KEY; None if the variable is not set.

    Raises:
        ValueError: the variable's text cannot be a key.
    """
    text = os.environ.get(VARIABLE)
    return None if text is None else ServerKey(text, f"the environment variable {VARIABLE}")


def key_of_new_server(port: int) -> ServerKey:
    """The key for a server on this machine: the one in the environment, or in the port's file.

    The file is made if it is missing and is kept, so that a server that is started again has the key that its
    trainer knows.

    Raises:
        ValueError: the key is malformed, or others could have written or read its file.
    """
    key = key_from_environment()
    if key is not None:
        return key
    path = key_file(socket.gethostname(), port)
    if (key := _read(path)) is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)  # for this user alone
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32))
            os.rename(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        key = _read(path)
    assert key is not None, "it was written a moment ago"
    return key


def key_of_server_at(host: str, port: int) -> ServerKey:
    """The key that a trainer uses with the server at `host`:`port`.

    Raises:
        ValueError: there is no key, it is malformed, or others could have written or read its file.
    """
    key = key_from_environment()
    if key is not None:
        return key
    own = socket.gethostname()
    is_here = is_loopback(host) or host.lower() in {own.lower(), own.lower().partition(".")[0]}
    path = key_file(own if is_here else host, port)
    if (key := _read(path)) is None:
        raise ValueError(
            f"There is no key for the server at {host}:{port}. `colocate rollout-serve` keeps its key in a "
            f"file of the user's who starts it, on this machine {path}, which is not there. For a server of "
            f"another machine or user set {VARIABLE} to its key, here and where the server starts."
        )
    return key


def key_file(host: str, port: int) -> Path:
    """The file with the key of the server at `host`:`port`; machines that share a home need its host."""
    cache = os.environ.get("XDG_CACHE_HOME")
    root = Path(cache) if cache else Path.home() / ".cache"
    return root / "colocate" / "servers" / f"{re.sub('[^A-Za-z0-9.-]', '_', host)}-{port}.key"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def say_who_may_use_it(key: ServerKey, host: str) -> None:
    """Print how a trainer comes to have the server's key."""
    print(f"colocate rollout-serve: every request needs the key in {key.source}", flush=True)
    if not is_loopback(host):
        print(
            f"colocate rollout-serve: {host} is reached from other machines. A trainer there needs the key "
            f"in its environment variable {VARIABLE}. Nothing is encrypted: who reads the network reads "
            "prompts and completions, and can repeat what was asked; where that matters leave --host out and "
            "forward the port (ssh -L)",
            flush=True,
        )


def _read(path: Path) -> ServerKey | None:
    """The key in a file that only this user can write and read; None if there is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"The server's key in {path} cannot be read: {error.strerror}.") from error
    with open(descriptor) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(
                f"The server's key in {path} is not to be trusted: the file must be a plain one of this "
                f"user's (uid {os.geteuid()}) that nobody else can read (mode 0600); it is uid "
                f"{status.st_uid}'s, mode {stat.S_IMODE(status.st_mode):04o}. Delete it and start the server "
                "again."
            )
        return ServerKey(file.read(1000).strip(), str(path))
