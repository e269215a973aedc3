"""The completions of one step as a table: printed, and written as TRL's parquet files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class CompletionTable:
    """N completions, column by column; every column has N entries."""

    prompts: Sequence[Any]
    """N prompts, as strings or conversations (lists of messages)."""
    completions: Sequence[Any]
    rewards: Mapping[str, Sequence[float]]
    """The rewards by each reward function; NaN where it returned None."""
    advantages: Sequence[float]
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that reward functions added with `log_extra`."""

    def __post_init__(self) -> None:
        for name, column in self.columns().items():
            if len(column) != len(self.prompts):
                raise ValueError(
                    f"Column {name!r} has {len(column)} entries for {len(self.prompts)} prompts: "
                    "every column of a CompletionTable needs one entry per completion."
                )

    def columns(self) -> dict[str, Sequence[Any]]:
        """The columns under TRL's names, in TRL's order: prompt, completion, rewards, extras, advantage."""
        return {
            "prompt": self.prompts,
            "completion": self.completions,
            **self.rewards,
            **self.extra,
            "advantage": self.advantages,
        }

    def state_dict(self) -> dict[str, Any]:
        """The arguments that make an equal table, as plain data; any other object becomes text."""
        return {field.name: _as_data(getattr(self, field.name)) for field in fields(self)}

    def unique_prompts(self) -> CompletionTable:
        """The first completion of every prompt."""
        first = {str(prompt): i for i, prompt in reversed(list(enumerate(self.prompts)))}
        return self._select(sorted(first.values()))

    def sample(self, num_samples: int, seed: int) -> CompletionTable:
        """A table of `num_samples` rows drawn at random, in their order; of all rows if there are no more.

        The draw does not touch Python's global generator, so that looking does not change the run.
        """
        rows: Sequence[int] = range(len(self.prompts))
        if num_samples < len(rows):
            rows = sorted(random.Random(seed).sample(rows, num_samples))
        return self._select(rows)

    def _select(self, rows: Sequence[int]) -> CompletionTable:
        return CompletionTable(
            prompts=[self.prompts[i] for i in rows],
            completions=[self.completions[i] for i in rows],
            rewards={name: [column[i] for i in rows] for name, column in self.rewards.items()},
            advantages=[self.advantages[i] for i in rows],
            extra={name: [column[i] for i in rows] for name, column in self.extra.items()},
        )


def write_completions_parquet(output_dir: str | Path, step: int, table: CompletionTable) -> Path:
    """Write `completions/completions_{step:05d}.parquet` with TRL's columns and return its path.

    Values of any type, arguments of calls and contents that are not text, are written as JSON.
    """
    import pyarrow
    import pyarrow.parquet

    columns = {"step": [step] * len(table.prompts), **table.columns()}
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pyarrow.array([_with_text(value) for value in values])
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"Column {name!r} of the completions of step {step} cannot be written as parquet ({error}): "
                "give all its entries one type, for instance str."
            ) from error
    path = Path(output_dir) / "completions" / f"completions_{step:05d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    return path


def _with_text(entry: Any) -> Any:
    """A conversation with arguments of calls and contents of messages as text; other values as they are."""
    if not _is_conversation(entry):
        return entry
    messages = [dict(message) for message in entry]
    for message in messages:
        if "content" in message and message["content"] is not None:
            message["content"] = _json_text(message["content"])
        if message.get("tool_calls"):
            message["tool_calls"] = [_call_with_text(call) for call in message["tool_calls"]]
    return messages


def _call_with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    return {**call, "function": {**function, "arguments": _json_text(function.get("arguments"))}}


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_as_data(value), ensure_ascii=False)


def print_completions(
    table: CompletionTable,
    step: int,
    num_completions_to_print: int | None = None,
    log_unique_prompts: bool = False,
    console: Console | None = None,
) -> None:
    """Print the completions of a step as a table, one row each.

    If the other columns leave too little room for the text, each completion is printed as a record instead:
    its text in full width, and its scores below it.

    Args:
        num_completions_to_print: how many completions to print, drawn at random; None: all.
        log_unique_prompts: print only the first completion of every prompt.
    """
    if log_unique_prompts:
        table = table.unique_prompts()
    if num_completions_to_print is not None:
        table = table.sample(max(0, num_completions_to_print), seed=step)
    if not table.prompts:
        return
    console = console or Console()
    rows = [_scores(table, i) for i in range(len(table.prompts))]
    texts = {name: [name, *(line for row in rows for line in row[name].splitlines())] for name in rows[0]}
    taken = sum(max(map(cell_len, lines)) for lines in texts.values())
    # Each column has two spaces and a line, and there is a frame around all of them.
    room = console.width - taken - 3 * (len(texts) + 2) - 7
    print_all = _print_table if room >= 2 * _MIN_TEXT_WIDTH else _print_records
    print_all(table, rows, step, console)


_MIN_TEXT_WIDTH = 24
"""The fewest columns of the terminal in which a prompt or completion can still be read."""


def _scores(table: CompletionTable, row: int) -> dict[str, str]:
    """The entries of one completion but for its text, by column, in the order of columns."""
    return {
        **{name: f"{values[row]:.2f}" for name, values in table.rewards.items()},
        "Advantage": f"{table.advantages[row]:.2f}",
        **{name: as_text(values[row]) for name, values in table.extra.items()},
    }


def _print_table(table: CompletionTable, rows: list[dict[str, str]], step: int, console: Console) -> None:
    grid = Table(expand=True, show_lines=True)
    grid.add_column("Prompt", style="yellow", ratio=2)
    grid.add_column("Completion", style="green", ratio=3)
    for name in rows[0]:
        style = "magenta" if name == "Advantage" else "cyan" if name in table.rewards else ""
        grid.add_column(name, style=style, justify="left" if name in table.extra else "right")
    for prompt, completion, scores in zip(table.prompts, table.completions, rows, strict=True):
        # Text, not str: a completion may contain what rich takes for markup.
        grid.add_row(*(Text(text) for text in (as_text(prompt), as_text(completion), *scores.values())))
    console.print(Panel(grid, title=f"Step {step}"))


def _print_records(table: CompletionTable, rows: list[dict[str, str]], step: int, console: Console) -> None:
    for i, scores in enumerate(rows):
        console.print(Rule(f"Step {step}, {i + 1} of {len(rows)}", style="dim", align="left"))
        for label, entry, style in (
            ("Prompt", table.prompts[i], "yellow"),
            ("Completion", table.completions[i], "green"),
        ):
            console.print(Text(label, style="bold"))
            console.print(Text(as_text(entry), style=style))
        parts = [Text.assemble((name, "bold"), "=", text) for name, text in scores.items()]
        console.print(Text("  ").join(parts))


def _as_data(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_data(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # tensors, NumPy's arrays and scalars
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_as_data(item) for item in value]
    return value if isinstance(value, bool | int | float | str | bytes | None) else str(value)


def as_text(entry: Any) -> str:
    """A prompt or completion as plain text; the messages of a conversation one after the other."""
    if not _is_conversation(entry):
        return str(entry)
    return "\n\n".join(_message_text(message) for message in entry)


def _is_conversation(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(isinstance(message, dict) for message in entry)


def _message_text(message: Mapping[str, Any]) -> str:
    lines = [str(message.get("role", "")).upper()]
    lines.append(str(message.get("reasoning_content") or message.get("thinking") or ""))
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(block, dict) and "type" in block for block in content):
        content = "".join(block.get("text", "") for block in content)
    lines.append(str(content))
    for call in message.get("tool_calls") or []:
        function = call.get("function", {})
        lines.append(f"{function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(line for line in lines if line)
