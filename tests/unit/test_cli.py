"""The command line: what it reads, what it passes on, how it fails. The trainer is a stand-in."""

import dataclasses
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, Qwen2Config

from colocate.cli import main
from colocate.config.grpo_config import GRPOConfig
from colocate.config.run_config import RunConfig, parse_run, read_values, run_options
from colocate.config.saved_run import RunFileWriter, resolved, save_run
from colocate.data import mixture
from colocate.options.run_file import LAUNCH, read_file, read_overrides
from colocate.options.values import coerce
from colocate.rewards import accuracy_reward

# ── Reading options ──────────────────────────────────────────────────────────────────────────────────────


def test_overrides():
    arguments = (
        "--learning_rate 2e-6 --max_steps -1 --use-peft --reward_funcs a b.c --report_to=none "
        "--run_name=a=b --log_completions"
    )
    assert read_overrides(arguments.split()) == {
        "learning_rate": "2e-6",
        "max_steps": "-1",
        "use_peft": True,
        "reward_funcs": ["a", "b.c"],
        "report_to": "none",
        "run_name": "a=b",
        "log_completions": True,
    }


def test_the_command_line_wins_over_the_file_under_either_name_of_an_option(tmp_path):
    file = tmp_path / "run.yaml"
    for alias, name in (("vllm_server_port", "rollout_server_port"), ("warmup_ratio", "warmup_steps")):
        for one, other in ((alias, name), (name, alias), (name, name)):
            file.write_text(f"{one}: 0.5\nseed: 3\n")
            assert read_values([str(file), f"--{other}", "0.25"])[1] == {"seed": 3, other: "0.25"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-lr 3", "'-lr' has one dash, and options have two: write --lr"),
        ("max_steps=3", "'max_steps=3' follows no option; write --max_steps=3"),
        ("b.yaml", "A run file comes first, and there is one: colocate train b.yaml --option value"),
        ("b", "'b' follows no option; write --name b"),
    ],
)
def test_words_that_follow_no_option_are_told_what_to_write(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_overrides(words.split())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "2e-6", 2e-6),
        ("learning_rate", "1", 1.0),
        ("max_steps", "-1", -1),
        ("max_steps", "1e3", 1000),
        ("report_to", "none", None),
        ("report_to", "wandb", ["wandb"]),
        ("report_to", "[wandb, tensorboard]", ["wandb", "tensorboard"]),
        ("reward_weights", "[1, 2e-1]", [1.0, 0.2]),
        ("reward_weights", "0.5", [0.5]),
        ("chat_template_kwargs", '{"enable_thinking": false}', {"enable_thinking": False}),
        ("generation_kwargs", "{min_p: 1e-2}", {"min_p": 0.01}),
        ("scale_rewards", "false", False),
        ("scale_rewards", "none", "none"),
        ("bf16", "true", True),
        ("bf16", "none", None),
        ("shuffle_dataset", "no", False),
        ("eval_strategy", "no", "no"),
        ("lr_scheduler_type", "cosine", "cosine"),
        ("pad_to_multiple_of", "8", 8),
        ("pad_to_multiple_of", "auto", "auto"),
        ("resume_from_checkpoint", "true", True),
        ("resume_from_checkpoint", "out/checkpoint-5", "out/checkpoint-5"),
        ("resume_from_checkpoint", "auto", "auto"),
        ("run_name", "5", "5"),
        ("lora_target_modules", "all-linear", ["all-linear"]),
        ("dtype", "bfloat16", "bfloat16"),
        ("dataset_options", "{size: 10}", {"size": 10}),
        ("dataset_name", "none", None),
    ],
)
def test_values_take_their_options_type(name, text, value):
    run, options = parse_run({name: text})
    read = options[name] if name in options else getattr(run, name)
    assert read == value
    assert isinstance(read, type(value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", 1.5),
        ("max_steps", "many"),
        ("top_k", True),
        ("use_peft", "maybe"),
        ("dtype", "float8"),
        ("loss_type", ["grpo", "dapo"]),
        ("reward_weights", ["a"]),
    ],
)
def test_values_of_the_wrong_type_name_the_option(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        parse_run({name: value})


def test_run_file_reads_numbers_and_words_as_written(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 2e-6\neval_strategy: no\nreport_to: none\nreward_weights: [1e-1, 1]\n")
    _, options = parse_run(read_file(path))
    assert options["learning_rate"] == 2e-6
    assert options["eval_strategy"] == "no"
    assert options["report_to"] is None
    assert options["reward_weights"] == [0.1, 1.0]


@pytest.mark.parametrize("text", [b"- a\n- b\n", b"just words", b"a: [", b"1: 2", b"a: \xff", b"a: 1\na: 2"])
def test_a_file_that_is_no_mapping_is_refused(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"run\.yaml"):
        read_file(path)


words = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=12)


@settings(max_examples=40)
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "learning_rate": st.floats(1e-9, 1.0),
            "run_name": words.filter(lambda w: w.lower() not in ("none", "null", "~")),
            "max_steps": st.integers(-1, 10**6),
            "log_completions": st.booleans(),
            "reward_weights": st.none() | st.lists(st.floats(-2, 2), min_size=1),
            "report_to": st.sampled_from(["none", "wandb", ["tensorboard", "wandb"]]),
            "model_init_kwargs": st.dictionaries(words, st.booleans() | st.integers() | words, max_size=2),
            "eval_strategy": st.sampled_from(["no", "steps"]),
            "scale_rewards": st.sampled_from([True, False, "none", "batch"]),
        },
    )
)
def test_a_saved_run_reads_back_the_same(options, tmp_path_factory):
    run, parsed = parse_run({"model_name_or_path": "m", "lora_target_modules": ["q", "v"], **options})
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    save_run(path, run, parsed)
    run_again, parsed_again = parse_run(read_file(path))
    assert run_again == run
    assert {name: parsed_again[name] for name in parsed} == parsed
    # The default "none" is read back as None, which means the same to GRPOConfig.
    same = {"report_to": parsed.get("report_to")}
    assert resolved(run_again, parsed_again) | same == resolved(run, parsed) | same


