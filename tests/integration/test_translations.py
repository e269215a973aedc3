"""The pages in Traditional Chinese say what the English ones say: the same numbers, code and options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import pytest
import yaml

from colocate import GRPOConfig
from colocate.config.help import option_sections
from colocate.config.run_config import parse_run
from colocate.data.prompts import tokenize_prompts
from colocate.rewards import accuracy_reward
from tiny import make_model, make_tokenizer
from tool_chat import make_chat_tokenizer

ROOT = Path(__file__).parents[2]
ENGLISH = {
    "README.zh-Hant.md": "README.md",
    "docs/zh-Hant/quickstart.md": "docs/quickstart-gpu.md",
    "docs/zh-Hant/moving-from-trl.md": "docs/moving-from-trl.md",
}
SIMPLIFIED = "训练样权显优数据构类设选项张并执线脚预认词汇标轮给话错误说写览终级调档输图"
"""Characters that only simplified texts have."""
MAINLAND = re.compile(
    "內存|顯存|服務器|默認|代碼|緩存|數據|優化|采樣|循環|線程|進程|信息|"
    "激活|指令碼|回復|提示詞|配置文件|運行|響應|網絡|打印"
)
"""Words of the mainland in traditional characters, which machines write and Taiwan does not."""


def read(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(name), flags=re.DOTALL)


def numbers(text: str) -> set[str]:
    """Numbers with a point, a comma, a per cent sign or a unit: figures, not list counts."""
    return set(re.findall(r"\d+(?:[.,]\d+)+|\d+(?=%|\s(?:ms|GiB|GPUs?|seconds|bytes|秒|位元組))", text))


@pytest.mark.parametrize("page", ENGLISH)
def test_figures_are_those_of_the_english_page(page):
    beside = read("docs/install.md") + read("docs/metrics.md")
    assert numbers(read(page)) <= numbers(read(ENGLISH[page]) + beside)


def test_the_first_screen_has_every_figure_of_the_english_one():
    english = re.split(r"^```python", read("README.md"), flags=re.MULTILINE)[0]
    assert numbers(english) <= numbers(read("README.zh-Hant.md"))


def test_code_is_that_of_the_english_pages():
    assert blocks("README.zh-Hant.md", "python") == blocks("README.md", "python")
    assert blocks("docs/zh-Hant/quickstart.md", "yaml") == blocks("docs/quickstart-gpu.md", "yaml")

    def commands(page: str) -> set[str]:
        lines = "\n".join(blocks(page, "bash")).splitlines()
        return {line.partition(" #")[0].strip() for line in lines if line.strip()}

    assert commands("README.zh-Hant.md") <= commands("README.md")
    known = commands("docs/quickstart-gpu.md")
    assert commands("docs/zh-Hant/quickstart.md") <= known
    parse_run(yaml.safe_load(*blocks("docs/zh-Hant/quickstart.md", "yaml")))


def test_the_script_of_the_page_about_trl_runs(tmp_path, monkeypatch):
    (code,) = blocks("docs/zh-Hant/moving-from-trl.md", "python")
    short = "max_steps=1, use_cpu=True, max_completion_length=8"
    code = code.replace('output_dir="runs/len"', f'output_dir="runs/len", {short}')
    code = code.replace('"Qwen/Qwen2.5-0.5B-Instruct"', "str(directory)")
    make_model(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = datasets.Dataset.from_dict({"prompt": [f"{i} plus {i} is" for i in range(4)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    monkeypatch.chdir(tmp_path)
    names: dict = {"directory": tmp_path / "model"}
    exec(compile(code, "page", "exec"), names)
    assert names["main"]().state.global_step == 1


def test_options_that_the_pages_name_exist():
    known = {option.name for options in option_sections().values() for option in options}
    known |= set(GRPOConfig.__dataclass_fields__) | {"frac_reward_zero_std", "reward_len", "grad_norm"}
    for page in ENGLISH:
        for code in re.findall(r"`([a-z]+_[a-z0-9_]+)(?:=[^`]*)?`", read(page)):
            assert code in known, (page, code)


def traditional(page: str) -> list[str]:
    """The lines of a page without the glossary's column in simplified Chinese."""
    lines = read(page).splitlines()
    return ["|".join(line.split("|")[:3]) for line in lines] if page.endswith("glossary.md") else lines


@pytest.mark.parametrize("page", [*ENGLISH, "docs/zh-Hant/glossary.md"])
def test_characters_are_traditional_and_words_taiwans(page):
    for line in traditional(page):
        assert not set(line) & set(SIMPLIFIED), line
        assert not MAINLAND.search(line), line


def test_the_glossary_has_the_words_that_machines_get_wrong():
    terms = {line.split("|")[2].strip() for line in traditional("docs/zh-Hant/glossary.md") if "|" in line}
    assert terms >= {"記憶體", "伺服器", "訓練迴圈", "權重共用", "腳本", "回應", "梯度檢查點", "取樣生成"}


def test_the_row_in_chinese_is_a_prompt_with_a_solution_that_is_recognised():
    (line,) = blocks("docs/zh-Hant/quickstart.md", "json")
    row = json.loads(line)
    (prompt,) = tokenize_prompts([row], make_chat_tokenizer())
    assert len(prompt) > len(row["prompt"][0]["content"])
    answers = ["一共有 3 + 4 顆，所以答案是 7 顆。", "答案：７", "答案是 8"]
    assert accuracy_reward(answers, [row["solution"]] * 3) == [1.0, 1.0, 0.0]


def test_links_lead_somewhere():
    for page in (*ENGLISH, "docs/zh-Hant/glossary.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
            assert (ROOT / page).parent.joinpath(target).exists(), (page, target)
