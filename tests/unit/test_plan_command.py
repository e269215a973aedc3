"""`colocate plan` on the configurations of real models, without their weights and without the Hub."""

import json
import re

import pytest
from transformers import Gemma2Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from colocate.cli import main
from colocate.kernels.checks.fallbacks import TESTED
from colocate.memory.arena import HANDLE_BYTES
from colocate.planning import slower_kernels
from colocate.policy.attention import cudnn_attention

CONFIGS = {
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "Qwen3-32B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, head_dim=128,
        num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "gemma-2-2b": Gemma2Config(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, head_dim=256,
        num_attention_heads=8, num_key_value_heads=4,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    ),
}  # fmt: skip
RUN = (
    "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --num_generations 16 "
    "--max_prompt_length 512 --max_completion_length 1024"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        config.save_pretrained(directory / name)
    return directory


@pytest.fixture
def plan(models, capsys, monkeypatch):
    """Runs the command; returns its exit code and what it printed."""

    def run(name, options="", columns=120):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main(["plan", "--model_name_or_path", str(models / name), *RUN.split(), *options.split()])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture
def numbers(plan):
    def run(name, options=""):
        code, printed = plan(name, f"{options} --json")
        return code, json.loads(printed[printed.index("{") :])

    return run


def words(printed):
    return " ".join(printed.split())


def test_the_verdict_comes_first_with_the_margin_and_then_the_time(plan, numbers):
    code, printed = plan("Qwen2.5-7B", "--device_name H200 --max_steps 500")
    lines = printed.splitlines()
    assert code == 0
    assert lines[0].startswith("Fits: Qwen2.5-7B, full fine-tuning, takes 134.0")
    assert "of the 139.80 GiB of one H200; 5.7" in lines[0] and "(4.1%) stay free." in lines[0]
    _, result = numbers("Qwen2.5-7B", "--device_name H200 --max_steps 500")
    step, speed = result["expected_step"], result["expected"]
    assert step["seconds"] == pytest.approx(step["rollout_s"] + step["train_s"])
    assert step["rollout_s"] == pytest.approx(256 * 1024 / speed["rollout_tokens_per_s"])
    assert step["train_s"] == pytest.approx(result["step_tokens"] / speed["train_tokens_per_s"])
    assert lines[1].startswith(f"About {step['seconds']:.0f} s a step: {step['rollout_s']:.0f} s rollout")
    assert f"about {500 * step['seconds'] / 3600:.1f} h" in words(printed)
    assert "│" not in printed and "--verbose" in printed
    _, verbose = plan("Qwen2.5-7B", "--device_name H200 --verbose")
    assert "│ resident │ weights" in verbose and verbose.startswith("Fits: ")


def options_of(settings):
    """As a command line has them."""
    return " ".join(f"--{name} {value}" for name, value in (s.split("=") for s in settings.split()))


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [("Qwen2.5-7B", "H100", "use_peft=True"), ("Qwen2.5-7B", "RTX 4090", "use_peft=True"),
     ("Qwen3-32B", "RTX 5090", "use_peft=True load_in_4bit=True")],
)  # fmt: skip
@pytest.mark.share(3)
def test_who_follows_the_advice_has_a_run_that_fits(plan, numbers, name, device, expected):
    asked = ["--device_name", device.replace(" ", "")]
    code, result = numbers(name, " ".join(asked))
    assert code == 3 and result["verdict"] == "does not fit" and result["expected_step"] is None
    assert result["remedies"][0]["settings"] == expected
    code, printed = plan(name, " ".join(asked))
    assert code == 3 and printed.startswith(f"Does not fit: {name}, full fine-tuning, needs")
    for remedy in result["remedies"]:
        assert remedy["settings"] in words(printed)
        code, followed = numbers(name, " ".join([*asked, options_of(remedy["settings"])]))
        assert code == 0 and followed["fits"]
        assert followed["peak_bytes"] == pytest.approx(remedy["peak_bytes"], rel=0.02)
    # Eight bits would spare 42 GiB, and not suffice.
    assert "adamw_bnb_8bit" not in printed


def test_a_tight_fit_says_so(plan):
    code, printed = plan("Qwen2.5-7B", "--device_name RTX4090 --use_peft")
    assert code == 0 and printed.startswith("Fits tightly: Qwen2.5-7B, LoRA, takes 23.4")
    assert re.search(r"Tight: the KV cache holds \d+ of the 256 sequences", words(printed))
    code, printed = plan("Qwen3-32B", "--device_name H100 --use_peft")
    assert code == 0 and printed.startswith("Fits tightly: ") and "(0.6%) stay free" in words(printed)