def test_a_saved_run_holds_defaults_but_no_secrets_and_nothing_derived(tmp_path):
    run, options = parse_run({"hub_token": "secret", "resume_from_checkpoint": "x", "num_generations": 4})
    save_run(tmp_path / "config.yaml", run, options)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved["num_generations"] == 4 and saved["loss_type"] == "dapo"
    assert saved["generation_batch_size"] is None and saved["bf16"] is None
    assert "resume_from_checkpoint" not in saved and "secret" not in yaml.dump(saved)
    values = read_file(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="hub_token='<HUB_TOKEN>': that stands for a secret"):
        parse_run(values)
    _, again = parse_run({**values, "hub_token": "another"})
    GRPOConfig(**again)


@pytest.mark.parametrize(
    ("given", "meant"), [("all-linear", "all-linear"), ("q_proj", ["q_proj"]), ("none", None)]
)
def test_lora_targets_as_peft_takes_them(given, meant):
    assert parse_run({"lora_target_modules": given})[0].lora_targets == meant


def test_coerce_prefers_the_narrowest_type():
    assert coerce("x", "3", int | str) == 3
    assert coerce("x", "three", int | str) == "three"
    assert coerce("x", 0.5, float | None) == 0.5


COMPLETE = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "think_format_reward"]

# ── train ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the parts that `train` puts together; returns what they were called with."""
    record = types.SimpleNamespace(datasets=[], trained=[], saved=[], trainer=None)

    class Trainer:
        def __init__(self, **arguments):
            record.trainer = arguments

        def train(self, resume_from_checkpoint):
            record.trained.append(resume_from_checkpoint)
            for callback in record.trainer["callbacks"]:
                callback.on_step_end(None, types.SimpleNamespace(is_world_process_zero=True), None)

        def save_model(self, path):
            record.saved.append(path)

    def load_prompts(name, *, config=None, split="train", **options):
        record.datasets.append((name, config, split, options))
        return datasets.Dataset.from_dict({"prompt": [f"{name}/{split}"]})

    module = types.ModuleType("colocate.trainer")
    module.GRPOTrainer = Trainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(mixture, "load_prompts", load_prompts)
    return record


