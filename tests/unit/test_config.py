"""GRPOConfig: every option classified, refused or explained; errors that carry the arithmetic."""

import contextlib
import copy
import dataclasses
import logging
import pickle

import pytest
import transformers
from accelerate.parallelism_config import ParallelismConfig
from packaging.version import Version
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from colocate import GRPOTrainer
from colocate.config import launchers
from colocate.config.grpo_config import GRPOConfig
from colocate.config.honoured import HONOURED_BY, REFUSED, UNNECESSARY, check_support, honoured
from colocate.config.transformers_options import CHOICES, RANGES
from colocate.options.declared import choices_of, declared, default_of
from colocate.options.names import ALIASES, OF_TRL, override
from colocate.options.values import coerce, shown
from colocate.reporting.provenance import changed_options
from colocate.run.engine import sampling_params

FIELDS = {field.name: field for field in dataclasses.fields(GRPOConfig)}
CLASSES = (honoured(GRPOConfig), set(ALIASES), set(UNNECESSARY), set(REFUSED))


def other_than(name):
    """A value of the option's type that is not its default."""
    default, hint = default_of(FIELDS[name]), declared(GRPOConfig)[name].hint
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    anything = ("something else", 2, 0.5, True, ["something"], {"something": 1}, ParallelismConfig())
    for value in (*choices_of(GRPOConfig).get(name, ()), *anything):
        with contextlib.suppress(ValueError):
            if (read := coerce(name, value, hint)) == value != default:
                return read
    raise AssertionError(f"no value for {name}, which is {hint}")


@pytest.fixture
def make(tmp_path):
    return lambda **options: GRPOConfig(output_dir=str(tmp_path), **options)


# ── Classification ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_is_classified_once(name, make):
    count = sum(name in names for names in CLASSES)
    if count == 0 and Version(transformers.__version__) > Version("5.23.99"):
        with pytest.raises(ValueError, match="does not know it"):
            make(**{name: other_than(name)})
    else:
        assert count == 1, f"{name} is in {count} of the four classes"


def test_no_class_names_an_option_that_does_not_exist():
    # transformers 5.17 has these two under their older names only.
    version_specific = {"activation_checkpointing", "activation_checkpointing_kwargs"}
    assert set().union(*CLASSES) - set(FIELDS) <= version_specific
    assert set(CHOICES) | set(RANGES) <= set(FIELDS)


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(FIELDS)))
def test_refused_options_name_themselves_and_the_reason(name, make):
    value = other_than(name)
    with pytest.raises(ValueError) as error:
        make(**{name: value})
    assert str(error.value).startswith(f"{name}={shown(value)} is not supported: ")
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", sorted(set(REFUSED) & set(FIELDS)))
def test_refused_options_pass_at_their_default(name, make):
    field = FIELDS[name]
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    make(**{name: default})


OTHER_VALUES = {
    "torch_empty_cache_steps": 2,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_model_impl": "auto",
    "vllm_weights": "buckets",
    "vllm_on_server_loss": "wait",
    "accelerator_config": {"even_batches": False},
}


# Options whose every other value transformers itself would reject on this machine, or that need one more.
@pytest.mark.parametrize("name", sorted(set(UNNECESSARY) & set(FIELDS) - {"bf16_full_eval"}))
def test_unnecessary_options_are_accepted_with_one_line(name, make, caplog):
    value = OTHER_VALUES[name] if name in OTHER_VALUES else other_than(name)
    with caplog.at_level(logging.WARNING, "colocate"):
        make(**{name: value})
    lines = [message for message in caplog.messages if message.startswith(f"{name}=")]
    assert lines == [f"{name}={value!r} is not needed: {UNNECESSARY[name]}."]


def test_defaults_say_nothing(make, caplog):
    with caplog.at_level(logging.WARNING, "colocate"):
        make()
    assert caplog.messages == []


def test_an_option_of_a_newer_transformers_is_refused(tmp_path):
    @dataclasses.dataclass(repr=False)
    class Newer(GRPOConfig):
        shiny_feature: bool = False

    Newer(output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"shiny_feature=True .* does not know it"):
        Newer(output_dir=str(tmp_path), shiny_feature=True)


# ── Old and vLLM names ───────────────────────────────────────────────────────────────────────────────────


