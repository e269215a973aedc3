"""The announcement's script under `accelerate launch` with the configurations that people have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher_configs import DEEPSPEED_JSON, FSDP2, ZERO3, with_entries
from processes import SOURCE
from tiny import make_model, make_tokenizer

WORKER = Path(__file__).with_name("seed_worker.py")


@pytest.fixture(scope="module")
def launcher_only_deepspeed(tmp_path_factory) -> Path:
    """A package that `accelerate launch` takes for DeepSpeed, without which it starts no such configuration.
    A rank that imports it fails."""
    directory = tmp_path_factory.mktemp("site")
    (directory / "deepspeed" / "launcher").mkdir(parents=True)
    (directory / "deepspeed" / "__init__.py").write_text(
        'import os\nassert "LOCAL_RANK" not in os.environ, "a rank has imported DeepSpeed"\n'
    )
    (directory / "deepspeed" / "launcher" / "__init__.py").touch()
    (directory / "deepspeed" / "launcher" / "runner.py").write_text(
        'DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"\n'
    )
    (directory / "deepspeed-0.19.8.dist-info").mkdir()
    (directory / "deepspeed-0.19.8.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n"
    )
    return directory


def launch(directory: Path, configuration: dict[str, Any], site: Path) -> tuple[list[Any], str]:
    """What both ranks recorded, and all that the launcher and they wrote."""
    (directory / "accelerate.yaml").write_text(yaml.safe_dump(configuration))
    make_model(max_position_embeddings=2048).save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    words = ["accelerate.commands.launch", "--config_file", "accelerate.yaml", "--main_process_port", "0"]
    paths = [str(SOURCE), str(site), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", *words, str(WORKER), str(directory)],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    records = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]
    return records, " ".join((done.stdout + done.stderr).split())


def check(records: list[Any], **expected: Any) -> None:
    for record in records:
        assert record == expected | {"num_processes": 2, "steps": 2, "deepspeed": [], "environment": []} | {
            "kind": record["kind"]
        }
        assert record["kind"] in ("MULTI_CPU", "MULTI_GPU")


@pytest.mark.slow
def test_zero_3_of_accelerate(tmp_path, launcher_only_deepspeed):
    configuration = with_entries(ZERO3, "deepspeed_config", offload_optimizer_device="cpu")
    records, said = launch(tmp_path, configuration, launcher_only_deepspeed)
    check(records, bf16=True, shard="auto", offload_optimizer=True)
    read = "shard='auto', offload_optimizer=True, bf16=True"
    assert said.count(f"(zero_stage=3, offload_optimizer_device=cpu) is read as {read}") == 1


@pytest.mark.slow
def test_a_deepspeed_json_of_accelerate(tmp_path, launcher_only_deepspeed):
    (tmp_path / "zero2.json").write_text(
        json.dumps(with_entries(DEEPSPEED_JSON, "zero_optimization", stage=2))
    )
    section = {"deepspeed_config_file": "zero2.json", "zero3_init_flag": False}
    configuration = {**ZERO3, "deepspeed_config": section, "mixed_precision": "no"}
    records, said = launch(tmp_path, configuration, launcher_only_deepspeed)
    check(records, bf16=False, shard=1, offload_optimizer=True)
    assert said.count("deepspeed_config_file=zero2.json (zero_stage=2") == 1


@pytest.mark.slow
def test_fsdp2_of_accelerate(tmp_path):
    configuration = {**FSDP2, "mixed_precision": "no"}
    records, said = launch(tmp_path, configuration, tmp_path)
    check(records, bf16=False, shard="auto", offload_optimizer=None)
    assert said.count("fsdp_reshard_after_forward=true) is read as shard='auto'") == 1
