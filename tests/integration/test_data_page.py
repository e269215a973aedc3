"""docs/data.md: its run files train, on small local data, and its examples do what they say."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

import colocate
from colocate.cli import main
from colocate.config.run_config import RunConfig
from colocate.reporting.learning_watch import NUM_COMPLETIONS, NUM_ROLLOUTS, NUM_UNREWARDED
from colocate.rewards import accuracy_reward, get_reward_function
from colocate.rewards.base import RewardFunctions
from colocate.run import build
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, StubEngine, character_tokenizer, make_model, make_trainer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
OPTIONS = """
    --num_generations 4 --per_device_train_batch_size 8 --per_device_eval_batch_size 8 --max_steps 3
    --eval_steps 3 --logging_steps 1 --use_cpu --disable_tqdm --save_strategy no --max_completion_length 40
    --output_dir out
"""
SMALL = OPTIONS.split()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


GSM8K, MIXTURE, REWARDS, REWARD_MODEL, JUDGED = blocks("yaml")
MIXED_IN_PYTHON, REWARD_FILE, JUDGE_FILE = blocks("python")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A tiny chat model, and data of GSM8K's and MATH's form."""
    monkeypatch.chdir(tmp_path)
    characters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = character_tokenizer([*SPECIAL_TOKENS], characters, unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained("model")
    make_model(vocab_size=len(tokenizer), bos_token_id=None).save_pretrained("model")
    for split, number in (("train", 12), ("test", 4)):
        rows = [
            {"question": f"Tom has {n} eggs and buys {n + 2}. How many?",
             "answer": f"He has {n}+{n + 2}=<<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2} eggs.\n#### {2 * n + 2}"}
            for n in range(1, number + 1)
        ]  # fmt: skip
        write_rows(tmp_path / "gsm8k" / f"{split}.jsonl", rows)
    write_rows(tmp_path / "gsm8k" / "train.jsonl", [
        *map(json.loads, (tmp_path / "gsm8k" / "train.jsonl").read_text().splitlines()),
        {"question": "Why? " * 120, "answer": "#### 0"},
    ])  # fmt: skip
    math = [
        {
            "problem": f"Compute ${n}^2$.",
            "level": "1",
            "type": "a",
            "solution": f"It is $\\boxed{{{n * n}}}$.",
        }
        for n in range(1, 9)
    ]
    write_rows(tmp_path / "math" / "train.jsonl", math)
    return tmp_path


def local(text: str) -> str:
    """A run file with what stands here in place of what is on the Hub."""
    text = text.replace("openai/gsm8k", "gsm8k").replace("DigitalLearningGmbH/MATH-lighteval", "math")
    return re.sub(r"^ *(dataset_)?config: main\n", "", text, flags=re.MULTILINE).replace(
        "Qwen/Qwen2.5-1.5B-Instruct", "model"
    )


def answering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes every other member of a group answer right; returns the prompts that it will see."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    prompts: list[str] = []

    def complete(prompt: Any, member: int) -> list[int]:
        text = tokenizer.decode(prompt.token_ids)
        prompts.append(text)
        if numbers := re.findall(r"has (\d+) eggs and buys (\d+)", text):
            answer = sum(map(int, numbers[0]))
        else:
            answer = int(re.findall(r"\$(\d+)\^2", text)[0]) ** 2
        wrong = member % 2
        return [*tokenizer(f"\\boxed{{{answer + wrong}}}")["input_ids"], tokenizer.eos_token_id]

    monkeypatch.setattr(build, "build_engine", lambda *_: StubEngine(complete))
    return prompts


def logged(name: str) -> list[float]:
    records = map(json.loads, Path("out/metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if name in record]


def test_gsm8k_trains_an_adapter_from_the_run_file_alone(directory, monkeypatch, capsys):
    prompts = answering(monkeypatch)
    Path("run.yaml").write_text(local(GSM8K))
    assert main(["train", "run.yaml", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "left out  1 of 13 prompts of 'gsm8k': 1 with more than 512 tokens" in printed
    assert "prompts   12 rows; to evaluate on: 4 rows" in printed
    # Half of the answers are right, and the solution is what stands behind ####.
    assert logged("rewards/accuracy_reward/mean") == [0.5] * 3 and logged("eval_reward") == [0.5]
    assert Path("out/adapter_model.safetensors").is_file()
    assert prompts[0].startswith(
        "<|im_start|>system\nThink step by step. Put the final answer into \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nTom has "
    )
    assert not Path("out/warnings.jsonl").exists()
    # The run's own file repeats the run.
    assert main(["train", "out/config.yaml", "--max_steps", "1", "--output_dir", "again"]) == 0


def test_a_mixture_from_a_run_file_has_its_shares(directory, monkeypatch, capsys):
    prompts = answering(monkeypatch)
    text = local(MIXTURE) + "model_name_or_path: model\nreward_funcs: [accuracy_reward]\n"
    Path("run.yaml").write_text(f"{text}eval_strategy: steps\nmax_prompt_tokens: 512\n")
    assert main(["train", "run.yaml", *SMALL, "--steps_per_generation", "5", "--max_steps", "5"]) == 0
    assert "data      gsm8k (0.7), math (0.3)" in capsys.readouterr().out
    trained = prompts[: 10 * 4]
    of_math = [prompt for prompt in trained if "Compute $" in prompt]
    assert len(of_math) == 3 * 4 and all("$.\nSimplify the result.<|im_end|>" in prompt for prompt in of_math)
    assert set(logged("reward") + logged("eval_gsm8k_reward")) == {0.5}


def test_a_mixture_in_python(directory, monkeypatch):
    monkeypatch.setattr(
        colocate,
        "GRPOTrainer",
        lambda args, model, **arguments: make_trainer(
            directory, **arguments, dataset_weights=args.dataset_weights, max_steps=4
        ),
    )
    names: dict[str, Any] = {}
    exec(MIXED_IN_PYTHON, names)
    batches = [next(names["trainer"].run.batches).rows[0]["dataset"] for _ in range(4)]
    assert sorted(batches) == ["easy", "hard", "hard", "hard"]


def test_the_rewards_of_the_page(directory):
    (Path("rewards.py")).write_text(REWARD_FILE)
    options = yaml.safe_load(REWARDS)
    first, second = map(get_reward_function, options["reward_funcs"])
    assert first is accuracy_reward and len(options["reward_weights"]) == 2
    replies = [[{"role": "assistant", "content": text}] for text in ("Sorry, no.", "72")]
    assert second(completions=replies) == [0.0, 0.2]


def test_a_reward_model_comes_first(directory, monkeypatch, capsys):
    answering(monkeypatch)
    Path("rewards.py").write_text(REWARD_FILE)
    options = yaml.safe_load(REWARD_MODEL)
    name = options["reward_model_name_or_path"]
    tokenizer = AutoTokenizer.from_pretrained("model")
    config = Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1,
        max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    scorer = Qwen3ForSequenceClassification(config)
    scorer.save_pretrained("scorer")
    tokenizer.save_pretrained("scorer")
    text = re.sub(r"^reward_funcs.*\n", "", local(GSM8K), flags=re.MULTILINE)
    Path("run.yaml").write_text(text + REWARD_MODEL.replace(name, "scorer"))
    options = ["--log_completions", "--eval_strategy", "no"]
    assert main(["train", "run.yaml", *SMALL, *options]) == 0
    assert "rewards   scorer, rewards.py:has_no_apology\n" in capsys.readouterr().out
    # What the model says of the pair, read by its own template, at the last token.
    row = pd.read_parquet(next(Path("out/completions").glob("*.parquet"))).iloc[0]
    messages = [*row["prompt"], *row["completion"]]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
    assert row["scorer"] == pytest.approx(scorer(ids).logits.item(), abs=1e-5)


class Judge(BaseHTTPRequestHandler):
    """A chat service that gives the length of the answer as its grade, and waits until it has four calls."""

    together = threading.Barrier(4)
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.together.wait(30)
        answer = body["messages"][0]["content"].rpartition("Answer: ")[2]
        reply = "no idea" if answer == "?" else f"{len(answer)}."
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        content = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_judge_grades_all_completions_at_once(directory, monkeypatch):
    Path("judge.py").write_text(JUDGE_FILE)
    options = yaml.safe_load(JUDGED)
    (name,) = options["reward_funcs"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        monkeypatch.setenv("JUDGE_MODEL", "large")
        rewards = RewardFunctions([get_reward_function(name)], timeout_s=options["reward_timeout_s"])
        answers = [[{"role": "assistant", "content": text}] for text in ("four", "?", "eleven chars", "")]
        questions = [[{"role": "user", "content": "Why?"}]] * 4
        table = rewards.score(questions, answers, [[1]] * 4, {}, None)
        server.shutdown()
    assert torch.equal(table.rewards[[0, 2, 3], 0], torch.tensor([0.4, 1.0, 0.0]))
    assert table.rewards[1, 0].isnan()  # no grade
    assert {(body["model"], body["temperature"]) for body in Judge.asked} == {("large", 0)}


def test_what_counts_as_an_answer():
    table = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (1|0|none)\b", PAGE, flags=re.MULTILINE)
    assert len(table) == 7
    for completion, solution, reward in table:
        expected = None if reward == "none" else float(reward)
        assert accuracy_reward([completion], [solution]) == [expected], completion


def test_options_and_numbers_of_the_page_are_those_of_the_code():
    rows = re.findall(r"^\| (`[a-z_]+.*?) \| ", PAGE.partition("## Several")[0], flags=re.MULTILINE)
    known = {*vars(RunConfig)["__dataclass_fields__"], "apply_chat_template"}
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)[:`]", row)}
    assert named <= known and len(named) >= 10
    assert f"for {NUM_ROLLOUTS} rollouts in a row, and at least {NUM_COMPLETIONS} completions" in PAGE
    assert (
        f"for {NUM_UNREWARDED * NUM_ROLLOUTS} rollouts and {NUM_UNREWARDED * NUM_COMPLETIONS} completions"
        in PAGE
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--prompt_column", "problem"],
            "names the column 'problem', which 'gsm8k' does not have; it has 'question', 'answer'",
        ),
        (
            ["--columns", "{}"],
            "'accuracy_reward' needs the argument 'solution', but the dataset has no such column; its "
            "columns are 'prompt', 'answer'. Rename a column (in a run file, columns: {<column>: solution})",
        ),
        (["--prompt_template", "{question}"], "both say what the prompt is"),
        (["--max_prompt_tokens", "3"], "max_prompt_tokens=3 leaves no row of 'gsm8k': its 13 prompts have"),
        (["--apply_chat_template", "false"], "system_prompt is a message, which only a chat template puts"),
        (["--datasets", "[{name: gsm8k}]"], "datasets and dataset_name both name the data"),
        (["--test_split_size", "5", "--eval_dataset_name", "gsm8k"], "eval_dataset_name and test_split_size"),
        (["--test_split_size", "50"], "test_split_size=50 of 12 rows leaves none"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(options, message, directory, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(build, "prepare_model", refuse)
    Path("run.yaml").write_text(local(GSM8K))
    assert main(["train", "run.yaml", *SMALL, *options]) == 1
    assert message in capsys.readouterr().err


def test_rows_are_held_out_of_a_single_file(directory, monkeypatch, capsys):
    answering(monkeypatch)
    Path("run.yaml").write_text(local(GSM8K))
    options = ["--dataset_name", "gsm8k/train.jsonl", "--test_split_size", "0.25", "--max_rows", "8"]
    assert main(["train", "run.yaml", *SMALL, *options, "--max_steps", "1", "--eval_steps", "1"]) == 0
    assert "prompts   6 rows; to evaluate on: 2 rows" in capsys.readouterr().out
