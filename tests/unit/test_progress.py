"""What a run shows while it goes: the panel of a terminal, the table of a notebook, plain lines."""

import io
import re
import sys
import threading
import time
import types

import pytest
from rich.console import Console, ConsoleDimensions
from rich.style import Style

from colocate.parallel.rank_failure import in_lines
from colocate.reporting.progress import Progress, sparkline

GIB = 2**30


def record_of(step: int) -> dict:
    return {
        "reward": 0.5,
        "reward_std": 0.25,
        "wall_s": 2.0,
        "phases": {"rollout": 1.2, "train": 0.6, "train/forward": 0.3},
        "memory": {"limit_bytes": 80 * GIB, "spans": [{"phase": "train", "peak_bytes": 61 * GIB}]},
    }


def plain_output(**options) -> list[str]:
    console = Console(file=io.StringIO(), width=40)
    with Progress(console=console, **options) as progress:
        for step in range(1, 4):
            progress.set_phase("rollout")
            progress.update(step, 4, record_of(step), step_tokens=3000)
    return console.file.getvalue().splitlines()


def test_progress_prints_one_plain_line_per_step_without_a_terminal():
    lines = plain_output()
    assert lines[0] == (
        "step 1/4 | reward 0.500 ± 0.250 | speed 1500 tokens/s | step time 2 s (rollout 60%, train 30%) | "
        "memory 61.0 of 80.0 GiB | ETA 0:00:06"
    )
    assert len(lines) == 3 and "\x1b" not in "".join(lines)
    assert [line.split(" |")[0] for line in plain_output(logging_steps=2)] == ["step 2/4"]
    assert plain_output(is_main_process=False) == []


def test_a_log_is_never_quiet_for_long():
    console = Console(file=io.StringIO(), width=40)
    with Progress(console=console, total=10, quiet_s=0.02) as progress:
        progress.set_phase("rollout")
        progress.counts.begin("completions", 32)
        progress.counts.add("completions", 3)
        until_s = time.monotonic() + 30
        while console.file.getvalue().count("in step") < 2 and time.monotonic() < until_s:
            time.sleep(0.005)
    lines = console.file.getvalue().splitlines()
    assert re.fullmatch(
        r"in step 1/10 \| rollout 0 s, 3 of 32 completions \| ETA about 0:00:0\d for rollouts alone", lines[1]
    )
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_a_panel_tells_how_far_the_first_rollout_is_and_when_the_run_will_end():
    progress = Progress(console=Console(file=io.StringIO(), width=100, force_terminal=True), total=10)
    progress.begin(4)
    with progress, progress:  # an evaluation is shown on its own, and within a run
        progress.set_phase("rollout")
        progress.counts.begin("tokens", 4096, is_limit=True)
        progress.counts.add("tokens", 1024)
        progress._estimate._begun_s = progress._estimate._since_s = time.monotonic() - 100
        text = "\n".join(panel_of(progress, 99, 24))
        assert "step 4/10" in text and "done      1,024 of at most 4,096 tokens" in text
        assert "ETA about 0:38:20 for rollouts alone" in text  # 6 x 400 s, of which 100 have passed
        assert "ETA" in panel_of(progress, 59, 24)[0] and len(panel_of(progress, 59, 24)[0]) <= 59
        progress.set_phase("")
        progress.update(5, 10, record_of(5))
        progress._end_s -= 4
        assert "ETA 0:00:06" in panel_of(progress, 99, 24)[0]  # it goes down between steps


@pytest.mark.parametrize("columns", [60, 120])
def test_sentences_break_between_words_and_commands_stay_whole(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    resume = "Measure it: colocate eval runs/gsm8k --reward_funcs rewards.py:right --num_samples 4 --k 2"
    told = "Stopped by Ctrl-C after step 3 of 10; saved to runs/" + "gsm8k-lora-of-a-long-name/checkpoint-3."
    text = f"{told} {told} {told}\n{resume}\n/a/path/{'x' * 150}"
    terminal, log = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    lines = in_lines(text, terminal).splitlines()
    assert " ".join(lines).split() == text.split() and resume in lines
    assert all(len(line) <= columns or " " not in line or line == resume for line in lines)
    assert in_lines(text, log) == text


def test_phases_that_not_every_step_has_count_in_the_step_time():
    console = Console(file=io.StringIO())
    progress = Progress(console=console)
    progress.update(1, 9, {"wall_s": 3.0, "phases": {"rollout": 2.0, "train": 1.0}})
    progress.update(2, 9, {"wall_s": 1.0, "phases": {"train": 1.0}})
    assert "step time 2 s (rollout 50%, train 50%)" in console.file.getvalue().splitlines()[-1]


def test_memory_is_that_of_the_rollout_in_steps_without_one():
    console = Console(file=io.StringIO())
    progress = Progress(console=console, logging_steps=2)
    record = {"wall_s": 1.0, "memory": {"limit_bytes": 80 * GIB}}
    for step in (1, 2):
        spans = [{"phase": "train", "peak_bytes": 61 * GIB}, {"phase": "publish", "peak_bytes": None}]
        if step == 1:
            spans.append({"phase": "rollout", "peak_bytes": 71 * GIB})
        progress.update(step, 2, {**record, "memory": {**record["memory"], "spans": spans}})
    assert console.file.getvalue().splitlines() == ["step 2/2 | step time 1 s | memory 71.0 of 80.0 GiB"]


def test_a_warning_breaks_between_words_on_a_terminal_and_is_one_line_in_a_log():
    words = " ".join(["every completion was cut off"] * 6)
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=60, force_terminal=is_terminal, color_system=None)
        Progress(console=console).warn(words)
        lines = console.file.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == f"Warning: {words}"
        assert (len(lines) > 1 and max(map(len, lines)) <= 60) if is_terminal else len(lines) == 1
    silent = Console(file=io.StringIO())
    Progress(console=silent, is_main_process=False).warn(words)
    assert silent.file.getvalue() == ""


