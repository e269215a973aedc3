"""What TRL's scripts import beside the trainer, against TRL's own: fields, parser, what is made of them."""

import contextlib
import dataclasses
import io
import json
import os
import typing
import warnings

import datasets
import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl.scripts.utils import DatasetConfig as TRLDatasetConfig

import colocate

CLASSES = {
    "ScriptArguments": trl.ScriptArguments,
    "ModelConfig": trl.ModelConfig,
    "DatasetMixtureConfig": trl.DatasetMixtureConfig,
    "DatasetConfig": TRLDatasetConfig,
}


def parsers(*names):
    """Our parser and TRL's, each with the classes of these names."""
    return (
        colocate.TrlParser([getattr(colocate, name) for name in names]),
        trl.TrlParser([CLASSES.get(name) or getattr(trl, name) for name in names]),
    )


@pytest.mark.parametrize("name", CLASSES)
def test_fields_types_and_defaults_are_trls(name):
    def described(record):
        hints = typing.get_type_hints(record)
        return [
            (
                field.name,
                str(hints[field.name]).replace(record.__module__, ""),
                field.default,
                field.default_factory,
                field.metadata.get("choices"),
            )
            for field in dataclasses.fields(record)
        ]

    ours = [
        (name, hint.replace("colocate.trl.scripts.arguments", ""), *rest)
        for name, hint, *rest in described(getattr(colocate, name))
    ]
    theirs = [
        (name, hint.replace("trl.scripts.utils", ""), *rest) for name, hint, *rest in described(CLASSES[name])
    ]
    assert ours == theirs
    if name != "DatasetConfig":  # which no command line has
        assert all(field.metadata["help"] for field in dataclasses.fields(getattr(colocate, name)))


# ── The parser ───────────────────────────────────────────────────────────────────────────────────────────

WORDS = st.text("abcxyz-/_.", min_size=1, max_size=8).filter(lambda word: not word.startswith("-"))
TRUTH = st.sampled_from([[], ["True"], ["false"], ["yes"], ["n"], ["0"], ["maybe"]])
NUMBERS = st.sampled_from(["1", "16", "1e-3", "-2", "0.5", "None", "null", "many"])
ARGUMENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["--dataset_name", "--dataset-config", "--model_revision"]), WORDS).map(
            list
        ),
        st.tuples(st.sampled_from(["--use_peft", "--load-in-4bit", "--dataset_streaming"]), TRUTH).map(
            lambda pair: [pair[0], *pair[1]]
        ),
        st.tuples(st.sampled_from(["--lora_r", "--lora_dropout", "--test_split_size"]), NUMBERS).map(list),
        st.tuples(st.just("--lora_target_modules"), st.lists(WORDS, min_size=1, max_size=3)).map(
            lambda pair: [pair[0], *pair[1]]
        ),
        st.sampled_from([["--dtype", "bfloat16"], ["--dtype", "int4"], ["--bnb_4bit_quant_type", "fp4"]]),
        st.sampled_from([["--no_such", "1"], ["--lora_r"], ["stray"], ["--no_use_peft"]]),
    ),
    max_size=6,
).map(lambda groups: [word for group in groups for word in group])

ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dataset_name": WORDS,
        "lora_r": st.sampled_from([4, "8", 3.0]),
        "lora_dropout": st.sampled_from([0.1, "0.25"]),
        "lora_target_modules": st.sampled_from(["all-linear", ["q_proj"], ["q_proj", "v_proj"]]),
        "use_peft": st.sampled_from([True, "true"]),
        "streaming": st.booleans(),
        "datasets": st.just([{"path": "a", "split": "b", "fraction": 0.5}, {"path": "c"}]),
        "env": st.sampled_from([{}, {"COLOCATE_TEST_A": 1, "COLOCATE_TEST_B": "two"}, "NAME=1"]),
        "unknown": st.just(1),
    },
)


