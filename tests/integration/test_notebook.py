"""examples/quickstart.ipynb in a real kernel: one output that grows, with a table and a chart."""

from __future__ import annotations

import base64
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tiny import make_model, make_tokenizer

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SMALLER = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"model"',
    "max_steps=60": "max_steps=6, use_cpu=True",
    "logging_steps=5": "logging_steps=2",
    "eval_steps=20": "eval_steps=3",
    "per_device_train_batch_size=64": "per_device_train_batch_size=16",
    "max_completion_length=16": "max_completion_length=4",
}


def test_the_notebook_is_saved_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert [cell.source for cell in notebook.cells if "install" in cell.metadata.get("tags", [])] == [
        '%pip install --quiet "..[peft]"'
    ], "of the checkout that the notebook is in, as docs/install.md says"
    assert (NOTEBOOK.parent.parent / "pyproject.toml").is_file()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, list[Any]]:
    """The outputs of each cell of code by its first words, run with a tiny model for a few steps."""
    directory = tmp_path_factory.mktemp("notebook")
    make_model("qwen3").save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    (directory / "bin").mkdir()
    script = directory / "bin" / "colocate"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m colocate "$@"\n')
    script.chmod(0o755)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        for long, short in SMALLER.items():
            cell.source = cell.source.replace(long, short)
    path = os.pathsep.join([str(directory / "bin"), os.environ["PATH"]])
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(directory)}})
    client.execute(env={**os.environ, "PATH": path})
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source.split("\n")[0]: cell.outputs for cell in code}


@pytest.mark.early
@pytest.mark.slow
def test_training_has_one_output_with_a_table_and_a_chart(outputs):
    cell = outputs["from peft import LoraConfig"]
    (display,) = (output for output in cell if output.output_type == "display_data")
    page = display.data["text/html"]
    assert "step 6/6" in page
    printed = "".join(output.text for output in cell if output.output_type == "stream")
    printed = re.sub(r"\x1b\[\d*m", "", printed)  # a notebook shows the labels in grey
    assert "engine    native" in printed and "Finished: step 6 of 6" in printed
    (table,) = re.findall("<table>(.*)</table>", page)
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table)[1:]]
    assert [row[0] for row in rows] == ["0", "2", "3", "4", "6"], "steps that were logged or evaluated"
    (encoded,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    picture = ElementTree.fromstring(base64.b64decode(encoded))
    drawn = "".join(picture.itertext())
    assert "Reward" in drawn and "held-out evaluation" in drawn and "step 6: reward" in drawn


@pytest.mark.slow
def test_what_the_run_has_left_is_found_by_the_cells_behind_it(outputs):
    report, answer = (
        outputs["!colocate report runs/notebook"],
        outputs[next(k for k in outputs if "echo" in k)],
    )
    assert "report.html" in "".join(output.text for output in report)
    said = "".join(output.text for output in answer if output.name == "stdout")
    assert 1 <= len(said.strip()) <= 4, (
        "an answer has as many tokens as the run's completions, here characters"
    )
