"""What of a script's arguments is not TRL's: errors, help, YAML 1.2, and where the callback draws."""

import dataclasses
import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from trl import RichProgressCallback as TRLCallback

import colocate
from colocate import DatasetConfig, DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser
from colocate.config.run_config import RunConfig
from colocate.options.declared import ranges_of
from colocate.reporting.progress import Progress
from colocate.trl.scripts import model_config


def test_names_are_found_without_loading_torch():
    code = (
        "import sys, colocate; from colocate import ScriptArguments, ModelConfig, DatasetMixtureConfig; "
        "print(sorted({'torch', 'transformers', 'datasets', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists():
    for name in colocate.__all__:
        assert getattr(colocate, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such"):
        colocate.no_such  # noqa: B018


# ── ModelConfig ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, r"dtype='float16' is not supported: float16 needs loss scaling.*'bfloat16'"),
        ({"dtype": "bf16"}, r"dtype='bf16' is unknown; it is one of auto, bfloat16.*Did you mean 'bfloat16'"),
        ({"lora_task_type": "SEQ_CLS"}, r"lora_task_type='SEQ_CLS' is not supported: .* remove it"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "exclude each other"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type='int4' is unknown; it is one of fp4, nf4"),
        ({"lora_r": 0}, "lora_r=0 must be at least 1"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be at least 0 and less than 1"),
    ],
)
def test_values_that_are_not_honoured_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**options)


def test_ranges_are_those_of_run_files():
    shared = {field.name for field in dataclasses.fields(ModelConfig)}
    ranges = {name: one for name, one in ranges_of(RunConfig).items() if name in shared}
    assert ranges == model_config._RANGES


def test_commas_between_modules_are_no_part_of_their_names():
    """TRL documents `--lora_target_modules "q_proj", "v_proj"`; PEFT would adapt v_proj alone."""
    (config,) = TrlParser(ModelConfig).parse_args_and_config(["--lora_target_modules", "q_proj,", "v_proj"])
    assert config.lora_target_modules == ["q_proj", "v_proj"]


def test_products_in_4_bits_need_a_type():
    config = ModelConfig(load_in_4bit=True, dtype="auto")
    with pytest.raises(ValueError, match="set dtype='bfloat16' or 'float32'"):
        colocate.get_quantization_config(config)


def test_adapters_without_peft_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'peft>=0\.18'"):
        colocate.get_peft_config(ModelConfig(use_peft=True))


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_quantised_weights_are_loaded_to_the_gpu_of_this_process(monkeypatch, num_gpus):
    import accelerate
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(accelerate, "PartialState", lambda: SimpleNamespace(local_process_index=1))
    assert colocate.get_kbit_device_map() == ({"": 1} if num_gpus else None)


# ── The parser ───────────────────────────────────────────────────────────────────────────────────────────


def parse(arguments, *classes, **options):
    return TrlParser(classes).parse_args_and_config(arguments, **options)


def test_file_is_read_as_yaml_1_2_and_the_command_line_overrides_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    file = tmp_path / "script.yaml"
    file.write_text(
        "env:\n  COLOCATE_TEST: on\nlora_dropout: 1e-2\nlora_r: 4\nmodel_revision: 010\ndataset_name: no\n"
    )
    script, model = parse([f"--config={file}", "--lora_r", "8"], ScriptArguments, ModelConfig)
    assert (model.lora_dropout, model.lora_r, script.dataset_name) == (0.01, 8, "no")
    assert os.environ["COLOCATE_TEST"] == "on"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lora_rank: 4", r"script\.yaml has arguments .* 'lora_rank'; did you mean 'lora_r'"),
        ("lora_r: 4\nlora_r: 8", "'lora_r' is given twice, in line 1 and in line 2"),
        ("[1, 2]", "must hold options as `name: value` lines, not list"),
        ("env: [A]", r"env=\['A'\] in .* is not a mapping"),
        ("datasets: [{path: a, splt: b}]", "'splt' is no key; did you mean 'split'"),
        ("datasets: [{name: a}]", "has no path"),
        ("datasets: [a]", "'a', which is no mapping"),
        ("dtype: float16", "dtype='float16' is not supported"),
    ],
)
def test_file_that_is_wrong_is_refused_with_what_to_change(content, words, tmp_path):
    file = tmp_path / "script.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=words):
        parse(["--config", str(file)], ModelConfig, DatasetMixtureConfig)


