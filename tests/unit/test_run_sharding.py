"""shard="auto" in a run: what it comes to before the model is loaded, and what tells the user."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine_models import config_of, make_gpt2, make_model
from peft import LoraConfig, PromptTuningConfig
from transformers import GPT2Config, Qwen2Config

from colocate.cli import main
from colocate.config.grpo_config import GRPOConfig
from colocate.parallel.mesh import DecodeMesh
from colocate.planning import run_sharding
from colocate.planning.hardware import find_gpu
from colocate.planning.run_options import PlannedOptions
from colocate.planning.run_sharding import choose_weight_parts
from colocate.policy.attention import cudnn_attention
from colocate.run import mesh as run_mesh
from colocate.run.header import shard_row
from colocate.run.mesh import weight_parts_of
from colocate.run.playing import check_mesh
from colocate.weights.layouts import WeightPart
from colocate.weights.shapes import Lora, ModelShapes
from colocate.weights.weight_parts import random_parts

CONFIGS = {
    "7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "72B": Qwen2Config(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2),
    "tiny": config_of("qwen2"),
}  # fmt: skip
RUN = dict(
    per_device_train_batch_size=16, gradient_accumulation_steps=16, num_generations=16,
    max_prompt_length=512, max_completion_length=1024,
)  # fmt: skip
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        config.save_pretrained(directory / name)
    return directory


@pytest.fixture
def run_on(monkeypatch, tmp_path):
    """Makes this process a rank of a run on GPUs of a name; returns the options that it is planned by."""

    def make(gpu, num_gpus=2, **options):
        entry = find_gpu(gpu)
        total = int(entry.memory_gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: f"NVIDIA {gpu}")
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total)
        )
        monkeypatch.setattr(
            cudnn_attention,
            "has_cudnn",
            lambda _, *case: cudnn_attention.why_not_cudnn_on(entry.capability, *case) is None,
        )
        monkeypatch.setattr(GRPOConfig, "world_size", num_gpus)
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{**RUN, **options})
        args.bf16 = True
        return args.options_of(PlannedOptions, world_size=num_gpus, device=torch.device("cuda"))

    return make


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus", "rank", "expected"),
    [
        ("7B", "H200", 2, None, 1),
        ("7B", "H100", 2, None, 1),
        ("72B", "H200", 2, 16, 2),
        ("72B", "H200", 8, None, 8),
    ],
)
@pytest.mark.share(2)
def test_a_run_comes_to_what_the_command_comes_to(
    run_on, models, capsys, model, gpu, num_gpus, rank, expected
):
    options = run_on(gpu, num_gpus)
    peft_config = None if rank is None else LoraConfig(r=rank, target_modules=set(TARGETS))
    parts, reason = choose_weight_parts(options, str(models / model), peft_config=peft_config)
    words = [f"--{name}={value}" for name, value in RUN.items()]
    words += [] if rank is None else ["--use_peft", f"--lora_r={rank}", "--lora_target_modules", *TARGETS]
    asked = ["--num_gpus", str(num_gpus), "--gpu", gpu, "--json"]
    main(["plan", "--model_name_or_path", str(models / model), *words, *asked])
    printed = capsys.readouterr().out
    planned = json.loads(printed[printed.index("{") :])
    assert (parts, reason) == (planned["num_weight_parts"], planned["sharding"])
    assert parts == expected


@pytest.mark.parametrize("targets", ["all-linear", TARGETS])
def test_the_adapter_is_counted_and_its_configuration_stays(run_on, models, monkeypatch, targets):
    seen = []
    monkeypatch.setattr(run_sharding, "sharding_choice", lambda shapes, *_: seen.append(shapes) or choice)
    choice = SimpleNamespace(sharding=SimpleNamespace(num_weight_parts=1), reason="")
    options = run_on("H200")
    peft_config = LoraConfig(r=8, target_modules=targets)
    before = peft_config.to_dict()
    loaded = make_model("qwen2")
    names = [name for name, _ in loaded.named_parameters()]
    choose_weight_parts(options, str(models / "tiny"), peft_config=peft_config)
    choose_weight_parts(options, loaded, peft_config=peft_config)
    assert seen == [ModelShapes.of(loaded, lora=Lora(8, targets))] * 2
    assert peft_config.to_dict() == before
    assert [name for name, _ in loaded.named_parameters()] == names


@pytest.mark.parametrize(
    ("model", "options", "given", "reason"),
    [
        ("gpt2", {}, {}, "GPT2LMHeadModel"),
        (make_gpt2(), {}, {}, "GPT2LMHeadModel"),
        ("tiny", {"engine": "vllm"}, {}, "engine='vllm' reads whole weights"),
        ("tiny", {"generation_kwargs": {"num_beams": 2}}, {}, "asks for num_beams=2"),
        ("tiny", {}, {"quantization_config": object()}, "quantized weights are not split"),
        ("nowhere", {}, {}, "cannot be planned before it is loaded"),
        ("tiny", {}, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, ""),
    ],
)
def test_weights_stay_whole_where_they_cannot_be_split(run_on, models, model, options, given, reason):
    planned = run_on("H200", **options)
    name = str(models / model) if isinstance(model, str) else model
    parts, told = choose_weight_parts(planned, name, **given)
    assert parts == 1 and reason in told and told.endswith(".")


def test_the_main_process_says_what_came_out_and_the_largest_wins(run_on, monkeypatch, caplog):
    caplog.set_level("INFO", "colocate")
    monkeypatch.setattr(run_mesh, "choose_weight_parts", lambda *_: (2, "shard=2 fits."))
    monkeypatch.setattr(run_mesh, "of_all_ranks", lambda items: [*items, 4])

    def come_to(
        args, kind="cuda", *, num_processes=2, is_main_process=True, optimizers=(None, None), model="7B"
    ):
        accelerator = SimpleNamespace(
            device=torch.device(kind), num_processes=num_processes, is_main_process=is_main_process
        )
        caplog.clear()
        return weight_parts_of(args, accelerator, model, None, None, optimizers), caplog.messages

    auto = run_on("H200")
    assert come_to(auto) == (4, ["shard='auto' came to 4: shard=2 fits."])
    assert come_to(auto, is_main_process=False) == (4, [])
    assert come_to(auto, "cpu") == come_to(auto, num_processes=1) == (1, [])
    earlier = random_parts(
        config_of("qwen2", vocab_size=96), WeightPart(0, 2), device="cpu", dtype=torch.float32
    )
    assert come_to(auto, "cpu", model=earlier) == come_to(auto, model=earlier) == (2, [])
    for shard, parts in (("none", 1), (1, 1), (2, 2)):
        assert come_to(run_on("H200", shard=shard)) == (parts, [])
    monkeypatch.setattr(run_mesh, "of_all_ranks", lambda items: items * 2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for parts, (line,) in (
        come_to(auto, optimizers=(optimizer, None)),
        come_to(run_on("H200", optim="adafactor")),
    ):
        assert parts == 1 and ("your SGD" in line or "optim='adafactor'" in line)


@pytest.mark.parametrize(
    ("num_parts", "num_replicas", "splits", "decode_shard", "row"),
    [
        (1, 1, False, None, None),
        (1, 2, True, None, "weights whole on each of 2 ranks, optimizer split over 2"),
        (1, 2, False, 1, "weights whole on each of 2 ranks, and the optimizer's state, too"),
        (2, 1, True, 2, "2 ranks share the weights, optimizer split over 2"),
        (
            2,
            1,
            True,
            1,
            "2 ranks share the weights and gather them to decode each alone, optimizer split over 2",
        ),
        (4, 2, True, None, "4 ranks share the weights, in 2 such groups, optimizer split over 8"),
    ],
)
def test_the_header_says_what_ranks_split(num_parts, num_replicas, splits, decode_shard, row):
    mesh = SimpleNamespace(
        num_weight_parts=num_parts, num_replicas=num_replicas, num_ranks=num_parts * num_replicas
    )
    assert shard_row(mesh, splits_optimizer=splits, decode_shard=decode_shard) == row


@pytest.mark.parametrize(
    ("num_parts", "decode_shard", "is_refused"),
    [(2, None, True), (4, 2, True), (2, 1, False), (1, None, False)],
)
def test_episodes_of_several_turns_need_a_process_that_decodes_alone(num_parts, decode_shard, is_refused):
    mesh = SimpleNamespace(num_weight_parts=num_parts)
    playing = SimpleNamespace(has_turns=True, rollout_func=None)
    if not is_refused:
        return check_mesh(playing, mesh, decode_shard)
    with pytest.raises(
        ValueError,
        match=f"split over {num_parts} .* {decode_shard or num_parts} decode together.*Set decode_shard=1",
    ):
        check_mesh(playing, mesh, decode_shard)


@pytest.mark.parametrize(("num_parts", "decode_shard"), [(1, 2), (4, 3), (2, 4)])
def test_decode_shard_divides_the_parts_of_the_weights(num_parts, decode_shard):
    mesh = Mock(num_weight_parts=num_parts)
    with pytest.raises(ValueError, match=f"decode_shard={decode_shard} lets .* split over {num_parts}"):
        DecodeMesh.of(mesh, decode_shard)