VLLM_OPTIONS = {
    "use_vllm": True,
    "vllm_tensor_parallel_size": 2,
    "vllm_gpu_memory_utilization": 0.4,
    "vllm_enable_sleep_mode": False,
    "vllm_model_impl": "transformers",
    "vllm_weights": "buckets",
    "vllm_engine_kwargs": {"enforce_eager": True},
}


def test_vllm_honours_its_options_without_a_word(make, caplog):
    assert set(VLLM_OPTIONS) == HONOURED_BY["vllm"]
    with caplog.at_level(logging.WARNING, "colocate"):
        config = make(engine="vllm", **VLLM_OPTIONS)
    assert caplog.messages == []
    assert {name: getattr(config, name) for name in VLLM_OPTIONS} == VLLM_OPTIONS


def test_vllms_options_wait_for_the_model_where_it_chooses_the_engine(make, caplog):
    with caplog.at_level(logging.WARNING, "colocate"):
        config = make(engine="auto", **VLLM_OPTIONS)
    assert [line.partition("=")[0] for line in caplog.messages] == ["use_vllm"]
    assert check_support(config, "vllm") == []
    for engine in ("native", "transformers"):
        with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2 is not supported"):
            check_support(config, engine)
    assert check_support(make(use_vllm=True, page_size=16), "native") == []
    with pytest.raises(ValueError, match=r"page_size=16 is not read with engine='vllm'"):
        check_support(make(use_vllm=True, page_size=16), "vllm")


SERVER_OPTIONS = {
    "use_vllm": True,
    "vllm_mode": "server",
    "rollout_server_base_url": "http://node7:9000",
    "rollout_server_host": "node7",
    "rollout_server_port": 9000,
    "rollout_server_timeout": 10.0,
    "vllm_on_server_loss": "wait",
    "vllm_group_host": "node6",
    "vllm_group_port": 9001,
}


@pytest.mark.parametrize("engine", ["vllm_server", "auto"])
def test_a_server_is_asked_for_by_engine_or_as_trl_does(make, caplog, engine):
    assert set(SERVER_OPTIONS) == HONOURED_BY["rollout_server"]
    with caplog.at_level(logging.WARNING, "colocate"):
        config = make(engine=engine, **SERVER_OPTIONS)
    assert caplog.messages == []
    assert config.engine == "rollout_server"


def test_a_server_that_nobody_would_ask_is_refused(make):
    for options in ({}, {"use_vllm": True, "engine": "native"}, {"use_vllm": True, "engine": "vllm"}):
        with pytest.raises(ValueError, match=r"vllm_mode='server' is not supported.*engine='rollout_server'"):
            make(vllm_mode="server", **options)
    with pytest.raises(ValueError, match=r"page_size=16 is not read.*rollout-serve`; vLLM: -- --block-size"):
        make(engine="vllm_server", page_size=16)


def test_the_native_cache_options_are_not_vllms(make):
    with pytest.raises(ValueError, match=r"page_size=16 is not read with engine='vllm'.*'block_size'"):
        make(engine="vllm", page_size=16)
    with pytest.raises(ValueError, match=r"vllm_tensor_parallel_size=2 is not supported: .* engine='vllm'"):
        make(vllm_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", 2.5),
        ("vllm_max_model_len", "vllm_max_model_length", 900),
        ("wandb_log_unique_prompts", "log_unique_prompts", True),
        ("warmup_ratio", "warmup_steps", 0.1),
    ],
)
def test_renamed_options_move_with_a_line(old, new, value, make, caplog):
    with caplog.at_level(logging.WARNING, "colocate"):
        assert getattr(make(**{old: value}), new) == value
    assert caplog.messages == [f"{old} is an older name: read as {new}={value!r}."]


@pytest.mark.parametrize(("of_trl", "name"), OF_TRL.items())
def test_trls_options_of_servers_are_taken_without_a_word(of_trl, name, make, caplog):
    value, other = ("http://a", "http://b") if name.endswith(("url", "host")) else (7, 8)
    with caplog.at_level(logging.WARNING, "colocate"):
        config = make(engine="rollout_server", **{of_trl: value})
        both = make(engine="rollout_server", **{of_trl: value, name: value})
    assert caplog.messages == []
    assert getattr(config, name) == getattr(both, name) == value
    assert getattr(config, of_trl) == getattr(make(engine="rollout_server", **{name: value}), of_trl) == value
    assert getattr(make(), of_trl) == getattr(make(), name) == default_of(FIELDS[name])
    assert changed_options(config)[name] == value and of_trl not in changed_options(config)
    with pytest.raises(ValueError, match=rf"{of_trl}=.* and {name}=.* are two names of one option.*Set one"):
        make(engine="rollout_server", **{of_trl: value, name: other})


