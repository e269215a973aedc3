"""What docs/moving-from-trl.md says of TRL's own tests is what their result says; how outcomes are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.trl_tests import run as trl_tests
from benchmarks.trl_tests import stand_ins

ROOT = Path(__file__).parents[2]

REPORT = """<testsuites><testsuite>
<testcase classname="with_trl.tests.test_grpo_trainer.TestA" name="test_one[a-b]" time="1" />
<testcase classname="x.TestA" name="test_two"><failure message="E: no&#10;good">...</failure></testcase>
<testcase classname="x.TestA" name="test_three"><skipped message="requires vllm" /></testcase>
</testsuite></testsuites>"""


def test_the_page_says_what_the_result_says() -> None:
    page = " ".join((ROOT / "docs/moving-from-trl.md").read_text().split())
    result = json.loads((ROOT / "benchmarks/results/trl-tests-cpu.json").read_text())
    assert " ".join("\n".join(trl_tests.section(result)).split()) in page
    records = result["repetitions"]
    assert result["claims"] == trl_tests.claims(records)
    for record in records:
        is_left = record["trl"] == "passed" != record["colocate"]
        assert is_left == ("left" in record)
        assert not is_left or record["reason"]


def test_the_page_says_what_the_result_of_tools_says() -> None:
    page = " ".join((ROOT / "docs/moving-from-trl.md").read_text().split())
    result = json.loads((ROOT / f"benchmarks/results/{trl_tests.TOOL_TESTS}-cpu.json").read_text())
    assert " ".join("\n".join(trl_tests.tools_section(result)).split()) in page
    assert result["claims"] == trl_tests.claims(result["repetitions"]) and result["setup"]["has_jmespath"]
    for record in result["repetitions"]:
        assert "left" not in record  # colocate passes what TRL passes
        assert record["trl"] == "passed" or "index out of range" in record["trl_reason"]  # Qwen's numbers
        if record["colocate"] != "passed":
            counted = "cannot generate, not even for one prompt" in record["reason"]
            assert counted or "no attribute '_env_tools'" in record["reason"]


def test_outcomes_are_compared_by_test(tmp_path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    trl = trl_tests.read(report)
    assert trl == {
        "TestA::test_one[a-b]": ("passed", ""),
        "TestA::test_two": ("failed", "E: no good"),
        "TestA::test_three": ("skipped", "requires vllm"),
    }
    colocate = trl | {"TestA::test_one[a-b]": ("failed", "why"), "TestA::test_two": ("passed", "")}
    records = trl_tests.compare({"trl": trl, "colocate": colocate})
    assert [record.get("left") for record in records] == [trl_tests.NOT_YET, None, None]
    assert trl_tests.claims(records) == dict(tests=3, passed_by_trl=1, passed_by_both=0, skipped_by_trl=1)
    with pytest.raises(SystemExit, match="Not the same tests"):
        trl_tests.compare({"trl": trl, "colocate": {}})


def test_stand_ins_are_found_under_their_names(tmp_path, monkeypatch) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "tiny-Qwen2ForCausalLM-2.5"
    monkeypatch.setattr(stand_ins, "MODELS", {name: stand_ins.MODELS[name]})
    stand_ins.make_stand_ins(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(f"trl-internal-testing/{name}")
    tokenizer = AutoTokenizer.from_pretrained(f"trl-internal-testing/{name}")
    assert tokenizer.decode(tokenizer("two words")["input_ids"]) == "two words"
    assert tokenizer.eos_token_id == int(trl_tests.TOKEN_IDS["151645"]) == len(tokenizer) - 1
    assert len(tokenizer) == model.config.vocab_size
    options = {"cache_dir": str(tmp_path / "cache")}
    rows = load_dataset("trl-internal-testing/zen", "standard_prompt_only", **options)
    assert [*rows["train"]["prompt"], *rows["test"]["prompt"]] == stand_ins.PROMPTS
