"""`colocate eval`: how good models are on a dataset, in one table, and how sure that is."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colocate.commands.arguments import (
    MODEL_HELP,
    add_command,
    add_loading,
    loading_options,
    positive,
    temperature,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from colocate.checkpoints.saved_model import SavedModel
    from colocate.config.run_config import RunConfig
    from colocate.inference.measuring import Row, Scores
    from colocate.rewards.base import RewardFunctions

SUMMARY = "measure models on a dataset: accuracy, pass@k, rewards"


def add_parser(commands: Any) -> None:
    details = (
        ". Dataset and built-in reward functions are those of the first run named, unless they are given. "
        "Intervals are of 95% confidence, over prompts. Differences are to the first model."
    )
    command = add_command(commands, "eval", "MODEL [MODEL ...] [options]", SUMMARY, details)
    add = command.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help=f"{MODEL_HELP}; or a run file, for the model that the run would start from",
    )
    add("--dataset", help="as dataset_name of a run file (default: what the run evaluated on)")
    add("--split", help="split of the dataset (default: test; train for a single file)")
    add("--prompt_column", help="the column with the prompts (default: prompt)")
    add("--prompt_template", help='makes prompts of columns: "{question} Think first."')
    add("--system_prompt", help="a system message before each prompt")
    add("--columns", help="new names of columns, as in a run file: '{answer: solution}' (default: the run's)")
    add("--max_rows", type=positive, help="measure on the first rows only")
    add(
        "--reward_funcs",
        nargs="+",
        help="as in a run file; a completion is right by the first of them (default: those of the run, if "
        "they are built in)",
    )
    add(
        "--correct_at",
        type=float,
        default=1.0,
        help="reward from which a completion is right (default: %(default)s)",
    )
    add("--num_samples", type=positive, default=1, help="completions of each prompt (default: %(default)s)")
    add("--k", type=positive, nargs="+", help="the k of pass@k (default: powers of two up to num_samples)")
    add(
        "--temperature",
        type=temperature,
        help="default: 0 (greedy) with one completion of each prompt, else 1",
    )
    add("--top_p", type=float, default=1.0, help="draw from the likeliest tokens only")
    add(
        "--max_tokens",
        type=positive,
        help="tokens of a completion (default: max_completion_length of the run)",
    )
    add("--output", type=Path, help="write everything as JSON to this file")
    add_loading(command)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    ks = _ks(known)
    if known.output is not None and not known.output.parent.is_dir():
        raise ValueError(f"--output {known.output}: there is no directory {str(known.output.parent)!r}.")
    from colocate.checkpoints.saved_model import find_model

    if known.base is not None and len(known.models) > 1:
        raise ValueError("--base says what one adapter is for, and several models are given: name one.")
    models = [
        _of_run_file(name, known.base)
        if Path(name).suffix in (".yaml", ".yml")
        else find_model(name, known.base)
        for name in known.models
    ]

    from colocate.types import SamplingParams

    run_of = next((saved for saved in models if saved.options or saved.code), models[0])
    task = _task(known, run_of)
    rows, held_out = _rows(task, known, run_of)
    rewards = _rewards(task)
    _check_columns(rewards, rows)
    greedy = 0.0 if known.num_samples == 1 else 1.0
    sampling = SamplingParams(
        max_tokens=known.max_tokens or int(run_of.options.get("max_completion_length") or 256),
        temperature=greedy if known.temperature is None else known.temperature,
        top_p=known.top_p,
        seed=known.seed,
    )
    scores = [_score(saved, rows, rewards, sampling, known) for saved in models]
    title = f"{task.dataset_name}: {len(rows)} prompts x {known.num_samples}, {_drawn(sampling)}"
    _print_table(scores, ks, title, held_out)
    if known.output is not None:
        _write(known.output, scores, ks, task, held_out, sampling, known)
    return 0


def _of_run_file(name: str, base: str | None) -> SavedModel:
    """The model that a run would start from, with the options of its run file."""
    from dataclasses import replace

    from colocate.checkpoints.saved_model import find_model
    from colocate.config.run_config import read_values

    _, options = read_values([name])
    if not options.get("model_name_or_path"):
        raise ValueError(f"{name} has no model_name_or_path, so it does not say which model to measure.")
    saved = find_model(str(options["model_name_or_path"]), base)
    return replace(saved, revision=options.get("model_revision"), options=options)


def _given_format(known: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run; given options about prompts and columns override its own."""
    names = ("prompt_column", "prompt_template", "system_prompt", "columns")
    given = {name: getattr(known, name) for name in names if getattr(known, name) is not None}
    sources = {"prompt_column", "prompt_template"}
    replaced = sources if given.keys() & sources else set()
    return {**{name: value for name, value in options.items() if name not in replaced}, **given}


