"""Damaged adapters and models at every command that reads them, and PEFT's methods in every state.

A command with a damaged file ends with one message that names the file or its directory, and in no traceback.
A trainer with a PEFT method trains that method's parameters and nothing else, or refuses it by its name.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bad_cases import Case, judge
from safetensors.torch import load_file, save_file

import tiny
from colocate.cli import main
from tiny import make_config, make_model, make_tokenizer, make_trainer, train

SEED = 20_264
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

# ── Damages ──────────────────────────────────────────────────────────────────────────────────────────────

Damage = Callable[[Path, random.Random], None]


def with_bytes(name: str, change: Callable[[bytes, random.Random], bytes]) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        file = directory / name
        file.write_bytes(change(file.read_bytes(), rng))

    return damage


def with_json(name: str, **changes: Any) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        content = json.loads((directory / name).read_text()) | changes
        (directory / name).write_text(
            json.dumps({key: value for key, value in content.items() if value is not ...})
        )

    return damage


def with_tensors(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        tensors = change(load_file(directory / name))
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, directory / name, metadata={"format": "pt"}
        )

    return damage


def as_directory(name: str) -> Damage:
    def damage(directory: Path, rng: random.Random) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return damage


def without(name: str) -> Damage:
    return lambda directory, rng: (directory / name).unlink()


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_in_header(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(9, 40)]


def long_header(data: bytes, rng: random.Random) -> bytes:
    return struct.pack("<Q", 2 ** rng.randrange(30, 62)) + data[8:]


def flip_in_header(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(8, 60)] ^= 0x80
    return bytes(changed)


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda data, rng: b"",
    "cut": cut,
    "zeros": lambda data, rng: bytes(len(data)),
    "noise": lambda data, rng: rng.randbytes(len(data)),
    "text": lambda data, rng: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n",
}
OF_JSON: dict[str, Callable[[bytes, random.Random], bytes]] = {
    **BYTES,
    "list": lambda data, rng: b"[]",
    "number": lambda data, rng: b"3",
    "null": lambda data, rng: b"null",
    "deep": lambda data, rng: b"[" * 100_000,
    "latin": lambda data, rng: data + "é".encode("latin-1"),
    "comma": lambda data, rng: data.rstrip()[:-1] + b",}",
}
OF_TENSORS = {**BYTES, "cut header": cut_in_header, "long header": long_header, "flip": flip_in_header}

ADAPTER: dict[str, Damage] = {
    **{f"{CONFIG} {what}": with_bytes(CONFIG, change) for what, change in OF_JSON.items()},
    **{f"{WEIGHTS} {what}": with_bytes(WEIGHTS, change) for what, change in OF_TENSORS.items()},
    f"{CONFIG} directory": as_directory(CONFIG),
    f"{WEIGHTS} directory": as_directory(WEIGHTS),
    f"{WEIGHTS} missing": without(WEIGHTS),
    **{
        f"{CONFIG} {name}={value!r:.20}": with_json(CONFIG, **{name: value})
        for name, values in {
            "peft_type": (..., None, "NOPE", 3, [], "PREFIX_TUNING"),
            "r": (..., 0, -1, "8", None, 1.5, 3, [], 10**9),
            "lora_alpha": ("x", None, [], {}),
            "base_model_name_or_path": (..., None, 3, "nope", "/nowhere/at/all", ["a"]),
            "rank_pattern": ({"q_proj": 3}, {"q_proj": "x"}, {"q_proj": 0}, 3),
            "alpha_pattern": ({"q_proj": "x"}, 3),
            "use_dora": (True,),
        }.items()
        for value in values
    },
    **{
        f"{WEIGHTS} {what}": with_tensors(WEIGHTS, change)
        for what, change in {
            "no tensors": lambda t: {},
            "half": lambda t: {n: x for n, x in t.items() if "lora_A" in n},
            "one missing": lambda t: dict(list(t.items())[1:]),
            "other names": lambda t: {n.replace("layers", "blocks"): x for n, x in t.items()},
            "other layer": lambda t: {n.replace("layers.0", "layers.7"): x for n, x in t.items()},
            "other width": lambda t: {n: torch.cat([x, x], dim=-1) for n, x in t.items()},
            "other rank": lambda t: {n: torch.cat([x, x], dim=int("lora_B" in n)) for n, x in t.items()},
            "flat": lambda t: {n: x.flatten() for n, x in t.items()},
            "integers": lambda t: {n: x.to(torch.int32) + 1 for n, x in t.items()},
            "not finite": lambda t: {n: torch.full_like(x, math.nan) for n, x in t.items()},
            "infinite": lambda t: {n: torch.full_like(x, math.inf) for n, x in t.items()},
        }.items()
    },
}
"""A damage by its name; after each, nothing that the adapter could mean is there."""
MODEL: dict[str, Damage] = {
    **{f"config.json {what}": with_bytes("config.json", change) for what, change in OF_JSON.items()},
    **{f"model.safetensors {what}": with_bytes("model.safetensors", c) for what, c in OF_TENSORS.items()},
    "model.safetensors missing": without("model.safetensors"),
    "model.safetensors directory": as_directory("model.safetensors"),
    **{f"tokenizer.json {what}": with_bytes("tokenizer.json", change) for what, change in OF_JSON.items()},
    "config.json vocab_size": with_json("config.json", vocab_size=11),
    "config.json hidden_size": with_json("config.json", hidden_size=64),
    "config.json model_type": with_json("config.json", model_type="nope"),
    "config.json no model_type": with_json("config.json", model_type=..., architectures=...),
    "config.json num_hidden_layers": with_json("config.json", num_hidden_layers=3),
    "config.json heads": with_json("config.json", num_attention_heads=0),
    "config.json text": with_json("config.json", hidden_size="32"),
    "config.json dtype": with_json("config.json", dtype="float13", torch_dtype="float13"),
    "model.safetensors one missing": with_tensors("model.safetensors", lambda t: dict(list(t.items())[1:])),
    "model.safetensors flat": with_tensors(
        "model.safetensors", lambda t: {n: x.flatten() for n, x in t.items()}
    ),
}

MEANINGLESS = (
    *(f"config.json {what}" for what in ("vocab_size", "hidden_size", "model_type", "no model_type", "text")),
    *(f"config.json {what}" for what in ("num_hidden_layers", "heads", "dtype")),
    *("model.safetensors one missing", "model.safetensors flat"),
)
"""Damages that leave every file readable: `export` copies files, and builds no model."""

# ── Commands ─────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(directory: Path) -> Path:
    file = directory.parent / "rows.jsonl"
    if not file.exists():
        file.write_text('{"prompt": "1 + 2 ="}\n' * 4)
    return file


def words(command: str, directory: Path, out: Path) -> list[str]:
    rows = str(lines_of(directory))
    return {
        "merge": ["merge", str(directory), str(out)],
        "export": ["export", str(directory), str(out)],
        "chat": ["chat", str(directory), "--max_tokens", "2", "--max_context", "64", "--use_cpu"],
        "eval": [
            *("eval", str(directory), "--dataset", rows, "--reward_funcs", "think_format_reward"),
            *("--max_tokens", "2", "--use_cpu"),
        ],
        "train": [
            *("train", "--model_name_or_path", str(directory), "--dataset_name", rows, "--use_cpu"),
            *("--reward_funcs", "think_format_reward", "--output_dir", str(out), "--max_steps", "1"),
            *("--num_generations", "2", "--per_device_train_batch_size", "2", "--report_to", "none"),
            *("--max_completion_length", "2", "--save_strategy", "no"),
        ],
    }[command]


def ended(arguments: list[str], monkeypatch: Any, capsys: Any) -> str:
    """What a command printed that ended well.

    Raises:
        ValueError: it ended with one message, which is this error's.
        RuntimeError: it ended with a traceback.
    """
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 2 =\n"))
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as error:
        raise RuntimeError(f"not an option: {capsys.readouterr().err}") from error
    printed = capsys.readouterr()
    if "Traceback" in printed.err:
        raise RuntimeError(printed.err)
    if code:
        raise ValueError(printed.err)
    return printed.out


def damaged(source: Path, to: Path, damage: Damage, rng: random.Random) -> Path:
    shutil.copytree(source, to)
    damage(to, rng)
    return to


def command_cases(
    sources: dict[str, Path], tmp_path: Path, rng: random.Random, run: Callable
) -> Iterator[Case]:
    numbers = itertools.count()
    for kind, damages, commands in (
        ("adapter", ADAPTER, ("merge", "chat", "eval", "train")),
        ("model", MODEL, ("chat", "eval", "export", "train")),
    ):
        for (what, damage), command in itertools.product(damages.items(), commands):

            def do(kind: str = kind, damage: Damage = damage, command: str = command) -> str:
                number = next(numbers)
                directory = damaged(sources[kind], tmp_path / f"{kind}-{number}", damage, rng)
                return run(words(command, directory, tmp_path / f"out-{number}"))

            yield Case(
                f"damaged {kind}, {command}",
                what,
                do,
                (f"{kind}-|{what.partition(' ')[0]}",),
                must_fail=not (command == "export" and what in MEANINGLESS),
                accepts=lambda _: True,
                errors=(ValueError,),
                longest_error=3000,
            )


# ── PEFT's methods ───────────────────────────────────────────────────────────────────────────────────────

OPTIONS: dict[str, dict[str, Any]] = {
    "LORA": dict(r=2),
    "RANDLORA": dict(r=2, projection_prng_key=1),
    "FOURIERFT": dict(n_frequency=8),
    "C3A": dict(block_size=8),
    "BOFT": dict(boft_block_size=4),
    "OFT": dict(oft_block_size=4, r=0),
    "MISS": dict(r=2),
    "WAVEFT": dict(n_frequency=8),
    "IA3": dict(feedforward_modules=[]),
    "SHIRA": dict(r=2),
    "ROAD": dict(group_size=8),
    "VBLORA": dict(vector_length=8, num_vectors=16, topk=2),
}
STATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL": dict(beta=0.1),
    "two updates": dict(num_iterations=2),
    "8 bits of Adam": dict(optim="adamw_8bit"),
}


def peft_config(name: str) -> Any:
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, name)]
    targets = dict(target_modules=["q_proj", "o_proj"])
    for options in ({**targets, **OPTIONS.get(name, {})}, OPTIONS.get(name, {})):
        try:
            return kind(task_type="CAUSAL_LM", **options)
        except TypeError:
            continue
    return kind(task_type="CAUSAL_LM", num_virtual_tokens=2)


def trained(name: str, options: dict[str, Any], directory: Path, is_wrapped: bool) -> dict[str, Any]:
    """What one run of a method has changed, and its first KL."""
    model: Any = make_model()
    config = peft_config(name)
    arguments: dict[str, Any] = dict(peft_config=config)
    if is_wrapped:
        try:
            model, arguments = peft.get_peft_model(model, config), {}
        except Exception as error:
            raise ValueError(f"PEFT itself: {error}") from error
    trainer = make_trainer(directory, model=model, **arguments, **options)
    before = {n for n, p in trainer.model.named_parameters() if not p.requires_grad}
    changed = train(trainer)
    frozen = {name for name in changed if name in before}
    return dict(
        changed=changed,
        frozen=frozen,
        kl=tiny.logged(trainer, "kl")[:1],
        norms=tiny.logged(trainer, "grad_norm"),
    )


def is_trained(found: Any) -> bool:
    return (
        bool(found["changed"])
        and not found["frozen"]
        and all(abs(kl) < 1e-5 for kl in found["kl"])
        and all(math.isfinite(norm) for norm in found["norms"])
        and max(found["norms"]) > 0
    )


def method_cases(tmp_path: Path) -> Iterator[Case]:
    numbers = itertools.count()
    for name in sorted(peft.PEFT_TYPE_TO_CONFIG_MAPPING, key=str):
        method = name.value if hasattr(name, "value") else str(name)
        for (state, options), is_wrapped in itertools.product(STATES.items(), (False, True)):

            def do(method: str = method, options: Any = options, is_wrapped: bool = is_wrapped) -> Any:
                return trained(method, options, tmp_path / f"method-{next(numbers)}", is_wrapped)

            yield Case(
                f"PEFT method, {state}",
                f"{method}{' wrapped' if is_wrapped else ''}",
                do,
                (f"{method}|{type_name(method)}|PEFT|AdaLoRA|scikit-learn",),
                is_trained,
                errors=(ValueError, ImportError),
            )


@functools.cache
def type_name(method: str) -> str:
    return peft.PEFT_TYPE_TO_CONFIG_MAPPING[getattr(peft.PeftType, method)].__name__


LORA_VALUES: dict[str, tuple[Any, ...]] = {
    "lora_r": (0, -1, 1.5, "x", "nan"),
    "lora_alpha": (-1, "x", "nan", "inf", 1.5),
    "lora_dropout": (-0.1, 1, 1.5, "x", "nan"),
    "lora_target_modules": ("nope", "q_proj,nope", "", "[3]"),
    "lora_task_type": ("NOPE", "SEQ_CLS"),
    "lora_modules_to_save": ("nope", "[3]"),
}


def lora_cases(sources: dict[str, Path], tmp_path: Path, run: Callable) -> Iterator[Case]:
    numbers = itertools.count()
    for name, values in LORA_VALUES.items():
        for value in values:

            def do(name: str = name, value: Any = value) -> str:
                out = tmp_path / f"lora-{next(numbers)}"
                arguments = words("train", sources["model"], out)
                return run([*arguments, "--use_peft", f"--{name}", str(value)])

            yield Case("LoRA's options", f"{name}={value}", do, (name,), must_fail=True, errors=(ValueError,))


# ── The tests ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """A model, and an adapter on it."""
    directory = tmp_path_factory.mktemp("sources")
    make_model().save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    base = type(make_model()).from_pretrained(directory / "model")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(directory / "adapter")
    make_tokenizer().save_pretrained(directory / "adapter")
    assert make_config(directory / "out")
    return {"model": directory / "model", "adapter": directory / "adapter"}


def run_cases(
    seed: int, share: float, sources: dict[str, Path], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    rng = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    run = functools.partial(ended, monkeypatch=monkeypatch, capsys=capsys)
    drawn = [*command_cases(sources, tmp_path, rng, run), *method_cases(tmp_path)]
    drawn += lora_cases(sources, tmp_path, run)
    drawn = rng.sample(drawn, int(share * len(drawn)))
    total, report = judge(drawn, f"Adapters and models, seed {seed}", capsys)
    assert total["wrong"] == total["hang"] == total["raw"] == 0, report


def test_adapters_and_models_drawn(sources, tmp_path, monkeypatch, capsys):
    run_cases(SEED, 0.03, sources, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_all_adapters_and_models(sources, tmp_path, monkeypatch, capsys):
    run_cases(random.randrange(10**6), 1.0, sources, tmp_path, monkeypatch, capsys)
