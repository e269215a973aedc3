"""Bad inputs drawn anew: each ends in a clear error before any work, or means what TRL says it means.

What an input may end in is decided by the tables here, which are TRL's and transformers' documentation in
numbers, and never by asking colocate. `bad_cases.py` says what the outcomes are.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from bad_cases import Case, judge
from small_runs import make_config, make_dataset, make_model, make_tokenizer, share_of_early_letters
from transformers import TrainerCallback

from colocate import GRPOConfig, GRPOTrainer
from colocate.cli import main
from colocate.data import mixture
from colocate.options.declared import choices_of, ranges_of
from colocate.options.names import ALIASES
from colocate.options.requirements import Requirement

SEED = 20_261

# ── What numbers mean ────────────────────────────────────────────────────────────────────────────────────


def whole(low: float, high: float = 2**63) -> Callable[[float], bool]:
    return lambda v: math.isfinite(v) and v == int(v) and low <= v < high


def real(low: float, high: float = math.inf, *, above: bool = False, below: bool = True) -> Callable:
    """From `low` (itself not, if `above`) to `high` (itself not, if `below`)."""
    return lambda v: (v > low if above else v >= low) and (v < high if below else v <= high)


def steps(v: float) -> bool:
    return real(0, 1, above=True)(v) or whole(1)(v)


DOMAINS: dict[str, Callable[[float], bool]] = {}
for names, domain in (
    (
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
        "generation_batch_size steps_per_generation num_generations_eval max_prompt_length "
        "max_completion_length page_size kv_cache_tokens vllm_max_model_length "
        "vllm_max_model_len max_tokens_per_microbatch logprob_chunk_size max_skipped_steps "
        "ref_model_sync_steps vllm_tensor_parallel_size ddp_timeout",
        whole(1, 2**31),
    ),
    ("num_iterations max_num_seqs", whole(1, 2**20 + 1)),
    ("num_generations", whole(2)),
    ("max_steps", whole(-1)),  # -1, and as transformers has it 0, leave it to num_train_epochs
    ("save_total_limit", whole(-(2**63))),  # transformers: 0 and below keep all
    ("num_completions_to_print data_seed max_tool_calling_iterations max_refill_rounds", whole(0)),
    ("max_policy_lag", whole(0)),
    ("tool_workers", whole(0, 1025)),
    ("top_k", whole(-1)),  # transformers: 0 keeps all; vLLM: -1
    ("seed", whole(0, 2**32)),
    ("rollout_server_port vllm_server_port vllm_group_port agent_port", whole(1, 65536)),
    ("learning_rate weight_decay eval_delay beta epsilon epsilon_high router_aux_loss_coef", real(0)),
    ("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", real(0)),
    ("vespo_k_pos vespo_k_neg", real(0)),
    ("entropy_coef max_grad_norm", real(-math.inf)),
    ("num_train_epochs temperature repetition_penalty adam_epsilon", real(0, above=True)),
    ("rollout_server_timeout vllm_server_timeout", real(0, above=True)),
    ("sapo_temperature_pos sapo_temperature_neg vespo_lambda_pos vespo_lambda_neg", real(0, above=True)),
    ("off_policy_mask_threshold", real(0, above=True)),
    ("reward_timeout_s tool_timeout_s agent_timeout_s", real(0, 1e9, above=True, below=False)),
    ("adam_beta1 adam_beta2 warmup_ratio", real(0, 1)),
    ("warmup_steps", lambda v: v == 0 or steps(v)),
    ("logging_steps eval_steps save_steps", steps),
    ("top_p vllm_gpu_memory_utilization", real(0, 1, above=True, below=False)),
    ("min_p top_entropy_quantile ref_model_mixup_alpha", real(0, 1, below=False)),
    ("vllm_importance_sampling_clip_min", real(0, 1, below=False)),
    ("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", real(1)),
    ("delta", real(1.2, above=True)),
    ("shard", (1, 2, 4, 8).__contains__),
    ("decode_shard", (1,).__contains__),  # one process has one part of the weights
):
    DOMAINS.update(dict.fromkeys(names.split(), domain))

UNREAD = (
    *("dataloader_num_workers", "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "eval_accumulation_steps"),
    *("local_rank", "torch_empty_cache_steps", "max_tool_calling_iterations", "pad_to_multiple_of"),
)
"""Any number will do, as one line says that nothing reads it."""

REFUSED = ("label_smoothing_factor", "neftune_noise_alpha")
"""Only 0 asks for what happens here."""

UNBOUNDED = (
    *("max_grad_norm", "epsilon_high"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
)
"""Upper bounds that infinity takes away."""

DERIVED = ("steps_per_generation", "generation_batch_size", "eval_steps", "pad_to_multiple_of")
"""What a configuration may replace after it has read it."""

THEIRS = typing.get_type_hints(trl.GRPOConfig)
TYPES = {**typing.get_type_hints(GRPOConfig), **THEIRS}


def as_declared(name: str, requirement: Requirement) -> Callable[[float], bool]:
    is_whole = float not in (TYPES[name], *typing.get_args(TYPES[name]))
    return lambda v: (whole if is_whole else real)(-math.inf)(v) and requirement.holds(v)


for name, requirement in ranges_of(GRPOConfig).items():
    if name not in THEIRS:  # what an option of our own means is what it is declared to mean
        DOMAINS.setdefault(name, as_declared(name, requirement))
ALSO_NONE = ("vllm_gpu_memory_utilization", "top_k", "top_p")
"""Options that TRL declares as numbers: None is the default here, and generate's word for all tokens."""


