"""TRL's scripts that call tools and play in environments, with nothing changed but the import.

The models that the scripts name are directories here, with random models of characters; what they write is
put in their place, so that games are really played. OpenEnv's clients keep the games themselves.
"""

import json
import re
import sys
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
from datasets import Dataset
from test_trl_scripts import OPTIONS, run_script

import colocate
import openenv_clients
from colocate import GRPOConfig, GRPOTrainer
from colocate.run import build
from tiny import StubEngine, logged, make_model
from tool_chat import call, make_chat_tokenizer

SCRIPTS = Path(__file__).parents[1] / "trl_scripts"
TOKENIZER = make_chat_tokenizer()
STOP = TOKENIZER.eos_token_id
MAX_POSITION = 32768
SMALL = dict(
    output_dir="out",
    use_cpu=True,
    bf16=False,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    max_tokens_per_microbatch=4096,
)
"""What the scripts cannot be told on their command lines."""


class LongStub(StubEngine):
    _max_len = MAX_POSITION


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Runs a script whose model writes what a function says: (text so far, member of the group) -> text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a script adds to it
    monkeypatch.setattr(openenv_clients.Client, "urls", set())
    for name, module in openenv_clients.modules().items():
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, module))

    def run(script, model, write, *arguments, **options):
        ends = dict(vocab_size=len(TOKENIZER), eos_token_id=STOP, max_position_embeddings=MAX_POSITION)
        heads = dict(num_attention_heads=1, num_key_value_heads=1)  # conversations are long
        make_model(num_hidden_layers=1, **heads, **ends).save_pretrained(model)
        TOKENIZER.save_pretrained(model)

        def complete(prompt, member):
            text = TOKENIZER.decode(prompt.token_ids)
            return [*TOKENIZER(write(text, member))["input_ids"], STOP]

        trainers = []

        def make_trainer(**given):
            trainers.append(GRPOTrainer(**given))
            return trainers[-1]

        monkeypatch.setattr(build, "build_engine", lambda *_: LongStub(complete))
        monkeypatch.setattr(colocate, "GRPOTrainer", make_trainer, raising=False)
        if options:
            changed = {**SMALL, **options}
            monkeypatch.setattr(
                colocate, "GRPOConfig", lambda **given: GRPOConfig(**{**given, **changed}), raising=False
            )
        run_script(SCRIPTS / f"{script}.py", arguments, monkeypatch)
        (trainer,) = trainers
        assert all(norm > 0 for norm in logged(trainer, "grad_norm"))
        return trainer

    return run


def answers(text):
    """What tools have answered so far."""
    return [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]


def test_echo(play):
    def write(text, member):
        return f"It said {answers(text)[-1]}." if answers(text) else call("echo", message="x" * (member + 1))

    trainer = play("echo", "Qwen/Qwen3-0.6B", write, max_steps=2)
    assert openenv_clients.Client.urls == {"https://qgallouedec-echo-env.hf.space"}
    assert logged(trainer, "reward") == [pytest.approx(0.45)]  # 0.1 a character, 1 to 8 of them
    assert logged(trainer, "tools/call_frequency") == [1.0] and trainer.state.global_step == 2
    assert logged(trainer, "tools/failure_frequency") == [0.0]


def catch(text, member):
    """Members of even numbers follow the ball; the others stay where they are."""
    seen = text.rsplit("<|im_start|>", 2)[-2]
    direction = re.search(r"column\(s\) to the (LEFT|RIGHT)", seen)
    if direction is None or member % 2:
        return call("stay")
    return call("move", direction=direction[1].lower())


def test_catch(play):
    trainer = play("catch", "Qwen/Qwen2.5-0.5B-Instruct", catch, max_steps=1, gradient_accumulation_steps=4)
    assert openenv_clients.Client.urls == {openenv_clients.CONTAINER_URL}
    assert logged(trainer, "reward") == [0.5]  # those who follow the ball catch it
    assert logged(trainer, "tools/call_frequency") == [9.0]  # the ball falls 9 rows, and the game ends itself
    assert logged(trainer, "tools/failure_frequency") == [0.0]


def test_sudoku(play):
    def write(text, member):
        seen = text.rsplit("<|im_start|>", 2)[-2]
        if member == 3:
            return "I give up." if answers(text) else call("place", row=1, col=2, number=9)
        if "Game over." in seen:  # the script's environment has no `done`: the model goes on
            return "Solved."
        row, col, number = map(int, re.search(r"GUARANTEED MOVES: \[(\d) (\d) (\d)]", seen).groups())
        return call("place", row=row, col=col, number=number)

    Path("rules.txt").write_text("Each digit is once in each row, column and box.", encoding="utf-8")
    sizes = ("--per-device-batch-size", "4", "--num-generations", "4", "--gradient-accumulation-steps", "1")
    given = (*sizes, "--dataset-size", "2", "--system-prompt-path", "rules.txt")
    trainer = play("sudoku", "Qwen/Qwen3-1.7B", write, *given, max_steps=-1)
    assert openenv_clients.Client.urls == {"https://openenv-sudoku.hf.space"}
    assert trainer.state.global_step == 2
    # Three members fill both cells; the last one's single move goes to a cell that is not empty.
    for name, mean in {
        "empty_cell": 0.5, "valid_moves": 5 / 8, "repetition": 0.0, "progress": 0.75, "correct": 0.75
    }.items():  # fmt: skip
        assert logged(trainer, f"rewards/reward_{name}/mean") == pytest.approx([mean] * 2), name
    assert logged(trainer, "tools/call_frequency") == [7 / 4] * 2