def _ks(known: argparse.Namespace) -> list[int]:
    """The k of pass@k, none of them larger than the number of completions."""
    if known.k is None:
        powers = (2**i for i in itertools.count(1))
        return list(itertools.takewhile(lambda k: k <= known.num_samples, powers))
    if max(known.k) > known.num_samples:
        raise ValueError(
            f"--k {max(known.k)} needs {max(known.k)} completions of each prompt, and --num_samples is "
            f"{known.num_samples}. Set --num_samples {max(known.k)}."
        )
    return sorted(set(known.k))


def _task(known: argparse.Namespace, run_of: SavedModel) -> RunConfig:
    """The dataset and rewards to measure with: those given, else those of the run."""
    from dataclasses import fields

    from colocate.config.run_config import RunConfig, parse_run

    names = {field.name for field in fields(RunConfig)}
    options = _given_format(known, {**run_of.options, **run_of.code})
    task, _ = parse_run({name: value for name, value in options.items() if name in names})
    if task.tools or task.environment_factory:
        raise ValueError(
            "The run has tools or an environment, and colocate eval completes prompts without either. How "
            "good it was while it trained is in its metrics.jsonl, as eval_reward."
        )
    if known.dataset is not None:
        if known.dataset != task.dataset_name:
            task.dataset_config, task.dataset_options = None, {}
        task.dataset_name, task.dataset_test_split = known.dataset, known.split or _split_of(known.dataset)
    elif _is_held_out(task, known):
        task.dataset_test_split = task.dataset_train_split
    elif task.datasets or task.eval_datasets:
        raise ValueError(
            "The run has read several datasets (datasets, eval_datasets). Name one to measure on with "
            "--dataset."
        )
    elif task.eval_dataset_name is not None:
        task.dataset_name, task.dataset_options = task.eval_dataset_name, task.eval_dataset_options
        task.dataset_test_split = known.split or "train"
    elif task.dataset_name is not None and known.split is None and _split_of(task.dataset_name) == "train":
        raise ValueError(
            f"{task.dataset_name!r} is what the run was trained on, and nothing of it was held out. Give "
            "--dataset with other prompts, or --split train to measure on the training prompts."
        )
    else:
        task.dataset_test_split = known.split or task.dataset_test_split
    if "reward_funcs" not in run_of.options:  # else it is a run file that was named, as one is to be trained
        _check_built_in([] if known.reward_funcs else task.reward_funcs, run_of)
    task.reward_funcs = known.reward_funcs or task.reward_funcs
    if task.dataset_name is None and not task.datasets:
        raise ValueError("There is no dataset: no run named has one, so give --dataset.")
    if known.reward_funcs:
        task.reward_model_name_or_path = None
    if not task.reward_funcs and task.reward_model_name_or_path is None:
        raise ValueError("There is no reward function: no run named has one, so give --reward_funcs.")
    return task


def _check_built_in(names: list[str], run_of: SavedModel) -> None:
    """Refuse a run's reward functions that are not built in, since they are code of its directory."""
    from colocate.rewards import BUILT_IN

    if own := [name for name in names if name not in BUILT_IN]:
        raise ValueError(
            f"{run_of.name} says that it was trained with {', '.join(own)}. That is code, and which code is "
            f"run is not for a model's directory to say: if you trust it, give --reward_funcs "
            f"{shlex.join(names)}"
        )


def _split_of(name: str) -> str:
    """The split that a dataset is measured on: "test", or "train" for a file or a generated task."""
    from colocate.data.loading import TASK_PREFIX

    return "train" if Path(name).is_file() or name.startswith(TASK_PREFIX) else "test"


def _is_held_out(task: RunConfig, known: argparse.Namespace) -> bool:
    """Whether the rows are those that the run held out of its training data."""
    return known.dataset is None and known.split is None and task.test_split_size is not None


def _rows(task: RunConfig, known: argparse.Namespace, run_of: SavedModel) -> tuple[list[Row], str]:
    """The rows to measure on, with prompts as in training, and which of them the run held out (or "")."""
    from colocate.data.mixture import FORMAT_OPTIONS, DatasetEntry
    from colocate.data.prompts import as_conversations, validate_columns

    if _is_held_out(task, known):
        from colocate.inference.held_out import held_out_rows

        held_out = held_out_rows(run_of, known.max_rows, trust_remote_code=known.trust_remote_code)
        task.dataset_name = held_out.dataset
        return held_out.rows, held_out.words
    dataset = DatasetEntry(
        str(task.dataset_name),
        config=task.dataset_config,
        split=task.dataset_test_split,
        options=task.dataset_options,
        max_rows=known.max_rows,
        **{name: getattr(task, name) for name in FORMAT_OPTIONS},
    ).load()
    if run_of.options.get("apply_chat_template"):
        dataset = as_conversations(dataset)
    validate_columns(dataset)
    return [dict(row) for row in dataset], ""