def takes_none(name: str) -> bool:
    return name in ALSO_NONE or type(None) in typing.get_args(TYPES[name])


VALUES = (math.nan, math.inf, -math.inf, -1, 0, 1, 1.5, 1e30, 10**400, 2**31, "abc", "", [1, 2], None, True)


def is_legitimate(name: str, value: Any) -> bool:
    if value is None:
        return takes_none(name)
    if isinstance(value, (bool, str, list)) or value != value:
        return False
    if value == math.inf:
        return name in UNBOUNDED
    if abs(value) >= 2**63:  # more steps, tokens or seconds than anything has
        return False
    return name in UNREAD or (value == 0 if name in REFUSED else DOMAINS[name](value))


def spellings(value: Any) -> str:
    """How an error may show the value."""
    if isinstance(value, int) and value > 2**64:
        return "large"
    if isinstance(value, list):
        return "[1, 2]|['1', '2']"
    return f"{value!r}|{str(value).lower()}"


# ── Options ──────────────────────────────────────────────────────────────────────────────────────────────


class CommandLine:
    """`colocate train` with a trainer that trains nothing; a failed command raises what it printed."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        self.directory, self.capsys = directory, capsys
        self.given: dict[str, Any] = {}
        command_line = self

        class Trainer:
            def __init__(self, **arguments: Any) -> None:
                command_line.given = arguments

            def train(self, resume_from_checkpoint: Any) -> None:
                pass

            def save_model(self, path: Any) -> None:
                pass

        module = types.ModuleType("colocate.trainer")
        module.GRPOTrainer = Trainer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "colocate.trainer", module)
        monkeypatch.setattr(mixture, "load_prompts", functools.cache(mixture.load_prompts))

    def __call__(self, *arguments: str) -> GRPOConfig:
        self.capsys.readouterr()
        code = main(["train", *arguments])
        printed = self.capsys.readouterr().err
        assert "Traceback" not in printed
        if code:
            raise ValueError(printed)
        return self.given["args"]

    def complete(self, *, dataset: Path | None = None) -> list[str]:
        rows = self.directory / "rows.jsonl"
        if not rows.exists():
            rows.write_text(json.dumps({"prompt": "abc"}) + "\n")
        return [
            *("--model_name_or_path", "m", "--dataset_name", str(dataset or rows), "--use_cpu"),
            *("--reward_funcs", "think_format_reward", "--output_dir", str(self.directory / "out")),
        ]


def as_arguments(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(one) for one in value]
    return [] if value is True else ["1" + "0" * 400 if value == 10**400 else str(value).lower()]


def has_value(name: str, value: Any) -> Callable[[Any], bool]:
    def holds(config: Any) -> bool:
        if not is_legitimate(name, value):
            return False
        if value is None or name in DERIVED or name in UNREAD:
            return True
        return getattr(config, ALIASES.get(name, name)) == value

    return holds


def number_cases(directory: Path, command_line: CommandLine) -> Iterator[Case]:
    for name in (*DOMAINS, *UNREAD, *REFUSED):
        for value in VALUES:
            must_name = (f"{name}|{ALIASES.get(name, name)}", spellings(value))
            yield Case(
                "number, Python",
                f"{name}={str(value)[:20]!r}",
                lambda name=name, value=value: GRPOConfig(
                    output_dir=str(directory), use_cpu=True, **{name: value}
                ),
                must_name,
                has_value(name, value),
            )
            if str(value).lower() in choices_of(GRPOConfig).get(name, ()):  # the word "none"
                continue
            yield Case(
                "number, command line",
                f"--{name} {str(value)[:20]}",
                lambda name=name, value=value: command_line(
                    *command_line.complete(), f"--{name}", *as_arguments(value)
                ),
                must_name,
                has_value(name, value),
            )


WRONG_TYPES = (object(), b"bytes", [object()], {1: [2]}, {3}, 1j, print)


def type_cases(directory: Path) -> Iterator[Case]:
    for field in fields(GRPOConfig):
        takes_mapping = "dict" in str(TYPES[field.name])
        for value in WRONG_TYPES:
            if isinstance(value, dict) and takes_mapping:
                continue  # what is in it is for its reader to judge
            yield Case(
                "type, Python",
                f"{field.name}={value!r:.30}",
                lambda name=field.name, value=value: GRPOConfig(
                    **({"output_dir": str(directory), "use_cpu": True} | {name: value})
                ),
                (field.name,),
                must_fail=True,
            )


def flag_cases(directory: Path, command_line: CommandLine) -> Iterator[Case]:
    for name, hint in TYPES.items():
        if hint is not bool or name not in GRPOConfig.__dataclass_fields__:
            continue
        for text in ("maybe", "2", "1.5", "[true]", ""):
            yield Case(
                "flag, command line",
                f"--{name} {text!r}",
                lambda name=name, text=text: command_line(*command_line.complete(), f"--{name}", text),
                (name, repr(text)),
                must_fail=True,
            )


# ── Run files ────────────────────────────────────────────────────────────────────────────────────────────

GOOD_LINES = ("learning_rate: 1e-6", "seed: 7", "loss_type: grpo", "num_generations: 4", "beta: 0.1")


def yaml_texts(rng: random.Random) -> Iterator[tuple[str, bytes, tuple[str, ...]]]:
    """What is wrong, a text that has it, and what an error names."""
    lines = rng.sample(GOOD_LINES, 3)
    key = lines[0].partition(":")[0]
    at = rng.randrange(1, 4)
    doubled = [*lines[:at], f"{key}: {rng.random():.3f}", *lines[at:]]
    yield "double key", "\n".join(doubled).encode(), (key, "line 1", f"line {at + 1}")
    yield (
        "double nested key",
        "\n".join([*lines, "dataset_options:", "  size: 1", "  size: 2"]).encode(),
        ("size", "line 5", "line 6"),
    )
    cut = rng.randrange(1, len(key))
    yield "unknown key", f"{key[:cut]}q{key[cut:]}: 1".encode(), (f"{key[:cut]}q{key[cut:]}",)
    depth, width = rng.randrange(7, 30), rng.randrange(6, 10)
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    yield "alias bomb", "\n".join(bomb).encode(), ("run.yaml", "alias")
    yield "alias of itself", b"model_init_kwargs: &a [*a]", ("run.yaml", "line 1")
    for what, text in (
        ("open bracket", rng.choice("[{") + "1, "),
        ("open quote", rng.choice("'\"") + "a"),
        ("tab", "\t- x"),
        ("unknown alias", "*nowhere"),
        ("object", "!!python/object/apply:os.system ['true']"),
        ("percent", "%x"),
        ("deep", "[" * 3000),
    ):
        yield what, f"{lines[0]}\nrun_name: {text}\n".encode(), ("run.yaml",)
    broken = bytearray("\n".join(lines).encode())
    broken[rng.randrange(len(broken))] = rng.choice([0xFF, 0xC0, 0x80])
    yield "not UTF-8", bytes(broken), ("run.yaml", "UTF-8|utf-8")
    yield "no mapping", rng.choice([b"- a", b"text", b"3", b"[a]", b"1: 2"]), ("run.yaml",)
    name = rng.choice(["max_steps", "seed", "learning_rate", "epsilon"])
    long = rng.choice(
        ["9" * 5000, "1e" + "9" * 12, "[" + "1," * 9999 + "1]", "x" * 9999, "2026-11-22", "1:30"]
    )
    yield "odd scalar", f"{name}: {long}".encode(), (name,)


def yaml_cases(rng: random.Random, directory: Path, command_line: CommandLine) -> Iterator[Case]:
    for number in range(6):
        for what, text, must_name in yaml_texts(rng):
            file = directory / f"{number}-{what.replace(' ', '-')}" / "run.yaml"
            file.parent.mkdir()
            file.write_bytes(text)
            yield Case(
                "run file",
                f"{what}: {text[:60]!r}",
                lambda file=file: command_line(str(file), *command_line.complete()),
                must_name,
                must_fail=True,
            )
    for what in (directory, directory / "nowhere.yaml", Path("/dev/null")):
        yield Case(
            "run file",
            str(what),
            lambda what=what: command_line(str(what), *command_line.complete()),
            (str(what),),
            must_fail=True,
        )


# ── Data files ───────────────────────────────────────────────────────────────────────────────────────────


def data_cases(rng: random.Random, directory: Path, command_line: CommandLine) -> Iterator[Case]:
    def case(name: str, content: bytes, must_name: tuple[str, ...], *options: str) -> Case:
        file = directory / f"{rng.randrange(10**9)}-{name}"
        file.write_bytes(content)
        return Case(
            "data file",
            f"{name} {options}: {content[:50]!r}",
            lambda: command_line(*command_line.complete(dataset=file), *options),
            (file.name, *must_name) if not options else must_name,
            must_fail=True,
        )

    for _ in range(4):
        rows = [json.dumps({"prompt": "a" * rng.randrange(1, 9)}) for _ in range(rng.randrange(2, 6))]
        at = rng.randrange(len(rows))
        cut = rows[at][: rng.randrange(2, len(rows[at]) - 1)]
        damaged = "\n".join([*rows[:at], cut, *rows[at + 1 :]]).encode()
        yield case("cut.jsonl", damaged, (f"line {at + 1}",))
        yield case("cut.jsonl", damaged, (f"line {at + 1}",), "--dataset_options", "{streaming: true}")
        odd = "\n".join([*rows[:at], '{"prompt": "\u00e9"}', *rows[at + 1 :]]).encode("latin-1")
        yield case("latin.jsonl", odd, (f"line {at + 1}",))
    good = b'{"prompt": "a"}\n'
    for suffix in ("jsonl", "json", "csv", "parquet"):
        yield case(f"empty.{suffix}", b"", ())
    for suffix in ("json", "parquet", "csv"):
        yield case(f"noise.{suffix}", bytes(rng.randrange(128, 256) for _ in range(40)), ())
    for suffix in ("txt", "yaml", "gz", "xyz"):
        yield case(f"rows.{suffix}", good, ())
    yield case("cut.json", b'[{"prompt": "a"}, ', ())
    yield case("text.jsonl", b'"text"\n', ("line 1",))
    for option in ("foo: 1", "split: x", "name: x", "config: x", "path: x", "data_files: x", "features: 3"):
        key = option.partition(":")[0]
        yield case("rows.jsonl", good, (key,), "--dataset_options", f"{{{option}}}")
    yield case("rows.jsonl", good, ("dataset_options",), "--dataset_options", "{")
    yield case("rows.jsonl", good, ("dataset_options",), "--dataset_options", "3")
    yield case("rows.jsonl", good, ("nosplit",), "--dataset_train_split", "nosplit")


# ── Arguments of the trainer ─────────────────────────────────────────────────────────────────────────────

ODD = (3, 1.5, object(), b"x", {1: 2}, {4}, ["a", 1], ())
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "model": (None, *ODD, ""),
    "reward_funcs": (None, 3, object(), {1: print}, {print}, [None], [1], []),
    "args": (3, {}, "out", object()),
    "train_dataset": (
        None,
        *ODD,
        "gsm8k",
        [{"prompt": "a"}],
        datasets.DatasetDict({"train": datasets.Dataset.from_dict({"prompt": ["a"]})}),
        torch.utils.data.TensorDataset(torch.zeros(2)),
    ),
    "eval_dataset": (3, "gsm8k", [{"prompt": "a"}], {"a": 3}, {"a": None}, object()),
    "processing_class": (3, "gpt2", object(), print, [1]),
    "reward_processing_classes": (3, "gpt2", [3], object()),
    "callbacks": (3, TrainerCallback(), "x", [3], [print], ["x"]),
    "optimizers": (None, 3, (None,), (None, None, None), (3, None), (None, 3), (torch.optim.SGD, None)),
    "peft_config": (3, {}, "lora", object(), {"r": 8}),
}


def argument_cases(directory: Path, trainer: type) -> Iterator[Case]:
    model, tokenizer, rows = make_model(), make_tokenizer(), make_dataset()
    for name, values in ARGUMENTS.items():
        for value in values:

            def build(name: str = name, value: Any = value) -> Any:
                arguments = {
                    "model": model,
                    "reward_funcs": share_of_early_letters,
                    "args": make_config(directory / "arguments"),
                    "train_dataset": rows,
                    "processing_class": tokenizer,
                }
                return trainer(**{**arguments, name: value})

            must_name = (name.removesuffix("s") if name == "reward_funcs" else name,)
            if name == "reward_funcs" and value == []:
                must_name = ("reward_funcs",)
            yield Case("trainer's argument", f"{name}={value!r:.40}", build, must_name, must_fail=True)


# ── The test ─────────────────────────────────────────────────────────────────────────────────────────────


def run_cases(seed: int, share: float, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    rng = random.Random(seed)
    trainer = GRPOTrainer
    command_line = CommandLine(tmp_path, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    drawn = [
        *number_cases(tmp_path, command_line),
        *type_cases(tmp_path),
        *flag_cases(tmp_path, command_line),
    ]
    cases = rng.sample(drawn, int(share * len(drawn)))
    cases += yaml_cases(rng, tmp_path, command_line)
    cases += data_cases(rng, tmp_path, command_line)
    cases += argument_cases(tmp_path, trainer)
    total, report = judge(cases, f"Bad inputs, seed {seed}", capsys)
    assert total.total() > 300
    assert total["wrong"] == total["hang"] == 0, report
    assert total["raw"] <= 15, report


def test_every_number_that_is_honoured_is_drawn():
    numeric = {
        name
        for name in GRPOConfig.__dataclass_fields__
        if {int, float} & {TYPES[name], *typing.get_args(TYPES[name])} and "vllm_server" not in name
    }
    assert numeric <= {*DOMAINS, *UNREAD, *REFUSED}
    assert len(DOMAINS) >= 61


def test_bad_inputs_drawn(tmp_path, monkeypatch, capsys):
    run_cases(SEED, 0.12, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_all_bad_inputs(tmp_path, monkeypatch, capsys):
    run_cases(random.randrange(10**6), 1.0, tmp_path, monkeypatch, capsys)