def test_2048(play):
    scores = []

    def write(text, member):
        seen = answers(text)
        if len(seen) <= member:
            return call("move", direction=("left", "down", "right", "up")[len(seen) % 4])
        scores.append(float(re.match(r"score=([\d.]+)", seen[-1])[1]))
        return "That was it."

    trainer = play("grpo_2048", "Qwen/Qwen3-4B", write, max_steps=2)
    assert logged(trainer, "tools/call_frequency") == [4.5, 4.5]  # 1 to 8 moves
    assert logged(trainer, "reward") == pytest.approx([sum(scores[:8]) / 8, sum(scores[8:]) / 8])
    assert sum(scores) > 0 and "lora" in next(iter(trainer.model.peft_config.values())).peft_type.lower()


def test_several_environments(play):
    games = []

    def write(text, member):
        if "expert Wordle solver" not in text:
            games.append("catch")
            return catch(text, member)
        games.append("wordle")
        if answers(text) and member:
            return "I give up."
        return call("guess", guess="[crane]" if answers(text) else "[slate]")

    sizes = dict(
        max_steps=2, per_device_train_batch_size=8, num_generations=2, max_completion_length=2048
    )  # a token is a character
    trainer = play("multi_env", "Qwen/Qwen3-1.7B", write, **sizes)
    assert {*games} == {"wordle", "catch"}
    hosts = {"https://openenv-wordle.hf.space", "https://openenv-openspiel-env.hf.space"}
    assert openenv_clients.Client.urls == hosts
    # A mean is over the episodes of a function's game: one of two finds the word, or catches the ball.
    assert {*logged(trainer, "rewards/wordle_reward/mean")} == {0.5}
    assert {*logged(trainer, "rewards/catch_reward/mean")} == {0.5}
    assert logged(trainer, "reward") == [0.5, 0.5]
    num_catches, num_words = games.count("catch") / 18, games.count("wordle") / 4
    assert num_catches + num_words == 8  # groups in two steps: 9 turns or 2 for each of both members
    assert sum(logged(trainer, "tools/call_frequency")) == (18 * num_catches + 3 * num_words) / 8


GENES = [("JNKK", "P53"), ("MAPKK4", "P53")]


def test_an_agent_with_a_database(play, monkeypatch):
    def load_dataset(path, *, split):
        rows = {
            "qgallouedec/biogrid": [{"Interactor A": a, "Interactor B": b} for a, b in GENES],
            "qgallouedec/biogrid_qa": [
                {"question": "Does the gene JNKK interact with P53?", "answer": "Yes"},
                {"question": "Which genes interact?", "answer": "JNKK"},
            ]
            * 4,
        }
        return Dataset.from_list(rows[path])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    read = []

    def write(text, member):
        if answers(text):
            read.append((member, answers(text)[-1]))
            return "*Yes*"
        condition = "WHERE Interactor_A = 'JNKK'"
        return [
            call("query_biogrid", sql_command=f"SELECT Interactor_B FROM interactions {condition}"),
            call("query_biogrid", sql_command="SELECT missing FROM interactions"),
            call("query_biogrid", sql_command="DELETE FROM interactions"),
            "*No*",
        ][member]

    options = [*OPTIONS, "--max_completion_length", "400", "--log_completions", "True"]
    trainer = play("grpo_agent", "model", write, "--model_name_or_path", "model", *options)
    expected = {0: "[('P53',)]", 1: "no such column: missing", 2: "readonly database"}
    assert len(read) == 6 and all(expected[member] in answer for member, answer in read)
    assert logged(trainer, "rewards/correctness_reward/mean") == pytest.approx([(3 * 0.6 - 1) / 4] * 2)
    assert logged(trainer, "rewards/structure_reward/mean") == pytest.approx([3 * 0.1 / 4] * 2)
    # A query with WHERE earns 0.4, and its rows, which are a list here as in TRL, 2. A query without WHERE
    # loses 0.5, and an answer without rows 1.5.
    query = (0.4 + 2 - 2 * (0.5 + 1.5) - 1.5) / 4
    assert logged(trainer, "rewards/query_reward/mean") == pytest.approx([query] * 2)
    table = pyarrow.parquet.read_table("out/completions/completions_00001.parquet").to_pylist()
    assert table[0]["completion"][1]["content"] == '[["P53"]]'
    asked = table[1]["completion"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(asked) == {"sql_command": "SELECT missing FROM interactions"}
    assert logged(trainer, "tools/call_frequency") == [0.75] * 2
    assert logged(trainer, "tools/failure_frequency") == pytest.approx([2 / 3] * 2)
