"""The recipes fit the GPUs that they name, and a small twin of each takes two steps."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from colocate.cli import main
from model_configs import CONFIGS
from tiny import CHAT_TEMPLATE, make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*-*.yaml"))
PAGE = (ROOT / "docs" / "recipes.md").read_text()
FAMILIES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama"}
QUESTION = {"question": "1 + 2 =", "prompt": "1 + 2 =", "answer": "1+2=3\n#### 3", "solution": "3"}
COLUMNS = {"openai/gsm8k": ("question", "answer"), "open-r1/DAPO-Math-17k-Processed": ("prompt", "solution")}
TWIN = """
    --max_steps 2 --max_prompt_length 96 --max_completion_length 24 --gradient_accumulation_steps 2
    --learning_rate 1e-2 --eval_steps 2 --max_eval_rows 2 --per_device_eval_batch_size 8 --use_cpu
    --disable_tqdm --save_strategy no --output_dir out
"""

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)


def commands(recipe: Path) -> tuple[list[str], list[str]]:
    """The commands in a recipe's head: the one that plans and the one that trains."""
    head = recipe.read_text().partition("\n\n")[0]
    plan, train = re.findall(r"^#   (.+)$", head, flags=re.MULTILINE)
    return plan.split(), train.split()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Configurations of the models that recipes name, and a tiny model of each family."""
    directory = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        config.save_pretrained(directory / name)
    for family in FAMILIES.values():
        make_model(family).save_pretrained(directory / family)
        make_tokenizer().save_pretrained(directory / family)
    return directory


def test_there_are_recipes_for_each_task_family_way_and_number_of_gpus():
    options = [yaml.safe_load(file.read_text()) for file in RECIPES]
    assert {option["model_name_or_path"] for option in options} == set(CONFIGS)
    assert {file.stem.rpartition("-")[2] for file in RECIPES} == {"full", "lora", "qlora"}
    assert {re.match("gsm8k|dapo-math|countdown", file.stem)[0] for file in RECIPES} == {
        "gsm8k", "dapo-math", "countdown",
    }  # fmt: skip
    gpus = {re.search(r"--num_gpus (\d+)", file.read_text()) for file in RECIPES}
    assert {match[1] for match in gpus if match} == {"2", "8"} and None in gpus


@each_recipe
def test_a_recipe_fits_the_gpus_that_it_names(recipe, models, capsys):
    (program, command, file, *asked), train = commands(recipe)
    assert (program, command, file) == ("colocate", "plan", f"recipes/{recipe.name}")
    assert train[-2:] == ["train", file]
    num_gpus = asked[asked.index("--num_gpus") + 1] if "--num_gpus" in asked else "1"
    assert train[: 3 if num_gpus != "1" else 1] == (
        ["torchrun", "--nproc_per_node", num_gpus] if num_gpus != "1" else ["colocate"]
    )
    options = yaml.safe_load(recipe.read_text())
    model = models / options["model_name_or_path"]
    assert main(["plan", str(recipe), "--model_name_or_path", str(model), "--json", *asked]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fits"]
    row = re.search(rf"\(\.\./{file}\) \| (\d+) x (\S+) \| ([\d.]+) GiB \| (\d+) (s|min) \|", PAGE)
    assert row[1] == num_gpus and row[2] == asked[asked.index("--gpu") + 1]
    assert float(row[3]) == pytest.approx(result["peak_bytes"] / 2**30, rel=0.02)
    seconds = int(row[4]) * (60 if row[5] == "min" else 1)
    assert seconds == pytest.approx(result["expected_step"]["seconds"], rel=0.1)
    # What the comment says of the batch is what the options come to.
    words = re.search(
        r"^# (\d+) x (\d+) x (\d+) = (\d+) completions .*, (\d+) prompts\.$", recipe.read_text(), re.M
    )
    gpus, per_device, accumulated, completions, prompts = map(int, words.groups())
    assert gpus == int(num_gpus) and gpus * per_device * accumulated == completions
    assert per_device == options["per_device_train_batch_size"]
    assert accumulated == options["gradient_accumulation_steps"]
    assert prompts * options["num_generations"] == completions
    assert options["output_dir"] == f"runs/{recipe.stem}"


TRAINED_IN_EVERY_RUN = (
    *("countdown-llama-3.2-3b-lora", "countdown-qwen3-0.6b-full", "dapo-math-qwen2.5-7b-full"),
    *("dapo-math-qwen3-14b-lora", "gsm8k-qwen2.5-7b-qlora"),
)
"""Of each task, family and way one."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(file, id=file.stem, marks=[] if file.stem in TRAINED_IN_EVERY_RUN else pytest.mark.slow)
        for file in RECIPES
    ],
)
@pytest.mark.share(2)
def test_a_small_twin_takes_two_steps(recipe, models, tmp_path, monkeypatch):
    """The recipe's own options, but a tiny model of the family, local rows, short texts and a small batch."""
    monkeypatch.chdir(tmp_path)
    options = yaml.safe_load(recipe.read_text())
    family = next(kind for name, kind in FAMILIES.items() if name in options["model_name_or_path"])
    group = str(options["num_generations"])
    overrides = ["--model_name_or_path", str(models / family), "--per_device_train_batch_size", group]
    if names := COLUMNS.get(options["dataset_name"]):
        row = {name: QUESTION[name] for name in names}
        for split in ("train", "test"):
            Path("data").mkdir(exist_ok=True)
            Path("data", f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
        overrides += ["--dataset_name", "data", "--dataset_config", "none"]
    else:
        overrides += ["--dataset_options", "{size: 8}"]
    # A reward that differs among random completions, beside the recipe's own.
    Path("spread.py").write_text(
        "def spread(completions, **columns):\n    return [len(c[-1]['content']) / 24 for c in completions]\n"
    )
    rewards = ["--reward_funcs", *options["reward_funcs"], "spread.py:spread"]
    assert main(["train", str(recipe), *overrides, *rewards, *TWIN.split()]) == 0
    records = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in steps)
    assert any("eval_reward" in record for record in records) == ("eval_strategy" in options)
    assert Path("out", "adapter_model.safetensors").exists() == options.get("use_peft", False)


def test_a_small_mixture_of_experts_trains_from_the_run_file_of_the_page(tmp_path, monkeypatch):
    """The page's own options, but a tiny model, with transformers in vLLM's place."""
    monkeypatch.chdir(tmp_path)
    (text,) = re.findall(r"```yaml\n(# moe\.yaml\n.*?)```", PAGE, re.DOTALL)
    options = yaml.safe_load(text)
    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
        num_experts_per_tok=2, max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained("model")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained("model")
    Path("data").mkdir()
    Path("data", "train.jsonl").write_text(f"{json.dumps({'question': '1 + 2 =', 'answer': '#### 3'})}\n" * 8)
    words = ["--model_name_or_path", "model", "--dataset_name", "data", "--dataset_config", "none"]
    words += ["--engine", "transformers", "--max_steps", "1", "--max_completion_length", "8", "--use_cpu"]
    Path("run.yaml").write_text(text)
    assert main(["train", "run.yaml", *words, "--disable_tqdm", "--save_strategy", "no"]) == 0
    adapted = load_file(Path(options["output_dir"], "adapter_model.safetensors"))
    projections = {re.search(r"(\w+)\.lora_[AB]", name)[1] for name in adapted}
    assert projections == set(options["lora_target_modules"])
