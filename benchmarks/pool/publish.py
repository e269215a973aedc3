"""New weights for rollout servers, again and again, each time followed by a greedy match; one of several is
killed in the middle of a publication, and is started again.

    python -m benchmarks.pool.publish --size 7b --model-dir DIRECTORY --out RECORD.json
    python -m benchmarks.pool.publish --engine native --out RECORD.json

Each of two GPUs has a server, of vLLM or of the native engine. The trainer is on the first one. It takes
turns with servers of vLLM; native ones stay awake, as one GPU has room for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks.common.random_model import config_of
from benchmarks.common.results import Record, origin
from benchmarks.rollout.cases import model_directory
from colocate.http.key import VARIABLE
from colocate.parallel.launching import free_port
from colocate.rollout_server.trainer.client import HttpClient
from colocate.rollout_server.trainer.engine import RolloutServerEngine
from colocate.rollout_server.trainer.pool import EnginePool
from colocate.rollout_server.trainer.transports import IpcTransport, NcclTransport
from colocate.rollout_server.trainer.watch import timeouts_among
from colocate.rollout_server.trainer.weight_push import WeightPusher
from colocate.types import Completion, Prompt, SamplingParams
from colocate.weights.layouts import WHOLE
from colocate.weights.weight_parts import random_parts

GREEDY = SamplingParams(max_tokens=16, temperature=0)
MOST_SHORTFALL = 0.5
"""How far, in logits, a token that a server in bf16 takes greedily may lie below the largest logit that the
same weights give in float32."""
START_S = 600.0

BETWEEN_GPUS = (IpcTransport, NcclTransport)
"""Transports whose buffers are on GPUs at both ends. What any other one sends was in the host's memory."""

Change = Callable[[int], None]
"""Changes the model's weights in place, for a publication of this number."""
Shortfall = Callable[[Sequence[Completion]], float]
"""The most by which tokens that were taken greedily miss the largest logit of the model's present weights."""


@dataclass
class Pushes:
    """What each server was sent: seconds; and for each push, in their order, the class of its transport, its
    bytes, and those of them that went through the host."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    transports: list[str] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    @contextmanager
    def timed(self) -> Iterator[None]:
        push = WeightPusher._push

        def timed(pusher: WeightPusher, *arguments: Any) -> int:
            begin_s = time.perf_counter()
            sent_bytes = push(pusher, *arguments)
            self.seconds.setdefault(pusher.client.base_url, []).append(time.perf_counter() - begin_s)
            transport = pusher._transport
            self.transports.append(type(transport).__name__)
            self.num_bytes.append(sent_bytes)
            self.host_bytes.append(0 if isinstance(transport, BETWEEN_GPUS) else sent_bytes)
            return sent_bytes

        with mock.patch.object(WeightPusher, "_push", timed):
            yield


@contextmanager
def killed_within_a_push(url: str, kill: Callable[[], None]) -> Iterator[list[int]]:
    """Kills the server at `url` when its second chunk of weights is under way; yields the chunks so far."""
    start, killed_at = HttpClient.submit_message, []

    def start_or_kill(client: HttpClient, do: str, **arguments: Any) -> Any:
        is_its_second = do == "receive_chunk" and arguments["chunk"] == 1
        if is_its_second and client.base_url == url and not killed_at:
            killed_at.append(arguments["chunk"])
            kill()
        return start(client, do, **arguments)

    with mock.patch.object(HttpClient, "submit_message", start_or_kill):
        yield killed_at


def measure(
    pool: EnginePool,
    model: Any,
    prompts: Sequence[Prompt],
    change: Change,
    shortfall: Shortfall,
    *,
    num_publications: int,
    kill: Callable[[], None],
    start_again: Callable[[], None],
) -> Record:
    """Publications and what the servers then answer. In the middle one the last server is killed, if there
    are several.

    Args:
        kill, start_again: end the last server at once, and start it at its old address.
    """
    pushes = Pushes()
    rows: list[Record] = []
    loss: Record = {}
    last = pool._members[-1]
    fatal = num_publications // 2 if len(pool._members) > 1 else None
    with pushes.timed(), ExitStack() as fault:
        seen = {member.replica.name: _answers(member, prompts) for member in pool._members}
        for number in range(num_publications):
            change(number)
            stale = {name: shortfall(completions) for name, completions in seen.items()}
            if number == fatal:
                killed_at = fault.enter_context(killed_within_a_push(last.replica.name, kill))
            wall_s = _publish(pool, model, number + 1)
            present = pool._present
            seen = {member.replica.name: _answers(member, prompts) for member in present}
            now = {name: shortfall(completions) for name, completions in seen.items()}
            rows.append({"wall_s": wall_s, "stale": stale, "shortfall": now, "num_servers": len(present)})
            print(rows[-1], file=sys.stderr, flush=True)  # a run that is cut short leaves its log
            if number == fatal:
                assert killed_at, "the push had one chunk alone"
                begin_s = time.perf_counter()
                start_again()
                _await_all(pool, prompts)
                seen = {member.replica.name: _answers(member, prompts) for member in pool._present}
                loss = {
                    "killed_at_chunk": killed_at[0],
                    "back_s": time.perf_counter() - begin_s,
                    "shortfall": {name: shortfall(completions) for name, completions in seen.items()},
                }
    return {
        "publications": rows,
        "loss": loss,
        "pushes": vars(pushes),
        "takes_turns": last.replica.takes_turns,
    }


def _publish(pool: EnginePool, model: Any, version: int) -> float:
    """Seconds until all servers have the model's weights, with the turns that colocated ones take."""
    pool.sleep()
    begin_s = time.perf_counter()
    pool.update_weights(version)
    pool.wake_up()
    return time.perf_counter() - begin_s