def _rewards(task: RunConfig) -> RewardFunctions:
    from colocate.rewards import BUILT_IN, get_reward_function
    from colocate.rewards.base import RewardFunctions

    models = [task.reward_model_name_or_path] if task.reward_model_name_or_path else []
    functions = [get_reward_function(name) for name in task.reward_funcs]
    for name, function in zip(task.reward_funcs, functions, strict=True):
        if name not in BUILT_IN and (code := getattr(function, "__code__", None)) is not None:
            print(f"colocate eval: {name} is run from {code.co_filename}", file=sys.stderr)
    return RewardFunctions([*models, *functions])


def _check_columns(rewards: RewardFunctions, rows: Sequence[Row]) -> None:
    from colocate.rewards.arguments import check_columns

    check_columns(rewards.functions, list(rows[0]))


def _score(
    saved: SavedModel, rows: Sequence[Row], rewards: RewardFunctions, sampling: Any, known: argparse.Namespace
) -> Scores:
    """Load a model, measure it and let it go, so that the next one finds the memory free."""
    from dataclasses import replace

    import torch

    from colocate.inference.loading import load
    from colocate.inference.measuring import score_model

    loaded = load(saved, loading_options(known), is_any_base=known.any_base)
    for model in rewards.models:
        model.to(loaded.accelerator.device)
    with _progress(saved.name, len(rows) * known.num_samples) as on_progress:
        scores = score_model(
            loaded,
            rows,
            rewards,
            replace(sampling, stop_token_ids=loaded.stop_token_ids),
            num_samples=known.num_samples,
            correct_at=known.correct_at,
            on_progress=on_progress,
        )
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return scores


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, which goes away at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(Path(name).name, total=total)
        yield lambda count: progress.update(bar, completed=count)


def _drawn(sampling: Any) -> str:
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    return f"{how}, up to {sampling.max_tokens} tokens"


def _print_table(scores: Sequence[Scores], ks: Sequence[int], title: str, held_out: str) -> None:
    """Print a row for each measure and a column for each model; with two models it is up to 60 characters
    wide."""
    from rich.console import Console
    from rich.table import Table

    from colocate.inference.statistics import difference

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for one in scores:
        table.add_column(one.name, overflow="fold")
    table.add_row("accuracy", *(str(one.accuracy) for one in scores))
    for k in ks:
        table.add_row(f"pass@{k}", *(str(one.pass_at(k)) for one in scores))
    for name in scores[0].rewards:
        means = [one.mean_reward(name) for one in scores]
        table.add_row(name, *("nothing judged" if value is None else str(value) for value in means))
    table.add_row("tokens", *(f"{one.mean_length:.1f}" for one in scores))
    table.add_row("truncated", *(f"{one.truncated:.1%}" for one in scores))
    # A log is read by programs: one line for each sentence, however long.
    is_log = not console.is_terminal
    for line in filter(None, (title, held_out)):
        console.print(line, soft_wrap=is_log, highlight=False, markup=False)
    console.print(table)
    for one in scores:
        if one.num_unjudged:
            words = (
                f"{one.num_unjudged} of {len(one.num_correct) * one.num_samples} completions of {one.name}"
            )
            why = f"were not judged by {next(iter(one.rewards))} (it returned None), and count as wrong."
            console.print(f"{words} {why}", soft_wrap=True, highlight=False)
    for one in scores[1:]:
        gained = difference(one.shares, scores[0].shares, one.num_samples)
        words = f"Accuracy of {one.name} minus that of {scores[0].name}: {gained}"
        console.print(words, soft_wrap=is_log, highlight=False)
    print("In brackets: 95% confidence, over prompts.")


def _write(
    path: Path,
    scores: Sequence[Scores],
    ks: Sequence[int],
    task: RunConfig,
    held_out: str,
    sampling: Any,
    known: argparse.Namespace,
) -> None:
    from colocate.inference.statistics import CONFIDENCE, difference
    from colocate.options.redaction import redacted
    from colocate.reporting.run_log import strict_json
    from colocate.run.identity import versions

    first = scores[0]
    gained = [difference(one.shares, first.shares, one.num_samples) for one in scores[1:]]
    result = {
        "dataset": task.dataset_name,
        "split": task.dataset_test_split,
        "held_out": held_out or None,
        "reward_funcs": task.reward_funcs,
        "correct_at": known.correct_at,
        "confidence": CONFIDENCE,
        "sampling": {name: value for name, value in asdict(sampling).items() if name != "stop_token_ids"},
        "versions": versions(),
        "models": [one.as_json(ks) for one in scores],
        "accuracy_minus_first": [asdict(one) for one in gained],
    }
    path.write_text(json.dumps(strict_json(redacted(result)), indent=2) + "\n", encoding="utf-8")