def test_where_nothing_suffices_it_is_said_and_what_would(plan):
    code, printed = plan("Qwen3-32B", "--device_name RTX5080")
    assert code == 3 and "Nothing that can be set makes it fit, alone or together." in words(printed)
    assert re.search(r"Unchanged, it needs a device of 5\d\d\.\d GiB, more than any GPU", words(printed))
    (size, gpu), *_ = re.findall(
        r"With use_peft=True load_in_4bit=True it needs a device of ([\d.]+) GiB, such as one (.+?)\.",
        printed,
    )
    assert gpu == "RTX 4090"
    options = "--use_peft --load_in_4bit --device_memory_gib"
    assert plan("Qwen3-32B", f"{options} {float(size) + 0.1}")[0] == 0
    assert plan("Qwen3-32B", f"{options} {float(size) * 0.97}")[0] == 3


def rows_of(result):
    return {row["name"]: row["size_bytes"] for row in result["rows"]}


def test_vllm_is_accounted_for(plan, numbers):
    weights = 7_615_616_512 * 2
    _, native = numbers("Qwen2.5-7B", "--device_name H100 --use_peft")
    _, copied = numbers("Qwen2.5-7B", "--device_name H100 --use_peft --engine vllm")
    assert rows_of(copied)["vLLM's weights"] == weights  # with the adapters merged
    assert "engine" not in rows_of(copied) and "vLLM asleep" not in rows_of(native)
    # Of 0.4 of the device vLLM makes a KV cache what weights and activations leave.
    share = "--vllm_gpu_memory_utilization 0.4"
    _, fixed = numbers("Qwen2.5-7B", f"--device_name H100 --use_peft --engine vllm {share}")
    held = sum(row["size_bytes"] for row in fixed["rows"] if row["phase"] == "rollout")
    assert held == pytest.approx(0.4 * 79.1 * 2**30, abs=fixed["kv_bytes_per_token"])
    # The whole model's weights are shared with the trainer; adapters' and `vllm_weights=buckets` are copied.
    code, printed = plan("Qwen2.5-7B", "--device_name H200 --engine vllm")
    assert code == 0 and "by vLLM with the trainer's weights" in words(printed)
    _, buckets = numbers("Qwen2.5-7B", "--device_name H200 --engine vllm --vllm_weights buckets")
    assert rows_of(buckets)["vLLM's weights"] == weights
    # Awake all the time, it is resident and leaves training less.
    awake = f"--device_name H100 --use_peft --engine vllm {share} --vllm_enable_sleep_mode false"
    _, resident = numbers("Qwen2.5-7B", awake)
    assert resident["rollout_bytes"] == 0
    assert resident["resident_bytes"] > fixed["resident_bytes"] + 0.39 * 79.1 * 2**30
    assert resident["train_bytes"] < fixed["train_bytes"]


def test_tensorrt_llm_is_planned_with_a_copy_of_the_weights(plan, numbers):
    options = "--device_name H200 --engine trtllm"
    code, printed = plan("Qwen2.5-7B", options)
    assert code == 0 and "by TensorRT-LLM with a copy of the weights" in words(printed)
    _, theirs = numbers("Qwen2.5-7B", "--device_name H200 --engine vllm --vllm_weights buckets")
    _, ours = numbers("Qwen2.5-7B", options)
    assert rows_of(ours)["TensorRT-LLM's weights"] == rows_of(theirs)["vLLM's weights"] > 0
    assert "TensorRT-LLM asleep" in rows_of(ours)


def test_a_reference_that_sleeps_is_in_neither_rollout_nor_training(numbers):
    _, awake = numbers("Qwen2.5-7B", "--device_name H200 --beta 0.1")
    _, asleep = numbers("Qwen2.5-7B", "--device_name H200 --beta 0.1 --offload_scorers")
    assert rows_of(awake)["reference"] == rows_of(awake)["weights"] and "reference" not in rows_of(asleep)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--device_name H100", []),
        (
            "--device_name A100",
            ["FlashAttention: cuDNN's is for H100", "SwiGLU .* this GPU has 8.0"],
        ),
        ("--device_name A100 --engine vllm", ["FlashAttention: cuDNN's is for H100 and H200"]),
        (
            "--device_name H100 --dtype float32 --bf16 false",
            [
                "padded matrix products: .* torch.float32",
                "padded products and small",
                "SwiGLU .* torch.float32",
            ],
        ),
        ("--device_name H100 --rollout_precision fp8", []),
        (
            "--device_name H100 --dtype float32 --bf16 false --rollout_precision fp8",
            [
                "padded matrix products: .* torch.float32",
                "padded products and small",
                "SwiGLU .* torch.float32",
                "Products in 8 bits are multiplied out in float32: .* torch.float32",
            ],
        ),
        ("--device_memory_gib 80", None),
    ],
)
def test_kernels_that_will_not_run_are_named(plan, numbers, asked, said, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "_is_installed", lambda: True)
    monkeypatch.setattr(slower_kernels, "version", lambda _: f"{TESTED['Triton'][-1]}.0")
    _, printed = plan("Qwen2.5-7B", f"{asked} --use_peft")
    _, result = numbers("Qwen2.5-7B", f"{asked} --use_peft")
    lines = result["slower_kernels"]
    assert (lines is None) == (said is None) and len(lines or ()) == len(said or ())
    for line, words_of_it in zip(lines or (), said or (), strict=True):
        assert re.search(words_of_it, line)
        assert f"Without a fast kernel: {line}" in words(printed)
    assert printed.count("Without a fast kernel") == len(said or ())