@pytest.mark.parametrize(("of_trl", "name"), OF_TRL.items())
def test_both_names_of_an_option_have_its_value_whichever_is_set_later(of_trl, name, make):
    value, other = ("http://a", "http://b") if name.endswith(("url", "host")) else (7, 8)
    config = make(engine="rollout_server", **{name: value})
    setattr(config, of_trl, other)
    assert getattr(config, name) == getattr(copy.deepcopy(config), name) == other
    setattr(config, name, value)
    assert getattr(config, of_trl) == value


@pytest.mark.parametrize(("old", "new", "values"), [("warmup_ratio", "warmup_steps", (0.1, 5))])
def test_an_older_name_does_not_silently_win_over_the_present_one(old, new, values, make):
    with pytest.raises(ValueError, match=rf"{old}=0\.1 and {new}=5.* are two names of one option"):
        make(**dict(zip((old, new), values, strict=True)))


def test_guided_decoding_is_refused_under_its_new_name(make):
    with pytest.raises(ValueError, match="vllm_structured_outputs_regex='a' is not supported"):
        make(vllm_guided_decoding_regex="a")


@pytest.mark.parametrize(("given", "read"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards(given, read, make):
    assert make(scale_rewards=given).scale_rewards == read


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "typo", "meant"),
    [
        ("loss_type", "dr-grpo", "dr_grpo"),
        ("importance_sampling_level", "tokens", "token"),
        ("scale_rewards", "groups", "group"),
        ("engine", "nativ", "native"),
        ("vllm_importance_sampling_mode", "seq_mask", "sequence_mask"),
        ("optim", "adamw_toch", "adamw_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
    ],
)
def test_unknown_values_get_the_nearest_name(name, typo, meant, make):
    with pytest.raises(ValueError, match=f"{name}={typo!r} is unknown; .* Did you mean {meant!r}"):
        make(**{name: typo})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -2),
        ("page_size", 0),
        ("max_completion_length", 0),
        ("max_completion_length", None),
        ("beta", -0.1),
        ("top_entropy_quantile", 1.5),
        ("num_iterations", 0),
    ],
)
def test_values_out_of_range(name, value, make):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        make(**{name: value})


@pytest.mark.parametrize(
    "options", [{"top_k": -1}, {"top_k": None}, {"generation_kwargs": {"top_k": -1}}, {"top_p": None}]
)
def test_no_filter_in_every_dialect_keeps_all(options, make):
    assert sampling_params(make(**options), ()) == sampling_params(make(), ())


def test_generation_kwargs_win_and_unknown_ones_are_refused(make):
    config = make(temperature=0.5, generation_kwargs='{"temperature": 0.7, "top_k": 20}')
    assert (config.temperature, config.top_k) == (0.7, 20)
    with pytest.raises(ValueError, match=r"top_p=1\.5"):
        make(generation_kwargs={"top_p": 1.5})


@pytest.mark.parametrize(
    "options",
    [
        {"sync_ref_model": True},
        {"vllm_importance_sampling_clip_min": 3.0},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
    ],
)
def test_contradictions_are_refused(options, make):
    with pytest.raises(ValueError):
        make(**options)
    assert make(sync_ref_model=True, beta=0.1).sync_ref_model


@pytest.mark.parametrize(
    ("given", "shard"),
    [
        ({"fsdp": True}, "auto"),
        ({"fsdp": ["shard_grad_op", "auto_wrap"]}, 1),
        ({"fsdp": "no_shard"}, "none"),
        ({"deepspeed": '{"zero_optimization": {"stage": 2}}'}, 1),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}, "shard": 2}, 2),
    ],
)
def test_sharding_of_other_libraries_is_taken_over(given, shard, make, caplog):
    config = make(**given)
    assert (config.shard, config.deepspeed, config.fsdp) == (shard, None, None)
    assert config.deepspeed_plugin is None and not config.fsdp_plugin_args
    assert sum("itself is not used" in message for message in caplog.messages) == 1


def test_a_launcher_that_shards_is_taken_over(make, monkeypatch):
    monkeypatch.setattr(launchers, "_taken", {})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert make().shard == make().shard == 1
    with pytest.raises(ValueError, match="asks for shard=1, and the option shard=4 was set"):
        make(shard=4)