def test_file_that_is_missing_is_named():
    with pytest.raises(FileNotFoundError, match=r"--config nowhere\.yaml: there is no such file"):
        parse(["--config", "nowhere.yaml"], ModelConfig)
    with pytest.raises(ValueError, match="--config needs a file"):
        parse(["--lora_r", "4", "--config"], ModelConfig)


def test_a_class_with_a_field_config_is_refused():
    record = dataclasses.make_dataclass("Record", [("config", str, "")])
    with pytest.raises(ValueError, match="Record has a field named 'config'"):
        TrlParser([record])


def test_mappings_and_none_are_read_from_text(capsys):
    record = dataclasses.make_dataclass(
        "Record",
        [("options", dict[str, int] | None, None), ("size", float | None, 1.0), ("flag", bool | None, None)],
    )
    (made,) = parse(["--options", "{a: 1}", "--size", "None", "--flag"], record)
    assert (made.options, made.size, made.flag) == ({"a": 1}, None, True)
    assert parse(["--options", "none"], record)[0].options is None
    with pytest.raises(SystemExit):
        parse(["--options", "[1]"], record)
    assert "'[1]' is no mapping" in capsys.readouterr().err


def test_help_has_every_option_of_the_trainer():
    text = " ".join(TrlParser((colocate.GRPOConfig, ModelConfig)).format_help().split())
    for words in (
        "--num_generations NUM_GENERATIONS",
        "Completions per prompt (G): at least 2",
        "The initial learning rate",
        "Rank of the LoRA adapters. (default: 16)",
    ):
        assert words in text


def test_mixture_refuses_shares_that_are_none():
    for fractions in ((-1, 2), (0, 0)):
        mixture = DatasetMixtureConfig([DatasetConfig("a", fraction=one) for one in fractions])
        with pytest.raises(ValueError, match="are no shares"):
            colocate.get_dataset(mixture)
    stream = DatasetMixtureConfig([DatasetConfig("a")], streaming=True, test_split_size=0.5)
    with pytest.raises(ValueError, match=r"test_split_size=0\.5 needs the number of rows.*streaming=False"):
        colocate.get_dataset(stream)


def test_bias_buffers_need_no_care(caplog):
    ScriptArguments(ignore_bias_buffers=True)
    assert "ignore_bias_buffers=True is not needed" in caplog.text


# ── The callback ─────────────────────────────────────────────────────────────────────────────────────────

LOGS = {"loss": 0.125, "rewards/format/mean": 0.5, "rewards/format/std": 0.25, "kl": 0.375}


def play(callback):
    """Call a callback as a run of four steps does; returns the screen after the second."""
    args, state = SimpleNamespace(), SimpleNamespace(is_world_process_zero=True, max_steps=4, global_step=0)
    callback.on_train_begin(args, state, None)
    for state.global_step in (1, 2):
        callback.on_step_end(args, state, None)
        callback.on_log(args, state, None, logs=LOGS)
    live = next((one for one in vars(callback).values() if type(one).__name__ == "Live"), None)
    screen = Console(file=io.StringIO(), width=100)
    if live is not None:
        screen.print(live.renderable)
    callback.on_train_end(args, state, None)
    return screen.file.getvalue()


def test_callback_shows_what_trls_shows(capsys):
    ours, theirs = play(colocate.RichProgressCallback()), play(TRLCallback())

    def cells(screen):
        words = screen.replace("│", " ").split()
        return [word.rstrip("0") if "." in word else word for word in words if word not in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"]

    assert "Step 2" in ours and "50%" in ours
    assert cells(ours) == cells(theirs)


def test_callback_leaves_a_terminal_to_the_panel_and_prints_through_the_same_console():
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        callback = colocate.RichProgressCallback()
        callback.progress = Progress(console=console)
        assert callback.progress.has_display == is_terminal
        assert bool(play(callback)) != is_terminal
        assert ("Step 2" in console.file.getvalue()) != is_terminal
