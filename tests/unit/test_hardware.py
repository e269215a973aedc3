"""GPUs by name, and the roofline against what was measured."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from test_planner import GIB, LARGE_SHAPES, LORA_SHAPES, on_gpu
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.precision.cases import SPEED_CASES
from benchmarks.rollout.cases import SHAPES
from colocate.planning.hardware import GPUS, find_gpu
from colocate.planning.planner import Constraints, plan
from colocate.planning.speed import Speed, expected_speed, step_time
from colocate.weights.shapes import ModelShapes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx_3090", "RTX 3090"),
        ("RTX4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("l40s", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20 3e"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("RTX5080", "RTX 5080"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ],
)
def test_names_of_drivers_and_users(name, known):
    gpu = find_gpu(name)
    assert gpu is not None and gpu.name == known


def test_unknown_and_too_old():
    assert find_gpu("MI300X") is None and find_gpu("A1000") is None
    assert find_gpu("NVIDIA GeForce RTX 5090 Laptop GPU") is None  # half of a 5090
    assert find_gpu("RTX") is None and find_gpu("80GB") is None and find_gpu("") is None
    for name in ("Tesla T4", "Tesla V100-SXM2-16GB"):
        with pytest.raises(ValueError, match=r"compute capability 8\.0"):
            find_gpu(name)


def speed(shapes=LARGE_SHAPES, load=None, gpu="H200", **constraints):
    load = load or on_gpu()
    result = plan(shapes, load, device_memory_bytes=140 * GIB, constraints=Constraints(**constraints))
    return expected_speed(shapes, load, result, find_gpu(gpu))


def test_speed_is_near_what_was_measured_on_an_h200():
    # 1.5B parameters, 512 rows, 256 + 1,024 tokens: 6.7 ms a step with the prompt read for every row, 5.8
    # with it read once per group; a training step of 196,608 tokens in 3.75 s.
    load = on_gpu(completion_tokens=1024, num_rollout_sequences=512)
    assert speed(load=load).rollout_tokens_per_s == pytest.approx(512 / 5.8e-3, rel=0.15)
    whole = on_gpu(share_prompts=False)
    assert speed(load=whole).train_tokens_per_s == pytest.approx(196_608 / 3.75, rel=0.1)


@pytest.mark.parametrize(
    ("case", "precisions"),
    [
        ("7b_256seq", ("bf16", "fp8")),
        ("1p5b_4k_256seq", ("bf16", "fp8_kv", "fp8")),
        ("1p5b_512seq", ("bf16", "fp8")),
    ],
)
def test_rollouts_in_8_bits_are_expected_near_what_was_measured_on_an_h100(case, precisions):
    """Their weights take the memory that is planned, too."""
    records = json.loads((ROOT / "benchmarks/results/precision-h100.json").read_text())["repetitions"]
    (record,) = (r for r in records if r["kind"] == "speed" and r["case"] == case)
    case = SPEED_CASES[case]
    with torch.device("meta"):
        shapes = ModelShapes.of(Qwen2ForCausalLM(Qwen2Config(**SHAPES[case.model])))
    for precision in precisions:
        load = on_gpu(
            prompt_tokens=case.prompt_tokens,
            completion_tokens=case.completion_tokens,
            num_generations=case.num_generations,
            num_rollout_sequences=case.num_seqs,
            rollout_precision=precision,
        )
        result = plan(shapes, load, device_memory_bytes=140 * GIB)
        expected = expected_speed(shapes, load, result, find_gpu("H100")).rollout_tokens_per_s
        run = record["runs"][precision]
        measured = median(repetition["tokens_per_s"] for repetition in run["repetitions"])
        assert expected == pytest.approx(measured, rel=0.2)
        planned = [row.size_bytes for row in result.rows if row.name == "weights in 8 bits"]
        assert planned == ([run["weight_bytes"]] if precision == "fp8" else [])


def test_recomputation_is_slower_and_adapters_are_faster():
    speeds = [
        speed(activation_policy=policy, tokens_per_microbatch=8192).train_tokens_per_s
        for policy in ("keep", "selective", "full", "offload")
    ]
    assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) == 4
    assert speed(LORA_SHAPES).train_tokens_per_s > speed().train_tokens_per_s


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS])
def test_faster_gpus_are_expected_to_be_faster(gpu):
    slower = speed(gpu=gpu)
    fastest = speed(gpu="B200")
    assert 0 < slower.rollout_tokens_per_s <= fastest.rollout_tokens_per_s
    assert 0 < slower.train_tokens_per_s <= fastest.train_tokens_per_s


def test_sequences_that_wait_slow_a_rollout_down():
    load = on_gpu()
    few = replace(load, kv_cache_tokens=4096)
    assert speed(load=few).rollout_tokens_per_s < speed(load=load).rollout_tokens_per_s


def test_seconds_of_a_step_are_tokens_over_speeds():
    # 256 completions of 512 tokens in groups of 8 that share prompts of 256 tokens.
    load, speeds = on_gpu(), Speed(rollout_tokens_per_s=1000, train_tokens_per_s=2000)
    step = step_time(LARGE_SHAPES, load, speeds, num_iterations=1)
    assert step.rollout_s == pytest.approx(256 * 512 / 1000)
    assert step.train_s == pytest.approx((32 * 256 + 256 * 512) / 2000)
    assert step.seconds == step.rollout_s + step.train_s
    # Each completion serves four steps; the reference reads what training reads, forward only.
    step = step_time(LARGE_SHAPES, replace(load, has_reference=True), speeds, num_iterations=4)
    assert step.rollout_s == pytest.approx(256 * 512 / 4000)
    assert step.train_s == pytest.approx((32 * 256 + 256 * 512) / 2000 * 4 / 3)
    elsewhere = speed(load=replace(load, engine="rollout_server"))
    assert elsewhere.rollout_tokens_per_s is None
    assert step_time(LARGE_SHAPES, load, elsewhere, num_iterations=1).rollout_s == 0