# ── Batches ──────────────────────────────────────────────────────────────────────────────────────────────


def test_batch_errors_list_sizes_that_work(make, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=r"3 × 2 × 1 = 6 completions .* to 4, 8, 12, … or .*\[2, 3, 6\]"):
        make(per_device_train_batch_size=3)
    for works in (4, 8, 12):
        assert make(per_device_train_batch_size=works).generation_batch_size == 2 * works
    for works in (2, 3, 6):
        make(per_device_train_batch_size=3, num_generations=works)


def test_generation_batch_error_names_the_neighbours(make):
    with pytest.raises(ValueError, match="Set it to 8 or 16"):
        make(generation_batch_size=12)
    with pytest.raises(ValueError, match="only one"):
        make(generation_batch_size=8, steps_per_generation=1)


def test_evaluation_batch_error_lists_sizes_that_work(make):
    with pytest.raises(ValueError, match="per_device_eval_batch_size to 8, 16, 24"):
        make(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=12)
    make(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=12, num_generations_eval=1)


def test_one_completion_per_prompt_is_refused(make):
    with pytest.raises(ValueError, match=r"num_generations=1: .* at least 2"):
        make(num_generations=1)


# ── TrainingArguments' behaviour ─────────────────────────────────────────────────────────────────────────


def test_several_visible_gpus_count_as_one(make, monkeypatch, caplog):
    original = TrainingArguments.__post_init__

    def with_four_gpus(self):
        original(self)
        self._n_gpu = 4

    monkeypatch.setattr(TrainingArguments, "__post_init__", with_four_gpus)
    with caplog.at_level(logging.WARNING, "colocate"):
        config = make(per_device_train_batch_size=8)
    assert (config.n_gpu, config.train_batch_size) == (1, 8)
    assert "--num_processes 4" in caplog.text


def test_serialises_like_training_arguments(make):
    config = make(hub_token="secret", loss_type="grpo")
    assert config.to_dict()["loss_type"] == "grpo"
    assert '"loss_type": "grpo"' in config.to_json_string()
    assert "secret" not in repr(config) and "secret" not in config.to_json_string()
    assert config.device.type in ("cpu", "cuda")


def test_checkpointing_default_is_quiet_and_can_be_turned_off(make, recwarn):
    assert make().gradient_checkpointing is True
    assert not [w for w in recwarn if "gradient_checkpointing" in str(w.message)]
    assert make(gradient_checkpointing=False).gradient_checkpointing is False


def test_bf16_default_follows_the_device(make, monkeypatch):
    monkeypatch.setattr("colocate.config.grpo_config.is_torch_bf16_gpu_available", lambda: True)
    # transformers asks by its own name whether bfloat16 is there.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert make().bf16 is True
    assert make(use_cpu=True).bf16 is False
    assert make(bf16=False).bf16 is False
    monkeypatch.setattr("colocate.config.grpo_config.is_torch_bf16_gpu_available", lambda: False)
    assert make().bf16 is False


# ── Options that hold options ────────────────────────────────────────────────────────────────────────────


def test_generation_kwargs_that_say_what_happens_anyway(make):
    config = make(
        generation_kwargs={
            "do_sample": True, "num_beams": 1, "num_return_sequences": 1, "use_cache": True, "top_p": 0.9,
            "max_new_tokens": 33, "stop_token_ids": [5, 3],
        }
    )  # fmt: skip
    assert (config.top_p, config.max_completion_length) == (0.9, 33)
    assert sampling_params(config, (2, 3)).stop_token_ids == (2, 3, 5)
    assert sampling_params(make(), (2, 3)).stop_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"do_sample": False}, "do_sample=False; only True is taken: without sampling all completions"),
        ({"num_return_sequences": 4}, "set num_generations"),
        ({"num_beam_groups": 2}, "num_beam_groups=2; only 1 is taken: transformers itself has no groups"),
        ({"num_beams": 0}, "generation_kwargs['num_beams']=0 must be at least 1"),
        ({"num_beams": 2, "early_stopping": "often"}, "['early_stopping']='often' is not true or false or"),
        ({"typical_p": 1.5}, "['typical_p']=1.5 must be greater than 0 and at most 1"),
        ({"length_penalty": 0.5}, "length_penalty=0.5, which is for beams: set num_beams"),
        ({"min_tokens": 4}, "min_new_tokens is"),
        ({"seed": 3}, "'seed': each completion has its own, derived from the option seed"),
        ({"stop": ["\n"]}, "stop_token_ids are"),
        ({"top_kk": 4}, "did you mean 'top_k'"),
        ({"temperature": "hot"}, "temperature='hot' is not a number"),
        ({"max_tokens": 0}, "max_completion_length=0 must be at least 1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids']=['a'] has 'a', which is not a whole number"),
        ({"stop_token_ids": [-1]}, "negative"),
    ],
)
def test_generation_kwargs_that_no_engine_honours(argument, message, make):
    with pytest.raises(ValueError) as error:
        make(generation_kwargs=argument)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "options", [{"engine": "native"}, {"engine": "vllm"}, {"use_vllm": True, "vllm_mode": "server"}]
)
def test_arguments_of_model_generate_are_refused_by_the_other_engines(options, make):
    with pytest.raises(
        ValueError, match=r"num_beams=2, length_penalty=-0\.1, which engine=.*set engine='trans"
    ):
        make(generation_kwargs={"num_beams": "2", "length_penalty": -0.1, "typical_p": 1.0}, **options)
    make(generation_kwargs={"num_beams": 1, "typical_p": 1.0}, **options)