def parsed(parser, arguments, **options):
    """Values by dataclass, what remains, and the environment set; or the kind of error."""
    before = dict(os.environ)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = parser.parse_args_and_config(arguments, **options)
    except SystemExit as error:
        return f"exit {error.code}"
    except ValueError:
        return "ValueError"
    finally:
        found = {name: value for name, value in os.environ.items() if before.get(name) != value}
        os.environ.clear()
        os.environ.update(before)
    values = [dataclasses.asdict(one) if dataclasses.is_dataclass(one) else one for one in outputs]
    return values, found


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_command_line_and_file_are_parsed_as_by_trl(data, tmp_path):
    arguments, options = data.draw(ARGUMENTS), {}
    if (entries := data.draw(st.none() | ENTRIES)) is not None:
        file = tmp_path / "script.yaml"
        file.write_text(json.dumps(entries), encoding="utf-8")
        arguments = ["--config", str(file), *arguments]
    for name in ("return_remaining_strings", "fail_with_unknown_args", "separate_remaining_strings"):
        if data.draw(st.booleans()):
            options[name] = name != "fail_with_unknown_args"
    ours, theirs = parsers("ScriptArguments", "ModelConfig", "DatasetMixtureConfig")
    expected = parsed(theirs, arguments, **options)
    result = parsed(ours, arguments, **options)
    if isinstance(expected, tuple) and result == "ValueError":
        # Values out of range, which TRL leaves to PEFT.
        model = next(one for one in expected[0] if "lora_r" in one)
        assert model["lora_r"] < 1 or not 0 <= model["lora_dropout"] < 1
    else:
        assert result == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--learning_rate", "3e-6", "--num_generations", "4", "--per_device_train_batch_size", "4"],
        ["--scale_rewards", "batch", "--loss_type", "dr_grpo", "--use_vllm", "False"],
        ["--scale_rewards", "false", "--beta", "0.1", "--no_shuffle_dataset"],
        ["--model_init_kwargs", '{"dtype": "bfloat16", "revision": "main"}', "--log_completions"],
        ["--chat_template_kwargs", '{"enable_thinking": false}', "--top_k", "20", "--epsilon_high", "None"],
        ["--reward_weights", "0.5", "2", "--report_to", "none", "--lr_scheduler_type", "cosine"],
        ["--optim", "adamw_torch", "--warmup_steps", "0.1", "--seed", "7", "--use_cpu", "true"],
        [
            "--resume_from_checkpoint",
            "some/where",
            "--gradient_checkpointing_kwargs",
            '{"use_reentrant": true}',
        ],
        ["--learning_rate", "fast"],
        ["--eval_strategy", "sometimes"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_options_of_the_trainer_are_parsed_as_by_trl(arguments, tmp_path):
    """With GRPOConfig of colocate in one and TRL's in the other."""
    results = []
    for parser in parsers("ScriptArguments", "GRPOConfig", "ModelConfig"):
        results.append(parsed(parser, ["--output_dir", str(tmp_path), "--use_cpu", *arguments]))
    if isinstance(results[1], str):
        assert results[0] == results[1]
        return
    (ours, _), (theirs, _) = results
    names = {words[2:].removeprefix("no_") for words in arguments if words.startswith("--")}
    for name in names:
        if name == "scale_rewards" and ours[1][name] in ("group", "none"):
            assert (ours[1][name] == "group") == (theirs[1][name] in (True, "true", "group"))
        else:
            assert ours[1][name] == theirs[1][name], name
    assert ours[0] == theirs[0] and ours[2] == theirs[2]


# ── What is made of the arguments ────────────────────────────────────────────────────────────────────────

MODEL_OPTIONS = st.fixed_dictionaries(
    {"use_peft": st.booleans()},
    optional={
        "lora_r": st.integers(1, 64),
        "lora_alpha": st.integers(1, 64),
        "lora_dropout": st.sampled_from([0.0, 0.1]),
        "lora_target_modules": st.sampled_from([None, ["all-linear"], ["q_proj"], ["q_proj", "v_proj"]]),
        "lora_target_parameters": st.sampled_from([None, ["experts.gate_up_proj"]]),
        "lora_modules_to_save": st.sampled_from([None, ["lm_head"]]),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "dtype": st.sampled_from([None, "bfloat16", "float32"]),
        "load_in_8bit": st.booleans(),
        "load_in_4bit": st.booleans(),
        "bnb_4bit_quant_type": st.sampled_from(["fp4", "nf4"]),
        "use_bnb_nested_quant": st.booleans(),
        "bnb_4bit_quant_storage": st.sampled_from([None, "uint8", "bfloat16"]),
    },
)


@given(options=MODEL_OPTIONS)
@settings(max_examples=100, deadline=None)
def test_adapters_and_quantisation_are_trls(options):
    def made(module):
        try:
            config = module.ModelConfig(**{name: copied(value) for name, value in options.items()})
        except ValueError:
            return "ValueError"
        peft, quantisation = module.get_peft_config(config), module.get_quantization_config(config)
        return peft and peft.to_dict(), quantisation and quantisation.to_dict()

    assert made(colocate) == made(trl)


def copied(value):
    return list(value) if isinstance(value, list) else value


# ── Mixtures ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = {"prompt": [f"{i} + 1" for i in range(12)], "answer": list(range(12))}
    datasets.Dataset.from_dict(rows).to_json(folder / "a.jsonl")
    (folder / "parquet").mkdir()
    train = datasets.Dataset.from_dict({**rows, "extra": ["x"] * 12})
    train.to_parquet(folder / "parquet" / "train.parquet")
    train.select(range(5)).to_parquet(folder / "parquet" / "test.parquet")
    return folder


MIXTURES = {
    "files of a reader": [{"path": "json", "data_files": "{0}/a.jsonl"}],
    "a split of a folder": [{"path": "{0}/parquet", "split": "test", "columns": ["answer"]}],
    "a slice": [{"path": "{0}/parquet", "split": "train[:4]"}],
    "two": [
        {"path": "json", "data_files": ["{0}/a.jsonl"]},
        {"path": "{0}/parquet", "columns": ["prompt", "answer"]},
    ],
    "fractions": [
        {"path": "json", "data_files": {"train": "{0}/a.jsonl"}, "fraction": 3},
        {"path": "{0}/parquet", "split": "test", "columns": ["prompt", "answer"], "fraction": 1},
    ],
    "a fraction of nothing": [
        {"path": "json", "data_files": "{0}/a.jsonl", "fraction": 0.7},
        {"path": "{0}/parquet", "columns": ["prompt", "answer"], "fraction": 0},
    ],
    "only one fraction": [
        {"path": "json", "data_files": "{0}/a.jsonl", "fraction": 0.5},
        {"path": "{0}/parquet", "columns": ["prompt", "answer"]},
    ],
    "none": [],
}


def in_folder(value, folder):
    if isinstance(value, dict):
        return {key: in_folder(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [in_folder(one, folder) for one in value]
    return value.format(folder) if isinstance(value, str) else value


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_is_trls(name, streaming, folder):
    def rows(module):
        entries = in_folder(MIXTURES[name], folder)
        try:
            mixture = module.get_dataset(module.DatasetMixtureConfig(datasets=entries, streaming=streaming))
        except ValueError:
            return "ValueError"
        return {split: list(dataset) for split, dataset in mixture.items()}

    assert rows(colocate) == rows(trl)


def test_split_of_a_mixture_has_trls_sizes_and_is_the_same_on_every_rank(folder):
    def sizes(module, size):
        entries = [{"path": "json", "data_files": f"{folder}/a.jsonl"}]
        return module.get_dataset(module.DatasetMixtureConfig(datasets=entries, test_split_size=size))

    for size in (0.25, 5):
        ours, again, theirs = sizes(colocate, size), sizes(colocate, size), sizes(trl, size)
        assert {name: len(part) for name, part in ours.items()} == {n: len(p) for n, p in theirs.items()}
        assert sorted([*ours["train"]["answer"], *ours["test"]["answer"]]) == list(range(12))
        assert ours["test"]["answer"] == again["test"]["answer"]
