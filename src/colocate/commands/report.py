"""`colocate report RUN_DIR ...`: the page of a run, of several, or of those that are under way."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from colocate.commands.arguments import add_command

DEFAULT_PORT = 8765


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    summary = "write the report of a finished or running run, or of several runs beside one another"
    command = add_command(commands, "report", "RUN_DIR [RUN_DIR ...] [options]", summary)
    add = command.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="output_dir of a run")
    where = "file for the page of several runs (default: comparison.html); one run has report.html in RUN_DIR"
    add("--output", type=Path, help=where)
    add("--watch", action="store_true", help="serve the page on 127.0.0.1, kept up to date")
    port = f"port of 127.0.0.1 for --watch (default: {DEFAULT_PORT}; 0: any that is free)"
    add("--port", type=int, default=DEFAULT_PORT, help=port)


def run(known: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    run_dirs: list[Path] = known.run_dirs
    for directory in run_dirs:
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory; give the output_dir of a run")
    if len(run_dirs) == 1 and known.output is not None:
        raise ValueError("--output is for several runs; the report of one is report.html in its directory")

    def write() -> Path:
        from colocate.reporting.comparison import COMPARISON_FILE, write_comparison
        from colocate.reporting.report import write_report

        if len(run_dirs) == 1:
            return write_report(run_dirs[0])
        return write_comparison(run_dirs, known.output or COMPARISON_FILE)

    if not known.watch:
        print(write())
        return 0
    from colocate.reporting.live import LiveReport, serve

    with serve(LiveReport(run_dirs, write), known.port) as server:
        print(f"colocate report: {server.url} until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
