"""The error that ends all ranks alike is printed once, by the first rank.

Options, data and model are checked on every rank, so all of them find the same fault, and their launcher
shows what each of them prints.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import IO


def say(text: str) -> None:
    """Print to stderr why this rank ends, unless the first rank ends for the same reason and has printed it.

    The first rank waits until the others have heard that, for `meeting.APART_S` seconds at most.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        print(in_lines(text, sys.stderr), file=sys.stderr, flush=True)
    is_said = False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Ranks that cannot ask each other say what they know, each of them.
        with suppress(Exception, KeyboardInterrupt):
            from colocate.parallel.meeting import place_of_launcher  # loads PyTorch, which takes seconds

            place = place_of_launcher()
            is_said = place is not None and place.ends_as_first(text)
    if not (is_first or is_said):
        print(in_lines(text, sys.stderr), file=sys.stderr, flush=True)


def in_lines(text: str, stream: IO[str]) -> str:
    """The text with its lines broken between words if it goes to a terminal, which breaks within words.

    A line that is a command, or ends with one, stays whole, so that it can be copied; so does a traceback.
    """
    if not stream.isatty() or "Traceback (most recent call last)" in text:
        return text
    columns = shutil.get_terminal_size().columns
    return "\n".join(
        line
        if re.match(r"(\w[\w ]*: )?colocate \w[\w-]* (?:[^:]|:(?=\S))+$", line)
        else textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )
