"""A run with a secret wherever an option can hold one: none is in a file, in a message or with a tracker."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from colocate import GRPOConfig
from colocate.cli import main
from colocate.config.run_config import parse_run
from colocate.options.run_file import read_file
from tiny import make_model, make_tokenizer, make_trainer, sums

SECRETS = [f"s3cr3t{i}x" for i in range(9)]
TOKEN, ENGINE, PASSWORD, DATASET, HUB, NESTED, QUERY, HEADER, EVAL = SECRETS


def leaks(text: bytes | str) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in SECRETS if secret.encode() in data]


def contents(directory: Path):
    """Every file, and every member of those that are archives."""
    for file in (f for f in directory.rglob("*") if f.is_file()):
        yield file, file.read_bytes()
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                yield from ((file, archive.read(name)) for name in archive.namelist())


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("secrets")
    make_model().save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    sums(4).to_json(directory / "data.jsonl")
    return {
        "output_dir": str(directory / "out"),
        "model_name_or_path": str(directory / "model"),
        "model_init_kwargs": {"token": TOKEN},
        "dataset_name": str(directory / "data.jsonl"),
        "dataset_options": {"token": DATASET},
        "eval_dataset_options": {"storage_options": {"secret": EVAL}},
        "reward_funcs": "tiny.count_digits",
        "vllm_engine_kwargs": {"hf_token": ENGINE, "hf_overrides": [{"service": {"api_key": NESTED}}]},
        "vllm_server_base_url": f"http://me:{PASSWORD}@localhost:1/?api_key={QUERY}",
        "hub_token": HUB,
        "generation_kwargs": {},
        "run_name": f"Authorization: Bearer {HEADER}",
        **dict(use_cpu=True, bf16=False, disable_tqdm=True, report_to="tensorboard", log_completions=True),
        **dict(max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=4),
        **dict(save_strategy="steps", save_steps=1, logging_steps=1),
    }


def on_the_command_line(options) -> list[str]:
    return [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options.items()]


def test_a_run_from_the_command_line_leaks_nothing(options, capfd, caplog, monkeypatch):
    out = Path(options["output_dir"])
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(out / "runs"))
    assert main(["train", *on_the_command_line(options)]) == 0
    assert main(["report", str(out)]) == 0
    found = [(file, leaks(data)) for file, data in contents(out) if leaks(data)]
    assert not found
    names = {file.name.partition(".")[0] for file, _ in contents(out)}
    assert {"config", "run", "training_args", "events", "report", "trainer_state"} <= names
    captured = capfd.readouterr()
    assert not leaks(captured.out + captured.err + caplog.text)

    # The file asks for each of them, and is whole when all are given again.
    assert main(["train", str(out / "config.yaml"), "--output_dir", str(out / "again")]) == 1
    message = capfd.readouterr().err
    secret = {name: value for name, value in options.items() if leaks(json.dumps(value))}
    assert "model_init_kwargs.token='<TOKEN>', " in message and "stands for a secret" in message
    assert all(f"--{name}" in message for name in secret)
    run, _ = parse_run({**read_file(out / "config.yaml"), **secret})
    assert run.dataset_options == {"token": DATASET}


def test_what_trackers_and_logs_get(options, tmp_path):
    names = GRPOConfig.__dataclass_fields__
    config = GRPOConfig(**{name: value for name, value in options.items() if name in names})
    seen = [repr(config), str(config), config.to_json_string(), str(config.to_sanitized_dict())]
    assert not leaks("".join(seen))
    assert config.to_dict()["model_init_kwargs"] == {"token": "<TOKEN>"}
    assert GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).to_dict()["hub_token"] is None
    assert config.hub_token == HUB and config.model_init_kwargs == {"token": TOKEN}  # itself it keeps them
    torch.save(config.without_secrets(), tmp_path / "args.bin")
    with pytest.raises(ValueError, match="stands for a secret"):
        make_trainer(tmp_path, args=torch.load(tmp_path / "args.bin", weights_only=False))


@pytest.mark.parametrize(
    "changed",
    [
        dict(engine="vllm_server", vllm_server_base_url=f"https://me:{PASSWORD}@h"),
        dict(
            engine="vllm_server",
            vllm_server_base_url=f"http://me:{PASSWORD}@127.0.0.1:9",
            vllm_server_timeout=0.1,
        ),
        dict(engine="vllm", vllm_engine_kwargs={"model": {"token": ENGINE}}),
        dict(dataset_options=f"token={DATASET}"),
        dict(dataset_options=f"[{{token: {DATASET}}}]"),
        dict(dataset_name=f"http://me:{PASSWORD}@h/data.jsonl"),
    ],
    ids=["no http", "no server", "not the user's", "type", "list", "data"],
)
@pytest.mark.parametrize("flags", [[], ["--debug"]], ids=["", "debug"])
def test_errors_leak_nothing(options, changed, flags, capfd):
    given = {**options, "report_to": "none", "max_steps": 1, "save_strategy": "no", **changed}
    assert main(["train", *flags, *on_the_command_line(given)]) == 1
    captured = capfd.readouterr()
    assert "colocate train:" in captured.err or "Traceback" in captured.err
    assert not leaks(captured.out + captured.err)