def test_progress_with_missing_metrics_says_what_it_knows():
    console = Console(file=io.StringIO())
    Progress(console=console).update(7, 9, {"reward": None, "num_tokens": 5, "phases": None})
    assert console.file.getvalue() == "step 7/9 | \n"


def test_live_panel_shows_step_phase_and_memory_in_80_columns():
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    with Progress(console=console) as progress:
        progress.update(1, 2, record_of(1))
        progress.set_phase("train/forward")
        progress._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    for shown in ("step 1/2", "50.0%", "● train/forward", "○ rollout", "0.500 ± 0.250", "61.0 of 80.0 GiB"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 80
    plain = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with Progress(console=plain, disable_tqdm=True) as progress:
        progress.update(1, 2, record_of(1))
    assert plain.file.getvalue().startswith("step 1/2 |")


def test_speed_is_known_from_the_first_step_and_in_steps_without_a_rollout():
    console = Console(file=io.StringIO())
    progress = Progress(console=console)
    for step in (11, 12, 13):  # resumed in the middle of a rollout of 12,000 tokens that feeds four steps
        progress.update(step, 20, {"wall_s": 2.0}, rollout={"reward": 0.5}, step_tokens=3000)
    assert all("speed 1500 tokens/s" in line for line in console.file.getvalue().splitlines())


def panel_of(progress: Progress, width: int, height: int) -> list[str]:
    return [line.plain for line in progress._lines(width, height)]


def running_progress(num_steps: int = 3) -> Progress:
    """A run whose rollouts feed two steps each, seen by a panel."""
    rollout = {
        **{
            "reward": 0.5,
            "reward_std": 0.25,
            "rewards/accuracy_reward/mean": 0.4,
            "rewards/format/mean": 0.6,
        },
        **{
            "completions/mean_length": 212.0,
            "completions/clipped_ratio": 0.125,
            "frac_reward_zero_std": 0.25,
        },
    }
    progress = Progress(console=Console(file=io.StringIO(), width=100, height=24, force_terminal=True))
    for step in range(1, num_steps + 1):
        record = {**record_of(step), "reward": step / 10, "grad_norm": 0.31, "entropy": 0.9, "kl": 0.002}
        if step % 2 == 0:
            del record["reward"], record["reward_std"]
        progress.update(step, 200, record, rollout=rollout, step_tokens=3000)
    progress.show_evaluation(num_steps, {"eval_reward": 0.44})
    return progress


def test_the_panel_has_what_tells_how_learning_goes_and_fits_every_terminal():
    progress = running_progress()
    text = "\n".join(panel_of(progress, 119, 24))
    for shown in (
        *("accuracy 0.4  format 0.6", "212 tokens, 12% truncated", "zero std  25% of groups"),
        *("entropy 0.9, gradient norm 0.31, KL 0.002", "eval_reward 0.44 at step 3", "61.0 of 80.0 GiB"),
    ):
        assert shown in text
    for width in (20, 39, 59, 119, 300):
        for height in (2, 5, 8, 24):
            lines = panel_of(progress, width, height)
            assert max(map(len, lines)) <= width and len(lines) < max(height, 3)
            assert lines[0].startswith("step 3/200")
    labels = [line[:10].strip() for line in panel_of(progress, 39, 24)[1:]]
    assert labels == [
        *("reward", "rewards", "length", "zero std", "policy", "speed", "step time", "memory", "eval")
    ]
    assert [line[:6] for line in panel_of(progress, 39, 6)] == ["step 3", "reward", "length"]


def test_the_sparkline_has_one_point_per_rollout():
    progress = running_progress(9)
    (reward,) = [line for line in panel_of(progress, 119, 24) if line.startswith("reward ")]
    assert reward.rpartition(" ")[2] == sparkline([1, 3, 5, 7, 9])


def test_colours_can_be_read_on_black():
    """WCAG's contrast, 4.5 for text. Only colours that no terminal redefines are used."""
    progress = running_progress()
    for phase in ("rollout", "score", "train", "publish", "save"):
        progress.set_phase(phase)
        progress._is_running = True
        for line in progress._lines(119, 24):
            for span in line.spans:
                colour = Style.parse(str(span.style)).color
                if colour is None or str(span.style) == "grey50":  # of the bar, what is to come
                    continue
                assert colour.number is not None and colour.number >= 16
                channels = [c / 255 for c in colour.get_truecolor()]
                linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
                luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
                assert (luminance + 0.05) / 0.05 >= 4.5, span.style


class Terminal:
    """As much of a terminal as the panel needs: lines that are broken anew when its width changes."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows = [""]  # of the screen, the broken ones of a line marked by a "\0" at their end
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for control, parameter, kind, character in re.findall(
            r"(\x1b\[([0-9;?]*)([A-Za-z]))|([^\x1b])", text
        ):
            if kind == "A":
                self.row = max(0, self.row - int(parameter or 1))
            elif kind == "K":
                assert parameter == "2"
                self.rows[self.row] = ""
            elif control:
                assert kind in "mhl", control
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row == len(self.rows))
            else:
                assert self.column < self.width, "the panel is wider than the terminal"
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
                self.column += 1

    def resize(self, width: int) -> None:
        assert not any(self.rows[self.row + 1 :]), "something is left below the cursor"
        lines = "\n".join(self.rows[: self.row + 1]).replace("\0\n", "").split("\n")
        self.rows = []
        for line in lines:
            parts = [line[i : i + width] for i in range(0, max(1, len(line)), width)]
            self.rows += [f"{part}\0" for part in parts[:-1]] + parts[-1:]
        self.row, self.column, self.width = len(self.rows) - 1, len(self.rows[-1]), width


def test_resizing_leaves_nothing_of_the_panel_behind(monkeypatch):
    monkeypatch.delenv("XTERM_VERSION", raising=False)
    terminal, file = Terminal(120), io.StringIO()
    console = Console(file=file, width=120, height=40, force_terminal=True)

    def flush() -> None:
        terminal.write(file.getvalue())
        file.seek(0)
        file.truncate()

    monkeypatch.setattr("colocate.reporting.panel.REFRESHES_PER_SECOND", 1e-3)  # the test itself draws
    progress = Progress(console=console)
    console.print("said before")
    with progress:
        for step, width in enumerate((120, 60, 40, 61, 120), start=1):
            terminal.resize(width)
            console.size = ConsoleDimensions(width, 40)
            progress.update(step, 5, {**record_of(step), "rewards/a/mean": 0.1, "rewards/b/mean": 0.2})
            progress._live.refresh()
            console.print(f"said at {width}")
            flush()
            on_screen = "\n".join(terminal.rows)
            assert on_screen.count("step ") == 2 and on_screen.count("reward ") == 1  # the panel's, once
    flush()
    said = [row for row in terminal.rows if row.startswith("said")]
    assert said == ["said before", *(f"said at {width}" for width in (120, 60, 40, 61, 120))]
    assert sum(row.startswith("step 5/5") for row in terminal.rows) == 1


def test_progress_bars_of_others_are_off_while_the_panel_is_up():
    import datasets
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as transformers_logging

    def states() -> list[bool]:
        return [
            datasets.is_progress_bar_enabled(),
            transformers_logging.is_progress_bar_enabled(),
            not are_progress_bars_disabled(),
        ]

    before = states()
    assert all(before)
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)):
        assert not any(states())
    assert states() == before
    with Progress(console=Console(file=io.StringIO())):  # without a panel they are in nobody's way
        assert states() == before


def test_a_notebook_has_one_table_that_grows(monkeypatch):
    outputs: list[list[str]] = []

    class Handle:
        def __init__(self, page) -> None:
            outputs.append([page])

        def update(self, page) -> None:
            outputs[-1].append(page)

    display = types.ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda page, display_id: Handle(page)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("colocate.reporting.progress.is_in_notebook", lambda: True)
    console = Console(file=io.StringIO())
    with Progress(console=console, logging_steps=2) as progress:
        for step in range(1, 6):
            progress.update(step, 5, {"reward": step / 10, "wall_s": 1.0})
            progress.show_evaluation(step, {"eval_reward": 0.75})
    (pages,) = outputs
    assert console.file.getvalue() == ""
    rows = re.findall("<tr>(.*?)</tr>", pages[-1])
    assert [re.findall("<td>(.*?)</td>", row)[:2] for row in rows[1:]] == [
        ["1", "0.75"], ["2", "0.75"], ["3", "0.75"], ["4", "0.75"], ["5", "0.75"],
    ]  # fmt: skip
    assert [re.findall("<td>(.*?)</td>", row)[2] for row in rows[1:]] == ["", "0.200", "", "0.400", "0.500"]
    assert re.findall("<th>(.*?)</th>", rows[0])[:3] == ["step", "eval_reward", "reward"]
    assert "step 5/5" in pages[-1]
