"""Where the memory of a run on a CPU went: the parts have names, and make up the whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch

import tiny
from colocate.memory.timeline import resident_bytes_besides
from colocate.reporting.memory_charts import rollout_memory_chart
from colocate.reporting.run import read_run
from colocate.run import build

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> tuple[Path, int, str]:
    """The directory of a run, the bytes of the process before its model, and the last line that it showed."""
    directory, seen = tmp_path_factory.mktemp("run"), []
    prepare_model = build.prepare_model

    def prepared(*arguments: Any) -> Any:
        seen.append(psutil.Process().memory_info().rss)
        return prepare_model(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "prepare_model", prepared)
        trainer = tiny.make_trainer(directory, reward_funcs=[tiny.count_digits], max_steps=2)
    trainer.train()
    return directory, seen[0], trainer.run.journal.progress._line()


def test_python_and_libraries_are_what_the_process_had_before_the_model(run):
    directory, before, line = run
    for text in (directory / "metrics.jsonl").read_text().splitlines():
        for span in json.loads(text)["memory"]["spans"]:
            assert span["categories"]["libraries"] == pytest.approx(before, abs=8 * MIB)
    assert f"Python and libraries {before / 2**30:.1f}" in line


def test_the_named_parts_make_up_the_peak_of_each_phase(run):
    directory, _, _ = run
    chart = rollout_memory_chart(read_run(directory), (768, 320))
    assert chart is not None
    svg = ElementTree.fromstring(chart.svg())
    keys = {text.text for text in svg.iter() if text.get("class") == "key"}
    # What else there is can be nothing: a process in which trainers ran before reuses what they had.
    assert {"Python and libraries", "weights", "optimizer", "KV cache", "gradients"} <= keys
    titles = [str(title.text) for title in svg.iter(f"{SVG}title")]
    parts = [float(size) for size in re.findall(r"rollout: [^\d]+ ([\d.e-]+) GiB", "\n".join(titles))]
    details = [str(text.text) for text in svg.iter() if text.get("class") == "detail"]
    assert sum(parts) == pytest.approx(float(details[0].removesuffix(" GiB")), rel=0.05)
    assert len(parts) in (4, 5)


def test_a_model_that_is_loaded_already_does_not_count_as_a_library():
    model = torch.nn.Linear(4096, 4096, bias=False)
    whole = psutil.Process().memory_info().rss
    assert whole - resident_bytes_besides(model) == pytest.approx(64 * MIB, abs=8 * MIB)
    assert resident_bytes_besides("org/model") == pytest.approx(whole, abs=8 * MIB)