@pytest.mark.parametrize(
    "value",
    [
        {
            "even_batches": False,
            "use_seedable_sampler": False,
            "gradient_accumulation_kwargs": {"num_steps": 1},
        },
        AcceleratorConfig(non_blocking=True),
        '{"split_batches": false}',
    ],
)
def test_accelerator_config_that_changes_no_batch(value, make, caplog):
    with caplog.at_level(logging.WARNING, "colocate"):
        make(accelerator_config=value)
    assert len(caplog.messages) == 1 and "without accelerate's data loaders" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"split_batches": True},
            "split_batches=True, which would make per_device_train_batch_size the batch of all",
        ),
        ({"gradient_accumulation_kwargs": {"num_steps": 4}}, "gradient_accumulation_steps=1: set only"),
        ({"split_batch": True}, "no key 'split_batch'; did you mean 'split_batches'"),
        ({"gradient_accumulation_kwargs": 3}, "=3 is not a mapping"),
        ("nowhere.json", "neither a mapping nor a file"),
    ],
)
def test_accelerator_config_that_would(value, message, make):
    with pytest.raises(ValueError) as error:
        make(accelerator_config=value)
    assert message in str(error.value)


def test_what_is_empty_asks_for_nothing(make, caplog):
    """transformers' older defaults, which scripts still spell out."""
    with caplog.at_level(logging.WARNING, "colocate"):
        make(fsdp="", debug="", optim_args="", label_names=[], neftune_noise_alpha=0)
    assert caplog.messages == []


def test_reports_go_where_transformers_has_an_integration(make):
    with pytest.raises(ValueError, match=r"report_to='wanb' is unknown.*Did you mean 'wandb'"):
        make(report_to=["tensorboard", "wanb"])
    assert make(report_to="none").report_to == []


def test_a_run_has_a_directory():
    for name in ("", "  "):
        with pytest.raises(ValueError, match=f"output_dir='{name}' is empty"):
            GRPOConfig(output_dir=name)


def test_epochs_that_nobody_reads_are_not_judged(make):
    assert make(num_train_epochs=0, max_steps=3).max_steps == 3
    with pytest.raises(ValueError, match=r"num_train_epochs=0\.0 must be greater than 0"):
        make(num_train_epochs=0)


def test_a_huge_batch_that_holds_no_whole_groups_is_refused_at_once(make):
    with pytest.raises(ValueError, match="not a whole number of groups"):
        make(per_device_train_batch_size=2**31 - 1)


# ── Options that a script sets afterwards ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("made_with", "then_set", "sizes"),
    [
        ({}, {"per_device_train_batch_size": 16}, (32, 2)),
        ({}, {"gradient_accumulation_steps": 3}, (24, 3)),
        ({}, {"generation_batch_size": 32}, (32, 4)),
        ({}, {"steps_per_generation": 4}, (32, 4)),
        ({"generation_batch_size": 16}, {"per_device_train_batch_size": 16}, (16, 1)),
        ({"generation_batch_size": 16}, {"gradient_accumulation_steps": 3}, (16, 2)),
        ({"steps_per_generation": 4}, {"gradient_accumulation_steps": 3}, (32, 4)),
        ({"steps_per_generation": 4}, {"per_device_train_batch_size": 4}, (16, 4)),
    ],
)
def test_batch_sizes_are_those_of_the_options_at_last(made_with, then_set, sizes, make):
    """They are those of a configuration that was made with all of them at once."""
    base = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4)
    args = make(**base, **made_with)
    for name, value in then_set.items():
        setattr(args, name, value)
    for _ in range(2):
        args.take_late()
        assert (args.generation_batch_size, args.steps_per_generation) == sizes
    at_once = make(**base | made_with | then_set)
    assert (at_once.generation_batch_size, at_once.steps_per_generation) == sizes