@pytest.mark.parametrize(("device", "is_named"), [("H200", True), ("A100", False)])
def test_a_triton_that_the_kernels_were_not_tested_with_is_named(plan, device, is_named, monkeypatch):
    monkeypatch.setattr(slower_kernels, "version", lambda _: "3.99.1")
    _, printed = plan("Qwen2.5-7B", f"--device_name {device}")
    assert ("Triton 3.99.1 was never tested with them" in words(printed)) is is_named


def test_a_gpu_without_e4m3_is_refused_as_the_run_would_be(plan):
    code, printed = plan("Qwen2.5-7B", "--device_name A100 --rollout_precision fp8")
    assert code == 1
    assert "GPUs have from compute capability 8.9 on; A100 has 8.0. Set rollout_precision='fp8_kv'" in printed
    assert "8.9" not in plan("Qwen2.5-7B", "--device_name A100 --rollout_precision fp8_kv")[1]


def test_8_bits_are_planned_with_their_bytes_and_are_expected_to_be_faster(numbers):
    """A head of 128 takes 129 bytes where it takes 256; all projections but o are there once more."""
    sized = "--device_name H100 --kv_cache_tokens 131072 --use_peft"
    of = {p: numbers("Qwen2.5-7B", f"{sized} --rollout_precision {p}")[1] for p in ("bf16", "fp8_kv", "fp8")}
    _, kv, both = of.values()
    caches = [next(row["how"] for row in r["rows"] if row["name"] == "KV cache") for r in of.values()]
    for cache, head_bytes in zip(caches, (256, 129, 129), strict=True):
        assert cache.startswith(f"131,072 tokens × {28 * 4 * 2 * head_bytes:,} B")
    in_8bit = 28 * 3584 * ((28 + 2 * 4) * 128 + 3 * 18944)
    assert rows_of(both)["weights in 8 bits"] == -(-in_8bit // HANDLE_BYTES) * HANDLE_BYTES
    assert "weights in 8 bits" not in rows_of(kv)
    speeds = [result["expected"]["rollout_tokens_per_s"] for result in of.values()]
    assert speeds == sorted(speeds) and speeds[2] > 1.1 * speeds[1]


def test_a_server_takes_nothing_of_this_device(plan, numbers):
    options = "--device_name H200 --engine vllm_server --vllm_server_base_url http://localhost:8000"
    code, result = numbers("Qwen2.5-7B", options)
    assert code == 0 and result["rollout_bytes"] == 0 and result["kv_cache_tokens"] == 0
    assert result["expected"]["rollout_tokens_per_s"] is None
    _, printed = plan("Qwen2.5-7B", options)
    assert "rollout on the server, not counted" in words(printed)
    assert "takes nothing of this one" in words(printed)


@pytest.mark.parametrize(
    ("name", "size", "block"),
    [
        ("gemma-2-2b", "2.61 billion", "soft caps on attention"),
        ("Qwen3-30B-A3B", "30.53 billion", "a mixture of experts"),
    ],
)
def test_a_model_without_a_layout_is_refused_with_what_is_known(plan, name, size, block):
    code, printed = plan(name, "--device_name H100")
    assert code == 1
    for known in (block, "has no layout", size, "engine='transformers'", "engine='vllm'", "use_peft=True"):
        assert known in printed


def test_a_model_that_is_not_found_needs_its_configuration_only(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("Qwen/Qwen2.5-7B-that-is-not-cached", str(tmp_path)):
        assert main(["plan", "--model_name_or_path", name, "--device_name", "H100"]) == 1
        printed = words(capsys.readouterr().err)
        assert (
            "config.json and no weights" in printed and "give the directory as model_name_or_path" in printed
        )


def test_without_a_gpu_it_is_said_what_to_give(plan):
    code, printed = plan("Qwen2.5-7B")
    assert code == 0
    assert printed.startswith("No GPU here: Qwen2.5-7B, ") and "Fits" not in printed
    assert "GiB on the CPU; how long a step takes there is not known." in words(printed)
    assert "give --device_name (such as H100) or --device_memory_gib." in words(printed)
    code, printed = plan("Qwen2.5-7B", "--device_memory_gib 200")
    assert code == 0 and printed.startswith("Fits: ") and "of the 200.00 GiB of the device" in words(printed)
    assert "Speed: unknown" in printed


def test_several_gpus_are_planned_together(plan, numbers):
    asked = "--num_gpus 8 --gpu H100"
    code, printed = plan("Qwen3-32B", asked)
    assert code == 0 and re.match(r"Fits: .* of the 79\.10 GiB of each of 8 H100; ", printed)
    assert "Sharding: shard=8, every 8 GPUs share one copy of the weights" in words(printed)
    assert "shard=1 does not fit" in words(printed) and "shard=8 fits" in words(printed)
    _, result = numbers("Qwen3-32B", asked)
    assert (result["num_gpus"], result["num_nodes"]) == (8, 1)
    assert result["num_weight_parts"] == 8 and result["num_optimizer_parts"] == 1
    step = result["expected_step"]
    assert step["seconds"] == pytest.approx(step["rollout_s"] + step["train_s"] + step["exchange_s"])
    # The optimizer waits on the host, and its masters are an eighth of four bytes for each parameter.
    masters = result["num_parameters"] * 4 / 8
    assert rows_of(result)["float32 masters"] == pytest.approx(masters, rel=1e-3)
    assert f"8 × {3 * masters / 2**30:.2f} GiB on each node" in words(printed)
    # As many completions of every GPU, of which whole groups need not be on one.
    _, more = numbers("Qwen3-32B", "--num_gpus 16 --gpu H100 --generation_batch_size 4096")
    assert more["num_nodes"] == 2 and more["step_tokens"] == result["step_tokens"]


def test_the_option_shard_is_kept_or_refused(plan, numbers):
    asked = "--num_gpus 8 --gpu H100 --use_peft"
    _, result = numbers("Qwen3-32B", f"{asked} --shard 4")
    assert (result["num_weight_parts"], result["num_optimizer_parts"]) == (4, 2)
    _, none = numbers("Qwen3-32B", f"{asked} --shard none")
    assert (none["num_weight_parts"], none["num_optimizer_parts"]) == (1, 1)
    assert rows_of(none)["moments"] == 2 * rows_of(result)["moments"]
    code, printed = plan("Qwen2.5-7B", f"{asked} --shard 8")
    assert (
        code == 1
        and "28 attention heads cannot be divided by 8. Set shard=auto, or one of 1, 2, 4." in printed
    )
    code, printed = plan("Qwen2.5-7B", f"{asked} --engine transformers --shard 2")
    assert code == 1 and "engine='transformers' reads whole weights" in words(printed)
    _, generating = numbers("Qwen2.5-7B", f"{asked} --engine transformers")
    assert generating["num_weight_parts"] == 1


def test_more_gpus_are_advice_that_can_be_followed(plan):
    code, printed = plan("Qwen2.5-7B", "--gpu H100")
    (num_gpus,) = re.findall(r"it fits --num_gpus (\d+):", words(printed))
    assert code == 3 and num_gpus == "2"
    code, printed = plan("Qwen2.5-7B", f"--gpu H100 --num_gpus {num_gpus}")
    assert code == 0 and "optimizer on the host but for its step" in words(printed)
    code, printed = plan("Qwen2.5-7B", "--gpu H100 --num_gpus 6 --num_nodes 4")
    assert code == 1 and "6 GPUs cannot be divided among 4 nodes" in words(printed)


def test_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed = words(capsys.readouterr().out)
    assert "0 the run fits" in printed and "3 it does not fit" in printed and "1 an error" in printed


@pytest.mark.parametrize(
    "options",
    ["--device_name RTX4090", "--device_name RTX4090 --use_peft", "--verbose", "--gpu H100 --num_gpus 4"],
)
def test_nothing_is_wider_than_a_narrow_console(plan, options):
    _, printed = plan("Qwen2.5-7B", options, columns=60)
    lines = [line for line in printed.splitlines() if "gemm_4bit" not in line]
    assert all(len(line) <= 60 for line in lines)
