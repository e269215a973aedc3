"""Stand-ins of libraries of environments: as much of their interfaces as an adapter meets, and one game each.

Sources: Farama-Foundation/Gymnasium `gymnasium/core.py`, `gymnasium/spaces/text.py`; NovaSky-AI/SkyRL
`skyrl-gym/skyrl_gym/envs/base_text_env.py`, `envs/registration.py`; TextArena/TextArena
`textarena/core.py`, `textarena/envs/registration.py`,
`textarena/wrappers/ObservationWrappers/llm_observation_wrapper.py`; meta-pytorch/OpenEnv
`src/openenv/core/{generic_client,sync_client,client_types}.py` and `env_server/types.py`.
"""

import base64
import hashlib
import json
import os
import socket
import struct
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit


def module(name, **contents):
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


class Guess:
    """The game in all of them: a number to guess in three turns, 1 for it and 0.1 for one too low."""

    def __init__(self, number):
        self.number, self.num_guesses = number, 0

    def play(self, text):
        guess = int(text)
        self.num_guesses += 1
        is_right = guess == self.number
        reward = 1.0 if is_right else 0.1 if guess < self.number else 0.0
        answer = "right" if is_right else "too low" if guess < self.number else "too high"
        return answer, reward, is_right, self.num_guesses >= 3


# --- Gymnasium ---------------------------------------------------------------------------------------------


class Text:
    def __init__(self, max_length, *, min_length=1, charset="0123456789"):
        self.min_length, self.max_length, self.character_set = min_length, max_length, frozenset(charset)

    def contains(self, x):
        return (
            isinstance(x, str)
            and self.min_length <= len(x) <= self.max_length
            and all(c in self.character_set for c in x)
        )

    def __repr__(self):
        return f"Text({self.min_length}, {self.max_length})"


class Discrete:
    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return f"Discrete({self.n})"


class GymnasiumGuess:
    def __init__(self, offset=0, action_space=None):
        self.offset = offset
        self.action_space = action_space or Text(2)
        self.observation_space = Text(100)

    def reset(self, *, seed=None, options=None):
        self.game = Guess((seed or 0) + self.offset)
        return "Guess.", {}

    def step(self, action):
        answer, reward, terminated, truncated = self.game.play(action)
        return answer, reward, terminated, truncated, {}


def gymnasium():
    return module(
        "gymnasium",
        make=lambda id, **kwargs: {"Guess-v0": GymnasiumGuess}[id](**kwargs),
        spaces=module("gymnasium.spaces", Text=Text, Discrete=Discrete),
    )


# --- SkyRL-gym ---------------------------------------------------------------------------------------------


class SkyRLGuess:
    num_open = 0

    def __init__(self, env_config, extras):
        self.game = Guess(extras["reward_spec"]["ground_truth"])
        self.max_turns = extras["max_turns"]
        self.opening = env_config.get("opening")
        SkyRLGuess.num_open += 1

    def init(self, prompt):
        return (prompt if self.opening is None else self.opening(prompt)), {}

    def step(self, action):
        answer, reward, is_right, _ = self.game.play(action)
        done = is_right or self.game.num_guesses >= self.max_turns
        observations = [] if done else [{"role": "user", "content": answer}]
        return {"observations": observations, "reward": reward, "done": done, "metadata": {}}

    def close(self):
        SkyRLGuess.num_open -= 1


def skyrl_gym():
    return module("skyrl_gym", make=lambda id, **kwargs: {"guess": SkyRLGuess}[id](**kwargs))


# --- TextArena ---------------------------------------------------------------------------------------------


class TextArenaGuess:
    """A game without wrappers: what is to be seen is a list of (sender, message, kind), each only once."""

    def reset(self, num_players, seed=None):
        assert num_players == 1
        self.game, self.rewards = Guess(seed or 0), None
        self.messages = [(-1, "Guess.", "PROMPT")]

    def step(self, action):
        answer, reward, is_right, is_last = self.game.play(action)
        self.messages += [(0, action, "PLAYER_ACTION"), (-1, answer, "GAME_MESSAGE")]
        if is_right or is_last:
            self.rewards = {0: reward}
        return self.rewards is not None, {}

    def get_observation(self):
        messages, self.messages = self.messages, []
        return 0, messages

    def close(self):
        return self.rewards, {0: {"turn_count": self.game.num_guesses}}


