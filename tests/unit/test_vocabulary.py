"""Refusals advise what the command that shows them can do: each of the package, under each command."""

import argparse
import ast
import re
from pathlib import Path

import pytest

import colocate
from colocate.cli import _COMMANDS, _build_parser
from colocate.commands.vocabulary import EQUIVALENTS, TAKE_RUN_OPTIONS, in_words_of
from colocate.config.run_config import run_options

SOURCES = Path(colocate.__file__).parent


def options_of(command: str) -> set[str]:
    (subparsers,) = (a for a in _build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {option for action in subparsers.choices[command]._actions for option in action.option_strings}


def text_of(node: ast.expr) -> str:
    """The text of an expression as far as it is written in the source; values are "7"."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "7"
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "7"


def refusals() -> set[str]:
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found |= {text_of(argument) for argument in node.exc.args}
            elif isinstance(node, ast.JoinedStr):  # parts of messages that are put together elsewhere
                found.add(text_of(node))
    return {text for text in found if len(text.split()) > 3}


REFUSALS = refusals()
IMPERATIVE = r"(?:[Ss]et|[Ll]ower|[Rr]aise|[Gg]ive|[Pp]ass)"


@pytest.mark.parametrize("command", sorted(set(_COMMANDS) - set(TAKE_RUN_OPTIONS)))
def test_no_refusal_advises_an_option_that_the_command_lacks(command):
    assert len(REFUSALS) > 500
    own, names = options_of(command), run_options()
    lacking = {name for name in names if f"--{name}" not in own and "_" in name}
    for text in REFUSALS:
        shown = in_words_of(command, text, own, names)
        if shown == text and not (set(re.findall(r"\w+", text)) & lacking):
            continue
        advised = {word for word in re.findall(rf"\b{IMPERATIVE} (?:--)?(\w+)", shown) if word in lacking}
        # A message that is advice alone is shown as it is: an error must say something.
        assert not advised or shown == text.strip(), (text, shown)


def test_every_equivalent_is_an_option_of_its_command():
    for command, names in EQUIVALENTS.items():
        assert names.keys() <= run_options().keys()
        assert {f"--{name}" for name in names.values()} <= options_of(command)


def shown_by(command: str, text: str) -> str:
    return in_words_of(command, text, options_of(command), run_options())


def test_advice_gets_the_names_of_the_command_or_is_left_out():
    full = (
        "One sequence of 8191 tokens needs 512 pages of KV cache and there are 305. Free memory (the cache "
        "takes at most 50% of what is free), or lower max_completion_length."
    )
    assert shown_by("chat", full) == full.replace("max_completion_length", "--max_tokens")
    assert shown_by("serve", full).endswith(
        "there are 305. Free memory (the cache takes at most 50% of what is free)."
    )
    assert shown_by("train", full) == full
    column = "'t3' has no column 'prompt'; it has 'question'. Set prompt_column to the one with the prompts."
    assert shown_by("eval", column).endswith("Set --prompt_column to the one with the prompts.")
    assert shown_by("chat", "Memory is full. Lower max_num_seqs, or set load_in_4bit.") == (
        "Memory is full. Set --load_in_4bit."
    )
    long = "vllm_max_model_length=17 is too long. Lower vllm_max_model_length to 16, or leave it out."
    for command in ("serve", "rollout-serve"):
        assert shown_by(command, long) == (
            "--max_model_len 17 is too long. Lower --max_model_len to 16, or leave it out."
        )
    # Words that are options' names, too, are words where nothing says otherwise.
    plain = "There is no engine for this: give a model with columns and a seed."
    assert shown_by("merge", plain) == plain
