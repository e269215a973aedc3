"""Runs TRL's own tests of its GRPO trainer twice: as they are, and with their import changed to colocate.

    python -m benchmarks.trl_tests.run path/to/trl/tests/test_grpo_trainer.py
    python -m benchmarks.trl_tests.run path/to/trl/tests/test_grpo_trainer.py \
        -k "tool or environment" --name trl-tests-tools    # with jmespath installed

TRL's packages hold no tests: take the file from its repository. Models and data are stand-ins of the same
names (`stand_ins.py`). Each side is one pytest process in a directory with the stand-ins, a copy of the
file and of its helpers; a side that is finished there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common.results import committed, write_result
from benchmarks.trl_tests.stand_ins import SPECIAL_ID, make_stand_ins

Outcome = tuple[str, str]
"""How a test ended (passed, failed or skipped), and why if it did not pass."""

IMPORT = "from trl import GRPOConfig, GRPOTrainer"
SIDES = {"trl": IMPORT, "colocate": IMPORT.replace("trl", "colocate")}
TOKEN_IDS = {"151643": str(SPECIAL_ID), "151645": str(SPECIAL_ID + 2)}
"""Numbers of Qwen 2.5's padding and end tokens that a test writes down, and those of its stand-in."""
HELPERS = ("__init__.py", "conftest.py", "testing_utils.py", "testing_constants.py")

PRELUDE = """\
import ast, pathlib
from trl import import_utils

# The tests' helpers are of another version than the package: a check for an extra that the package
# does not make any more finds nothing.
for file in pathlib.Path(__file__).parent.glob("tests/*.py"):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "trl.import_utils":
            for alias in node.names:
                if not hasattr(import_utils, alias.name):
                    setattr(import_utils, alias.name, lambda *_: False)
"""

NEEDS_IMAGES = ("TestGRPOTrainerVLM", "vlm")
"""Tests of vision-language models are left out on both sides: their stand-ins would need image processors."""

TOOL_TESTS = "trl-tests-tools"
NOT_YET = "not yet"
PRIVATE = "calls or reads what is TRL's own inside"
LEFT: dict[str, str] = {
    "test_generate_rollout_func_raises_when_required_keys_are_missing": PRIVATE,  # _generate
    "test_train_reward_func_with_log_extra": PRIVATE,  # _logs
    "test_train_with_mask_truncated_completions": "replaces `model.generate`, which the native engine does "
    "not call",
    "test_liger_kernel_with_peft_lm_head_raises": "expects TRL's error for adapters on the head under "
    "use_liger_kernel; here they are trained",
}
"""Tests that TRL passes and colocate is not meant to, by name (without parameters), and why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="TRL's tests/test_grpo_trainer.py")
    parser.add_argument("--file_version", default="", help="of the TRL that the file is from")
    parser.add_argument("--work", type=Path, help="where to run; what is finished there is kept")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("-k", dest="expression", default="", help="run only these tests")
    parser.add_argument("--name", help="of the result; without one that of a part is not written")
    options = parser.parse_args()
    if not options.expression:
        options.name = options.name or "trl-tests"
    commit = committed() if options.name else ""
    work = options.work or Path(tempfile.mkdtemp())
    make_stand_ins(work)
    outcomes = {side: run(side, options.file, work, options.expression) for side in options.sides}
    for side, by_test in outcomes.items():
        print(side, dict(Counter(outcome for outcome, _ in by_test.values())))
    if not options.name or len(outcomes) < len(SIDES):
        for side, by_test in outcomes.items():
            for test, (outcome, reason) in by_test.items():
                if outcome != "passed":
                    print(f"{side} {outcome} {test}: {reason}")
        return
    repetitions = compare(outcomes)
    path = write_result(
        options.name,
        "cpu",
        claims(repetitions),
        repetitions,
        commit,
        test_file="huggingface/trl, tests/test_grpo_trainer.py",
        test_file_version=options.file_version,
        has_jmespath=find_spec("jmespath") is not None,
    )
    paragraph = tools_section if options.name == TOOL_TESTS else section
    print(path, *paragraph(json.loads(path.read_text())), sep="\n")


def run(side: str, file: Path, work: Path, expression: str) -> dict[str, Outcome]:
    """The outcome of each test by name with parameters, as `Class::test[parameters]`."""
    report = work / (f"{side}-part.xml" if expression else f"{side}.xml")
    if expression or not report.exists():
        package = work / f"with_{side}" / "tests"
        package.mkdir(parents=True, exist_ok=True)
        for name in HELPERS:
            shutil.copy(file.parent / name, package / name)
        (package.parent / "conftest.py").write_text(PRELUDE)
        text = file.read_text()
        if text.count(IMPORT) != 1:
            raise SystemExit(f"{file} should say once: {IMPORT}")
        for old, new in {IMPORT: SIDES[side], **TOKEN_IDS}.items():
            text = text.replace(old, new)
        (package / file.name).write_text(text)
        chosen = " and ".join(f"not {word}" for word in NEEDS_IMAGES)
        partial = report.with_suffix(".unfinished")
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pytest",
                    f"with_{side}/tests/{file.name}",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                ),
                *("--tb=short", "--rootdir", str(work), f"--junitxml={partial}"),
                *("-k", f"({expression}) and {chosen}" if expression else chosen),
            ],
            cwd=work,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "datasets")},
        )
        partial.replace(report)
    return read(report)


def read(report: Path) -> dict[str, Outcome]:
    """The outcomes in a report of pytest's in JUnit's format."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome, reason = "passed", ""
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                reason = " ".join((found.get("message") or "").split())[:300]
        outcomes[name] = (outcome, reason)
    return outcomes