class LLMObservationWrapper:
    """The whole history as one text, which `reset` does not empty."""

    def __init__(self, env):
        self.env, self.full_observations = env, []

    def __getattr__(self, name):
        return getattr(self.env, name)

    def get_observation(self):
        player, messages = self.env.get_observation()
        self.full_observations.extend(messages)
        names = {-1: "GAME", 0: "Player 0"}
        return player, "".join(f"\n[{names[who]}] {message}" for who, message, _ in self.full_observations)


def textarena():
    games = {"Guess-v0": lambda: LLMObservationWrapper(TextArenaGuess()), "Guess-v0-raw": TextArenaGuess}
    return module("textarena", make=lambda env_id, **kwargs: games[env_id](**kwargs))


# --- OpenEnv: a server on this machine that speaks its protocol, and its client ----------------------------

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


def send_frame(stream, text, is_masked):
    data, mask = text.encode(), os.urandom(4) if is_masked else b""
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
    head = bytes([0x81, size[0] | (0x80 if is_masked else 0), *size[1:]])
    if is_masked:
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
    stream.write(head + mask + data)
    stream.flush()


def receive_frame(stream):
    head = stream.read(2)
    if len(head) < 2 or head[0] != 0x81:
        return None
    size = head[1] & 0x7F
    if size == 126:
        (size,) = struct.unpack(">H", stream.read(2))
    mask = stream.read(4) if head[1] & 0x80 else bytes(4)
    return bytes(byte ^ mask[i % 4] for i, byte in enumerate(stream.read(size))).decode()


class Session(BaseHTTPRequestHandler):
    """A WebSocket at /ws: one environment for as long as it is open."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        assert self.path == "/ws"
        accept = hashlib.sha1((self.headers["Sec-WebSocket-Key"] + GUID).encode()).digest()
        self.send_response(101)
        for name, value in {"Upgrade": "websocket", "Connection": "Upgrade"}.items():
            self.send_header(name, value)
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept).decode())
        self.end_headers()
        game = None
        while (text := receive_frame(self.rfile)) is not None:
            message = json.loads(text)
            try:
                if message["type"] == "reset":
                    game = Guess(message["data"].get("seed", 0))
                    data = {"observation": {"reply": "Guess."}, "reward": None, "done": False}
                else:
                    answer, reward, is_right, is_last = game.play(message["data"]["message"])
                    done = is_right or is_last
                    data = {"observation": {"reply": answer}, "reward": reward, "done": done}
                reply = {"type": "observation", "data": data}
            except ValueError as error:
                reply = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
            send_frame(self.wfile, json.dumps(reply), is_masked=False)
        self.close_connection = True

    def log_message(self, *args):
        pass


class OpenEnvServer:
    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Session)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False
    metadata: dict | None = None


class GenericEnvClient:
    def __init__(self, base_url=None):
        self._base_url = base_url

    def sync(self):
        return SyncEnvClient(self)


class SyncEnvClient:
    def __init__(self, async_client):
        self._address = urlsplit(async_client._base_url)
        self._stream = None

    def reset(self, **kwargs):
        return self._ask({"type": "reset", "data": kwargs})

    def step(self, action, **kwargs):
        return self._ask({"type": "step", "data": action if isinstance(action, dict) else vars(action)})

    def _ask(self, message):
        if self._stream is None:
            self._stream = socket.create_connection(
                (self._address.hostname, self._address.port), 10
            ).makefile("rwb")
            key = base64.b64encode(os.urandom(16)).decode()
            lines = [
                "GET /ws HTTP/1.1",
                f"Host: {self._address.netloc}",
                "Upgrade: websocket",
                "Connection: Upgrade",
                "Sec-WebSocket-Version: 13",
                f"Sec-WebSocket-Key: {key}",
            ]
            self._stream.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            self._stream.flush()
            while self._stream.readline().strip():
                pass
        send_frame(self._stream, json.dumps(message), is_masked=True)
        response = json.loads(receive_frame(self._stream))
        if response["type"] == "error":
            raise RuntimeError(f"Server error: {response['data']['message']}")
        data = response["data"]
        return StepResult(data["observation"], data.get("reward"), data.get("done", False))


def openenv():
    core = module("openenv.core", GenericEnvClient=GenericEnvClient)
    return module("openenv", core=core, __path__=[])
