"""What strangers on the machine ask of a vLLM server, also as another user. On the standard library alone.

python hostile_client.py PORT    prints [[name, status, answer], ...] as JSON
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from typing import Any

NOBODY = 65534

STATE = json.dumps({"do": "state", "run": {"id": "stranger"}, "nonce": "1"})
FINISH = json.dumps({"do": "finish", "push": "any", "version": "any", "num_chunks": 0})
READ = json.dumps({"do": "read_file", "path": "/etc/shadow"})
JOIN = json.dumps({"do": "join_group", "host": "127.0.0.1", "port": 9, "size": 2, "timeout_s": 1e6})

JSON_ROUTES = (
    [("GET", path) for path in ("/version", "/v1/models", "/metrics", "/server_info", "/is_paused", "/docs")]
    + [("GET", "/openapi.json"), ("GET", "/weight_info"), ("HEAD", "/health"), ("OPTIONS", "/collective_rpc")]
    + [("POST", path) for path in ("/pause?mode=keep", "/resume", "/sleep?level=2", "/wake_up", "/tokenize")]
    + [("POST", path) for path in ("/reset_prefix_cache", "/reset_mm_cache", "/update_weights", "/health")]
    + [("POST", path) for path in ("/init_weight_transfer_engine", "/inference/v1/generate")]
    + [("POST", path) for path in ("//pause", "/v1/../pause", "/%70ause", "/v1/load_lora_adapter")]
    + [("POST", "/abort_requests")]
)

LIMITS = {"max_tokens": 1, "n": 1, "temperature": 0, "stop_token_ids": []}
POISON = {"model": "served", "prompt": [10**6], **LIMITS}


def rpc(*args: str, method: str = "colocate_receive") -> dict[str, Any]:
    return {"method": method, "args": args, "timeout": 5}


def attacks() -> dict[str, tuple[str, str, dict[str, str], Any]]:
    """By name: method, path, headers, body."""
    page = {"Origin": "http://evil.example", "Host": "evil.example", "Content-Type": "text/plain"}
    return {
        **{
            f"{method} {path}": (method, path, {}, None if method != "POST" else {})
            for method, path in JSON_ROUTES
        },
        "read a file": ("POST", "/collective_rpc", {}, rpc(READ)),
        "which weights": ("POST", "/collective_rpc", {}, rpc(STATE, "0" * 64)),
        "other weights": ("POST", "/collective_rpc", {}, rpc(FINISH, "")),
        "a connection elsewhere": ("POST", "/collective_rpc", {}, rpc(JOIN, "x")),
        "another method of the worker": ("POST", "/collective_rpc", {}, rpc(method="sleep")),
        "a token id that ends the engine": ("POST", "/v1/completions", {}, POISON),
        "a wrong key": ("POST", "/v1/completions", {"Authorization": "Bearer " + "0" * 43}, POISON),
        "no ASCII": ("GET", "/version", {"Authorization": "Bearer \xe9\xff"}, None),
        "a wrong signature": ("GET", "/version", {"Authorization": f"Colocate {'0' * 64}:{'0' * 64}"}, None),
        "a made-up address": ("GET", "/version", {"X-Forwarded-For": "8.8.8.8"}, None),
        "a web page": ("POST", "/collective_rpc", page, rpc(STATE)),
        "a web page about health": ("GET", "/health", page, None),
        "a large body": ("POST", "/v1/completions", {"Content-Length": str(10**10)}, None),
    }


def ask(port: int, method: str, path: str, headers: dict[str, str], body: Any) -> tuple[int, str]:
    """Status and text of an answer; 0 and the error where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    content = None if body is None else json.dumps(body).encode()
    defaults = {} if content is None else {"Content-Type": "application/json"}
    try:
        connection.request(method, path, content, {**defaults, **headers})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError as error:
        return 0, repr(error)
    finally:
        connection.close()


def attack(port: int) -> dict[str, tuple[int, str]]:
    """Everything, from this process."""
    return {name: ask(port, *request) for name, request in attacks().items()}


def attack_as_nobody(port: int) -> dict[str, tuple[int, str]]:
    """Everything, from a process of another user if this one's may become it."""
    environment = {name: value for name, value in os.environ.items() if name != "COLOCATE_SERVER_KEY"}
    command = [sys.executable, "-I", "-S", __file__, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: tuple(answer) for name, answer in json.loads(done.stdout).items()}


def become_nobody() -> None:
    "127.0.0.1".encode("idna")  # loads what that user may not be allowed to read
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


if __name__ == "__main__":
    become_nobody()
    print(json.dumps(attack(int(sys.argv[1]))))