def test_train_passes_everything_on_and_its_saved_file_repeats_the_run(calls, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def brevity(completions, **kwargs):\n    return [0.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"""
        model_name_or_path: tiny
        dataset_name: gsm8k
        dataset_config: main
        dataset_options: {{limit: 10}}
        reward_funcs: [accuracy_reward, my_rewards.brevity, {tmp_path}/my_rewards.py:brevity]
        use_peft: true
        lora_r: 4
        learning_rate: 5e-6
        output_dir: {tmp_path}/out
        """
    )
    arguments = ["--learning_rate", "2e-6", "--eval_strategy=epoch", "--dtype", "bfloat16", "--beta", "0.1"]
    assert main(["train", str(run_file), *arguments]) == 0

    given, config = calls.trainer, calls.trainer["args"]
    assert given["model"] == "tiny"
    assert (config.learning_rate, config.beta) == (2e-6, 0.1)
    assert config.model_init_kwargs == {"revision": "main", "dtype": "bfloat16"}
    assert given["peft_config"].r == 4
    assert given["train_dataset"]["prompt"][:] == ["gsm8k/train"]
    assert given["eval_dataset"]["prompt"][:] == ["gsm8k/test"]
    assert calls.datasets[0] == ("gsm8k", "main", "train", {"limit": 10})
    built_in, dotted, by_file = given["reward_funcs"]
    assert built_in is accuracy_reward
    assert dotted([]) == by_file([]) == [0.0]
    assert calls.trained == [None] and calls.saved == [f"{tmp_path}/out"]

    assert main(["train", f"{tmp_path}/out/config.yaml", "--resume_from_checkpoint"]) == 0
    assert calls.trainer["args"].to_dict() | {"resume_from_checkpoint": None} == config.to_dict()
    assert calls.trained == [None, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_steps"], "max_steps needs a value: --max_steps VALUE"),
        (["--report_to", "no_such_wandb,swanlab"], "needs the package swanlab: pip install swanlab"),
        (["--learning_rat", "1"], "There is no option 'learning_rat'; did you mean 'learning_rate'?"),
        (["--dataset_name", "d", "--reward_funcs", "think_format_reward"], "model_name_or_path is not set"),
        (["--model_name_or_path", "m", "--dataset_name", "d"], "reward_funcs is not set"),
        (["--model", "m"], "There is no option 'model'; did you mean 'model_name_or_path'?"),
        (
            ["--config", "run.yaml"],
            "There is no option 'config': a run file stands alone, colocate train RUN.yaml",
        ),
        (["--fp16"], "fp16=True is not supported"),
        (["--learning_rate", "fast"], "learning_rate='fast' is not a number."),
        (["--lr_scheduler_type", "a", "b"], "is not one of 'linear', 'cosine'"),
        (["--max_steps", "1.5"], "max_steps='1.5' is not a whole number."),
        (["--per_device_train_batch_size", "3"], "whole number of groups"),
        (["--loss_type", "gpro"], "Did you mean 'grpo'?"),
        (["--reward_funcs", "nowhere.py:f"], "No file 'nowhere.py'"),
        (["--reward_funcs", "json.dumpz"], "'json' has no function 'dumpz'"),
        (["--dataset_name", ""], "dataset_name is not set"),
        (["--ddp_backend", "ncl"], "Did you mean 'nccl'?"),
        (["--datasets", "gsm8k"], "datasets='gsm8k'"),
        (["--datasets", "[{name: a, weight: 2}]", "--dataset_name", ""], "must sum to 1, but 2 = 2"),
        (["--datasets", "[{name: a}]"], "datasets and dataset_name both name the data. Set one of them."),
        (["missing.yaml"], "There is no run file 'missing.yaml' ("),
        (["missing/model"], "There is no run file 'missing/model'; a model is named with"),
        (["."], "There is no run file '.'; that is a directory"),
        (["--max_steps", "inf"], "max_steps='inf' is not finite"),
        (["--model_init_kwargs", "{"], "model_init_kwargs='{' is no mapping that can be read"),
        (["--dataset_options", "{split: x}"], "dataset_options has 'split': set dataset_train_split"),
        (["--lora_r", "0"], "lora_r=0 must be at least 1"),
        (["--model_name_or_path", "runs/of/nobody"], "There is no directory 'runs/of/nobody'"),
    ],
)
def test_user_errors_are_one_message(arguments, message, calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What a case is about overrides what makes the command line complete otherwise.
    about_missing = any(text in message for text in ("is not set", "no run file")) and "" not in arguments
    assert main(["train", *([] if about_missing else COMPLETE), *arguments]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert calls.trained == []

    assert main(["train", *([] if about_missing else COMPLETE), *arguments, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora_r", "8", "--lora_alpha", "16"], "lora_r=8, lora_alpha=16: not read without use_peft."),
        (["--use_bnb_nested_quant"], "use_bnb_nested_quant=True: not read without load_in_4bit."),
        (["--lora_r", "8", "--use_peft"], ""),
        ([], ""),
    ],
)
def test_options_of_a_switch_that_is_off_are_told(options, message, calls, capsys, tmp_path):
    assert main(["train", *COMPLETE, "--output_dir", str(tmp_path), *options]) == 0
    told = capsys.readouterr().err
    assert message in told and bool(message) == ("not read" in told)


def test_errors_of_this_package_are_one_message_and_those_of_others_are_not(
    calls, capsys, tmp_path, monkeypatch
):
    from colocate.checkpoints import sealed

    monkeypatch.chdir(tmp_path)
    trainer = sys.modules["colocate.trainer"].GRPOTrainer
    trainer.train = lambda self, resume_from_checkpoint: sealed.find(True, tmp_path)
    assert main(["train", *COMPLETE, "--resume_from_checkpoint"]) == 1
    assert "leave resume_from_checkpoint out" in capsys.readouterr().err
    trainer.train = lambda self, resume_from_checkpoint: torch.ones(2) @ torch.ones(3)
    with pytest.raises(RuntimeError):
        main(["train", *COMPLETE])


def test_a_run_that_is_refused_overwrites_no_run_file(calls, capsys, tmp_path, monkeypatch):
    def refused(self, resume_from_checkpoint):
        raise ValueError("Another run is writing here")

    file = tmp_path / "config.yaml"
    file.write_text("of the run that is there")
    monkeypatch.setattr(sys.modules["colocate.trainer"].GRPOTrainer, "train", refused)
    assert main(["train", *COMPLETE, "--output_dir", str(tmp_path)]) == 1
    assert "Another run" in capsys.readouterr().err
    assert file.read_text() == "of the run that is there"


def test_an_interruption_says_how_to_go_on(calls, capsys, tmp_path, monkeypatch):
    def interrupted(self, resume_from_checkpoint):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["colocate.trainer"].GRPOTrainer, "train", interrupted)
    assert main(["train", *COMPLETE]) == 130
    printed = capsys.readouterr().err
    assert "--resume_from_checkpoint" in printed and "Traceback" not in printed

    def stopped(self, resume_from_checkpoint):
        raise KeyboardInterrupt("saved, and said so")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["colocate.trainer"].GRPOTrainer, "train", stopped)
        assert main(["train", *COMPLETE]) == 130
        assert capsys.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        main(["train", *COMPLETE, "--debug"])