@pytest.mark.parametrize(
    ("made_with", "then_set", "becomes"),
    [
        ({}, {"use_vllm": True, "vllm_mode": "server"}, {"engine": "rollout_server"}),
        ({"engine": "native"}, {"engine": "vllm_server"}, {"engine": "rollout_server"}),
        ({}, {"deepspeed": {"zero_optimization": {"stage": 2}}}, {"shard": 1}),
        ({}, {"fsdp": "full_shard auto_wrap"}, {"shard": "auto"}),
        ({}, {"learning_rate": "1e-5"}, {"learning_rate": 1e-5}),
        ({}, {"scale_rewards": False}, {"scale_rewards": "none"}),
        ({"warmup_steps": 7}, {"warmup_ratio": 0.25}, {"warmup_steps": 0.25, "warmup_ratio": None}),
        ({"warmup_ratio": 0.25}, {"warmup_steps": 7}, {"warmup_steps": 7}),
        ({"vllm_server_port": 1}, {"rollout_server_port": 2}, {"vllm_server_port": 2}),
        ({"temperature": 0.5}, {"generation_kwargs": {"temperature": 0.7}}, {"temperature": 0.7}),
        ({"hub_token": "secret"}, {"beta": 0.1}, {"beta": 0.1, "hub_token": "secret"}),
    ],
)
def test_what_is_set_afterwards_means_what_it_means_at_once(made_with, then_set, becomes, make):
    args = make(**made_with)
    run_dir = args.run_dir
    for name, value in then_set.items():
        setattr(args, name, value)
    args.take_late()
    assert {name: getattr(args, name) for name in becomes} == becomes
    at_once = make(**override(made_with, then_set))
    for name in FIELDS:
        assert getattr(args, name) == getattr(at_once, name), name
    assert args.run_dir == run_dir


def test_a_notice_is_told_once(make, caplog):
    args = make(use_liger_kernel=True)
    (notice,) = caplog.messages
    args.learning_rate = 1e-5
    args.take_late()
    assert caplog.messages == [notice]
    args.fsdp = "full_shard"
    args.take_late()
    assert len(caplog.messages) == 2 and "shard" in caplog.messages[1]


def test_a_copy_without_secrets_has_not_kept_what_was_given(make):
    args = make(hub_token="hf_abcdefgh", learning_rate=1e-3)
    args.hub_token = "hf_ijklmnop"
    for copied in (args.without_secrets(), args.without_secrets().without_secrets()):
        assert "hf_" not in str(vars(copied)) and "hf_" not in str(pickle.dumps(copied))


def test_what_is_set_after_a_configuration_was_read_back_counts_too(make):
    args = pickle.loads(pickle.dumps(make(learning_rate=1e-3).without_secrets()))
    args.fsdp = "full_shard"
    args.take_late()
    assert (args.learning_rate, args.shard) == (1e-3, "auto") and args.fsdp != "full_shard"


def test_what_is_set_afterwards_is_checked_when_a_trainer_is_made(make):
    for name, value, message in (
        ("num_generations", 3, "whole number of groups of num_generations=3"),
        ("generation_batch_size", 12, "is not a multiple of"),
        ("temperature", -1.0, "must be positive"),
        ("engine", "vlm", "Did you mean 'vllm'"),
    ):
        args = make(per_device_train_batch_size=8)
        setattr(args, name, value)
        with pytest.raises(ValueError, match=message):
            GRPOTrainer("a model that is not loaded", args=args, reward_funcs=len)


def test_an_option_misspelt_in_an_assignment_is_told(make, caplog):
    args = make()
    args.note_of_my_own = args._private = args.learning_rate = 1.0
    args.without_secrets()  # which sets, in a copy, also what transformers has added
    assert not caplog.messages
    args.learning_rat = 2.0
    assert caplog.messages == [
        "learning_rat is not an option, and nothing will read it; did you mean 'learning_rate'?"
    ]