def _answers(member: Any, prompts: Sequence[Prompt]) -> list[Completion]:
    return list(member.replica.generate(prompts, GREEDY))


def _await_all(pool: EnginePool, prompts: Sequence[Prompt]) -> None:
    deadline_s = time.monotonic() + START_S
    while len(pool._present) < len(pool._members):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"A server that was started again was not back within {START_S:g} s.")
        pool.generate(prompts, GREEDY)
        time.sleep(0.2)


class Server:
    """`colocate rollout-serve` at one address, which can be killed with its processes and started again."""

    def __init__(self, directory: Path, engine: str, gpus: str, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        words = ["-m", "colocate", "rollout-serve", str(directory), "--engine", engine]
        words += ["--port", str(self.port), *(["--", "--load-format", "dummy"] if engine == "vllm" else [])]
        self._command = [sys.executable, *words, *options]
        sizes = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._environment = os.environ | sizes | {"CUDA_VISIBLE_DEVICES": gpus}
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        processes = [*psutil.Process(self._process.pid).children(recursive=True), self._process]
        for process in processes:
            process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="7b")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--num-publications", type=int, default=50)
    parser.add_argument(
        "--gpus", nargs="+", default=["0,1", "1,0"], help="CUDA_VISIBLE_DEVICES of each server"
    )
    parser.add_argument("--engine", choices=["native", "vllm"], default="vllm", help="of each server")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try it on a CPU")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault(VARIABLE, "the-key-of-a-benchmarks-servers")
    on_gpu = torch.cuda.is_available()
    directory, model = load(options)
    prompts = [Prompt(tuple(range(4, 4 + length)), key) for key, length in enumerate((3, 17, 40))]
    size = ["--dtype", "bfloat16" if on_gpu else "float32", "--max-model-len", "128"]
    if options.engine == "vllm":
        size.append("--enforce-eager")
        size += ["--enable-sleep-mode", "--gpu-memory-utilization", "0.4"] if on_gpu else []
    elif not on_gpu:
        size.append("--use_cpu")
    with ExitStack() as stack:
        servers = []
        for number, gpus in enumerate(options.gpus):
            log = options.out.with_suffix(f".server-{number}.log")
            servers.append(Server(directory, options.engine, gpus, log, *size))
            stack.callback(servers[-1].kill)
        pool = EnginePool(
            [
                RolloutServerEngine(
                    model,
                    base_url=server.url,
                    run_id="run",
                    server_timeout_s=START_S,
                    timeouts=timeouts_among(len(servers)),
                    **({} if on_gpu else {"bucket_bytes": 2**16}),
                )
                for server in servers
            ],
            on_loss="wait",
            timeout_s=START_S,
        )
        stack.callback(pool.close)
        pool.wake_up()
        record: Record = {
            "kind": "publish",
            "size": options.size,
            "engine": options.engine,
            **origin(),
        } | measure(
            pool,
            model,
            prompts,
            lambda number: redraw(model, number),
            lambda completions: shortfall_of(model, prompts, completions),
            num_publications=options.num_publications,
            kill=servers[-1].kill,
            start_again=servers[-1].start,
        )
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def load(options: argparse.Namespace) -> tuple[Path, Any]:
    """The directory of a model of random weights, and the model on the first GPU."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if options.tiny:
        directory = options.out.parent / "tiny-model"
        config = Qwen3Config(
            vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        model.save_pretrained(directory)
        return directory, model
    if options.engine == "native":  # which needs no weights on the disk, as the trainer draws its own
        config, device = config_of(options.size), "cuda" if torch.cuda.is_available() else "cpu"
        directory = options.model_dir / f"qwen2.5-{options.size}-config"
        config.save_pretrained(directory)
        return directory, random_parts(config, WHOLE, device=device, dtype=torch.bfloat16)
    directory = model_directory(options.model_dir, options.size)
    return directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda()


@torch.no_grad()
def redraw(model: Any, seed: int) -> None:
    """Draw all matrices anew, so that the last weights' greedy tokens are not those of the present ones."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    # With embeddings of four times the usual width and a head of twice, logits differ by some units. Layers
    # that were as wide as the embeddings would amplify each other's rounding: in bfloat16 greedy tokens of 7B
    # then lay 0.6 to 1.5 below the largest logit; so they lie at most 0.4 below it.
    narrow = model.config.hidden_size**-0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            wide = 2 if "lm_head" in name else 4
            deviation = narrow if ".layers." in name else min(wide * narrow, 0.25)
            parameter.normal_(0, deviation, generator=generator)


@torch.no_grad()
def shortfall_of(model: Any, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> float:
    """See `Shortfall`. Computed in float32: in bfloat16 logits of 16 to 32 are 0.125 apart, and the trainer
    would add a rounding of its own to the server's."""
    worst = 0.0
    with in_float32(model):
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device=model.device)
            logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1]
            assert logits.dtype == torch.float32
            taken = logits.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]
            worst = max(worst, float((logits.max(-1).values - taken).max()))
    return worst


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Within, the model computes in float32, each module from a copy of its weights that it gives back, as
    there is no room for all of them beside a server. The weights themselves stay where servers read them."""
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def give_back(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.callback(module.register_forward_pre_hook(widen).remove)
                hooks.callback(module.register_forward_hook(give_back).remove)
        yield


if __name__ == "__main__":
    main()