def compare(outcomes: dict[str, dict[str, Outcome]]) -> list[dict[str, Any]]:
    """One record per test.

    Raises:
        SystemExit: the sides did not run the same tests.
    """
    if outcomes["trl"].keys() != outcomes["colocate"].keys():
        raise SystemExit(f"Not the same tests: {outcomes['trl'].keys() ^ outcomes['colocate'].keys()}")
    records = []
    for test, (trl, trl_reason) in outcomes["trl"].items():
        outcome, reason = outcomes["colocate"][test]
        record = {"test": test, "trl": trl, "colocate": outcome}
        if trl_reason:
            record["trl_reason"] = trl_reason
        if reason:
            record["reason"] = reason
        if trl == "passed" != outcome:
            record["left"] = LEFT.get(test.partition("::")[2].partition("[")[0], NOT_YET)
        records.append(record)
    return records


def section(result: dict[str, Any]) -> list[str]:
    """The paragraph of docs/moving-from-trl.md on the result."""
    claims, setup, left = result["claims"], result["setup"], {}
    for record in result["repetitions"]:
        if "left" in record:
            left.setdefault(record["left"], []).append(record["test"].partition("::")[2])
    return [
        f"`benchmarks/trl_tests/run.py` runs TRL's own tests of its trainer ({setup['test_file_version']}), "
        "those with images left out, under small stand-ins of their models, once with TRL "
        f"{result['versions']['trl']} and once with the import changed. Of {claims['tests']} cases TRL "
        f"passes {claims['passed_by_trl']} and skips {claims['skipped_by_trl']} on a CPU; colocate passes "
        f"{claims['passed_by_both']} of the {claims['passed_by_trl']} "
        "([each one](../benchmarks/results/trl-tests-cpu.json)). "
        + ("Left are:" if left else "None is left."),
        "",
        *(f"- {reason}: {', '.join(f'`{test}`' for test in tests)}" for reason, tests in left.items()),
    ]


def tools_section(result: dict[str, Any]) -> list[str]:
    """The paragraph of docs/moving-from-trl.md on the result of `-k "tool or environment"`."""
    claims, setup = result["claims"], result["setup"]
    spoilt = [record for record in result["repetitions"] if record["trl"] == "failed"]
    passed = [record["test"].partition("::")[2] for record in spoilt if record["colocate"] == "passed"]
    return [
        f"Of the {claims['tests']} tests of tools and environments ({setup['test_file_version']}), which TRL "
        f"skips without jmespath, {claims['passed_by_both']} pass on both sides where it is installed: all "
        f"that do not replace `model.generate` ([each one](../benchmarks/results/{TOOL_TESTS}-cpu.json)). "
        f"The other {len(spoilt)} replace it by one that answers in numbers of Qwen's vocabulary, which the "
        "stand-ins do not have: TRL fails these here, so they compare nothing. colocate passes "
        f"{len(passed)} of the {len(spoilt)} ({', '.join(f'`{test}`' for test in passed)}), and cannot pass "
        "the others with any vocabulary, for they count the rows of each call or read private names.",
    ]


def claims(records: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that pages may quote: how many of the tests that TRL passes colocate passes, too."""
    passed_by_trl = [record for record in records if record["trl"] == "passed"]
    return {
        "tests": len(records),
        "passed_by_trl": len(passed_by_trl),
        "passed_by_both": sum(record["colocate"] == "passed" for record in passed_by_trl),
        "skipped_by_trl": sum(record["trl"] == "skipped" for record in records),
    }


if __name__ == "__main__":
    main()