def test_a_missing_peft_is_named(calls, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["train", *COMPLETE, "--use_peft"]) == 1
    assert "pip install 'peft>=0.18'" in capsys.readouterr().err


# ── plan and report ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def model_dir(tmp_path):
    Qwen2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_plan_as_json(model_dir, capsys):
    arguments = "--json --max_prompt_length 24 --max_completion_length 40 --max_num_seqs 2 --dtype bfloat16"
    assert main(["plan", "--model_name_or_path", model_dir, *arguments.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2  # key and value, layers, heads, head size, bytes
    # Two sequences of 24 + 40 tokens: a page that they share, 3 of their own, and 1 in reserve for each and
    # for their prompt.
    assert result["kv_cache_tokens"] == 16 * (1 + 2 * 3 + 2 + 1)
    assert result["peak_bytes"] == result["resident_bytes"] + max(
        result["rollout_bytes"], result["train_bytes"]
    )
    # On a CPU a micro-batch is per_device_train_batch_size × (24 + 40), at most the step: a prompt once.
    kept = next(row for row in result["rows"] if row["name"] == "kept by layers")
    assert kept["how"].startswith(f"'keep': {24 + 8 * 40} tokens × 2 layers")
    assert result["train_plan"]["activation_policy"] == "keep" and result["expected"] is None


def test_plan_of_a_gpu_counts_the_arenas_scratch(model_dir, capsys):
    from colocate.kernels.decode.attention import DecodeScratch

    arguments = ["plan", "--model_name_or_path", model_dir, "--json", "--device_memory_gib", "80"]
    assert main([*arguments, "--max_num_seqs", "9"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    # Nine sequences decode in a graph of 32 rows, and what the kernels keep is what they ask for.
    scratch_bytes = DecodeScratch.num_bytes(max_num_seqs=32, num_heads=4, num_kv_heads=2, head_dim=8)
    assert rows["decode buffers"]["size_bytes"] == 32 * 96 * 4 + scratch_bytes
    assert rows["decode buffers"]["how"].startswith("32 rows × 96 logits × 4 B")
    # Unless told otherwise the engine makes room for 512 rows, however small the batch.
    assert main(arguments) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["decode buffers"]["how"].startswith("512 rows × 96 logits × 4 B")


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0", "much"])
def test_a_size_that_no_memory_has(size, model_dir, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model_name_or_path", model_dir, "--device_memory_gib", size])
    assert f"--device_memory_gib: {'invalid' if size == 'much' else size}" in capsys.readouterr().err


def words(printed):
    """Without the line breaks of a narrow console."""
    return " ".join(printed.split())


def test_plan_says_when_prompts_are_computed_again(model_dir, capsys):
    command = ["plan", "--model_name_or_path", model_dir, "--device_memory_gib", "80"]
    command += ["--max_prompt_length", "2000", "--max_completion_length", "100"]
    assert main(command) == 0
    assert "each compute its prompt" not in words(capsys.readouterr().out)
    assert main([*command, "--max_tokens_per_microbatch", "2300"]) == 0
    assert "3 × 2,000 + 8 × 100 = 6,800 tokens, 2.4 times the 2,800" in words(capsys.readouterr().out)


def test_plan_for_a_gpu_by_name(model_dir, capsys):
    command = ["plan", "--model_name_or_path", model_dir, "--json"]
    assert main([*command, "--device_name", "NVIDIA A100-SXM4-80GB"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device_memory_bytes"] == int(79.2 * 2**30)
    assert result["expected"]["train_tokens_per_s"] > result["expected"]["rollout_tokens_per_s"] > 0
    for name, message in (("Tesla T4", "compute capability 8.0"), ("MI300", "--device_memory_gib")):
        assert main([*command, "--device_name", name]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "bytes_per_weight"), [("", 2), ("--bf16", 2), ("--bf16 false", 4)])
def test_a_plan_for_a_gpu_that_is_not_here_has_its_precision(capsys, model_dir, options, bytes_per_weight):
    command = ["plan", "--model_name_or_path", str(model_dir), "--json", "--device_name", "H200"]
    assert main([*command, *options.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    weights = next(row for row in result["rows"] if row["name"] == "weights")
    assert weights["size_bytes"] == result["num_parameters"] * bytes_per_weight


def test_plan_obeys_what_is_set_and_says_what_need_not_be(model_dir, capsys):
    options = (
        "--activation_policy full --max_tokens_per_microbatch 2048 --logprob_chunk_size 256 "
        "--offload_optimizer true --gradient_checkpointing true --device_memory_gib 80 --json"
    )
    assert main(["plan", "--model_name_or_path", model_dir, *options.split()]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["train_plan"] == {
        "activation_policy": "full",
        "tokens_per_microbatch": 2048,
        "sequences_per_microbatch": 1,
        "logprob_chunk_size": 256,
        "offload_optimizer": True,
        "keep_softmax": True,
    }
    assert "gradient_checkpointing=True is not needed" in captured.err
    assert main(["plan", "--model_name_or_path", model_dir, "--json"]) == 0
    assert "gradient_checkpointing" not in capsys.readouterr().err


def test_plan_of_a_model_without_a_layout_names_those_that_have_one(tmp_path, capsys):
    GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16).save_pretrained(tmp_path)
    assert main(["plan", "--model_name_or_path", str(tmp_path)]) == 1
    printed = capsys.readouterr().err
    assert "GPT2LMHeadModel has no layout" in printed and "Qwen2ForCausalLM" in printed


def test_qlora_is_planned_and_trained_in_4_bits(model_dir, calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--use_peft", "--load_in_4bit", "--use_bnb_nested_quant", "--bnb_4bit_quant_type", "fp4"]
    assert main(["plan", "--model_name_or_path", model_dir, "--json", *options]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "double quantised" in rows["weights"]["how"] and "dequantised weights" in rows
    train = ["train", "--model_name_or_path", model_dir, "--dataset_name", "d"]
    rewards = ["--reward_funcs", "think_format_reward"]
    assert main([*train, *rewards, *options]) == 0
    quantization = calls.trainer["quantization_config"]
    assert quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant
    assert quantization.bnb_4bit_quant_type == "fp4"
    assert quantization.bnb_4bit_compute_dtype == torch.float32  # that of a model on a CPU
    assert main([*train, *rewards, "--load_in_4bit"]) == 1
    assert "set use_peft" in capsys.readouterr().err


def test_report_prints_where_it_wrote(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "report.html"
    assert capsys.readouterr().out.strip() == str(page) and "<html" in page.read_text()
    assert main(["report", str(tmp_path / "nowhere")]) == 1


# ── The real program ─────────────────────────────────────────────────────────────────────────────────────


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([n, "--help"] for n in ("train", "plan", "chat", "eval", "merge", "export")),
    ],
)
def test_help_and_version_load_no_torch(arguments):
    code = (
        "import sys\nfrom colocate.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "colocate" in result.stdout


@pytest.mark.parametrize(
    "command", ["", "train", "plan", "report", "chat", "eval", "merge", "export", "serve"]
)
@pytest.mark.parametrize("columns", [60, 120])
def test_help_fits_the_terminal(command, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    wide = [line for line in lines if len(line) > columns]
    # A name with its default stays in one piece, and so does a heading.
    assert not [line for line in wide if line.startswith("    ") or not line.endswith((")", ":"))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "runs/a", "--prot", "80"], "unrecognized arguments: --prot 80; did you mean '--port'?"),
        (["eval", "runs/a", "--num_sample=4"], "did you mean '--num_samples'?"),
        (["serve", "runs/a", "--tensor-parallel-size", "2"], "is started by `colocate rollout-serve`"),
    ],
)
def test_an_unknown_option_of_a_command_is_refused_with_the_nearest_one(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr().err
    assert end.value.code == 2 and said in shown
    assert f"usage: colocate {arguments[0]} MODEL" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lerning_rate", "1"], "did you mean 'learning_rate'?"),
        (["run.yaml"], "There is no option 'max_step'; did you mean 'max_steps'?"),
        (["--max_steps"], "max_steps needs a value"),
        (["--loss_type", "grppo"], "loss_type='grppo' is unknown; it is one of grpo, dapo"),
        (["--learning_rate", "-1e-6"], "learning_rate=-1e-06 must not be negative."),
        (["wrong_type.yaml"], "num_generations='four' is not a whole number."),
        (["--model_name_or_path", "m", "--dataset_name", "d"], "reward_funcs is not set"),
    ],
)
def test_what_can_be_refused_at_once_is_refused_before_torch_is_loaded(arguments, said, tmp_path):
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\nmax_step: 3\n")
    (tmp_path / "wrong_type.yaml").write_text("model_name_or_path: m\nnum_generations: four\n")
    code = (
        f"import os, sys\nfrom colocate.cli import main\nos.chdir({str(tmp_path)!r})\n"
        f"assert main({['train', *arguments]!r}) == 1\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert said in result.stderr


def test_the_header_begins_before_torch_is_loaded(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: some/model\ndataset_name: prompts.jsonl\nreward_funcs: [accuracy_reward]\n"
        "output_dir: runs/first\n"
    )
    code = (
        "import os, sys\nfrom colocate.cli import main\n"
        f"os.chdir({str(tmp_path)!r})\nsys.modules['torch'] = None  # whoever loads it fails\n"
        "try: main(['train', 'run.yaml'])\nexcept ImportError: pass"
    )
    printed = python("-c", code).stdout
    for shown in ("train run.yaml", "some/model", "prompts.jsonl", "accuracy_reward", "runs/first"):
        assert shown in printed


def test_a_missing_model_is_told_with_how_its_run_file_says_it_is_made(capsys, monkeypatch, tmp_path):
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(recipe)]) == 1
    printed = capsys.readouterr().err
    assert "There is no directory 'runs/quickstart/model'" in printed and "`make quickstart` runs" in printed


def test_names_known_without_an_import_are_those_of_the_classes():
    names = {f.name for record in (RunConfig, GRPOConfig) for f in dataclasses.fields(record)}
    assert {name for name in names if not name.startswith("_")} == run_options().keys()


def test_a_run_that_was_started_here_is_resumed_by_its_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    writer = RunFileWriter(tmp_path / "runs" / "a b" / "config.yaml", RunConfig(), {})
    assert writer.resume_command == "colocate train 'runs/a b/config.yaml' --resume_from_checkpoint auto"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert writer.resume_command.startswith("torchrun --nproc_per_node 2 -m colocate train 'runs/a b/")
    monkeypatch.setenv(LAUNCH, "--launcher ray --num_nodes 2 --gpus_per_node 8")
    assert writer.resume_command.endswith("auto --launcher ray --num_nodes 2 --gpus_per_node 8")


def test_a_run_directory_that_was_moved_is_not_begun_anew(calls, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *COMPLETE, "--output_dir", "runs/first", "--save_strategy", "no"]) == 0
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "first"
    checkpoint = moved / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    for value in (["auto"], []):
        assert main(["train", "elsewhere/first/config.yaml", "--resume_from_checkpoint", *value]) == 1
        told = capsys.readouterr().err
        assert "output_dir='runs/first', where there is none" in told
        assert "elsewhere/first/checkpoint-5 is beside the run file" in told
        assert "add --output_dir elsewhere/first." in told
    assert len(calls.trained) == 1
    for go_on in (["--output_dir", "elsewhere/first", "--resume_from_checkpoint", "auto"], []):
        assert main(["train", "elsewhere/first/config.yaml", *go_on]) == 0


def test_exit_codes_of_the_program(tmp_path):
    unknown = python("-m", "colocate.cli", "train", "--learning_rat", "1")
    assert unknown.returncode == 1
    # bitsandbytes may say something, too, when PEFT imports it.
    assert "colocate train: There is no option 'learning_rat'; did you mean 'learning_rate'?" in (
        unknown.stderr.splitlines()
    )
    assert python("-m", "colocate.cli", "nonsense").returncode == 2
    assert python("-m", "colocate.cli").returncode == 2


def test_run_config_has_no_name_of_grpo_config():
    shared = {f.name for f in dataclasses.fields(RunConfig)} & {
        f.name for f in dataclasses.fields(GRPOConfig)
    }
    assert shared == set()
