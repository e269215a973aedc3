"""GRPO steps by this library or by TRL: seconds, phases and memory of every step.

    python -m benchmarks.step.run --framework colocate --shape 1.5b --prompts 32 --generations 8
        --prompt-tokens 256 --new-tokens 512 --out record.json
    python -m benchmarks.step.run --framework trl --shape 7b --lora-rank 32 --micro-batch 8 --liger --out ...

Either library's own `GRPOTrainer` on the same model of random weights, the same prompts of random words, and
a reward that costs nothing. Completions have the given length: TRL passes `ignore_eos` to vLLM, and here the
trainer's player is given no stop tokens. A step is what lies between the ends of two steps, the device
synchronised at both.

Under torchrun or `accelerate launch` each process takes its share of the work; the first writes the record.

`--keep` says what the engine keeps of its KV cache while the policy trains: what the run has learnt that it
may, nothing, or in turns that and everything, as if there were no hand-over of memory.
`--option name=value` sets any other option of the configuration, its value in JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, TrainerCallback

from benchmarks.common.device_watch import DeviceWatch
from benchmarks.common.results import origin
from benchmarks.rollout.cases import SHAPES, TOKEN_RANGE, Case, model_directory, model_on_disk
from benchmarks.step.cases import LORA_TARGETS, Work, tiny, training_flop
from colocate.memory.handover import Handover

STANDBY_BLOCK = 4
"""Steps in a row with the hand-over, then without. The first wakes up to what the step before left."""

VLLM_MEMORY = 0.6
"""Share of the GPU for TRL's vLLM while it is awake: its KV cache then holds every sequence of every case at
once, so more would not be used, and asleep it gives all of it back."""


ENGINE_METHODS = ("wake_up", "generate", "sleep", "update_weights", "_publish")
"""What `--watch-engine` measures. vLLM in process publishes while it wakes up, and that counts apart."""


def num_processes() -> int:
    """Processes that torchrun or `accelerate launch` has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def await_model(parent: Path, size: str) -> None:
    """Return when the model is on disk; one process makes it."""
    if is_main_process():
        model_directory(parent, size)
    while not model_on_disk(parent, size):
        time.sleep(0.5)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prompts(work: Work, num_rows: int) -> Dataset:
    """Rows of random words, one token each."""
    rows = Case(work.model, num_rows, 1, work.prompt_tokens, 1).prompts()
    assert all(TOKEN_RANGE[work.model][0] <= token for row in rows for token in row), "no special tokens"
    return Dataset.from_dict({"prompt": [" ".join(f"w{token}" for token in row) for row in rows]})


def load_tokenizer(directory: Path, work: Work) -> PreTrainedTokenizerFast:
    """The model's tokenizer as it was written: by the model's type transformers would load Qwen's.

    Raises:
        RuntimeError: a prompt has another number of tokens than the work says.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    num_tokens = len(tokenizer(prompts(work, 1)["prompt"][0])["input_ids"])
    if num_tokens != work.prompt_tokens:
        raise RuntimeError(f"A prompt of {work.prompt_tokens} words has {num_tokens} tokens.")
    return tokenizer


def reward(completions: list[str], **_: Any) -> list[float]:
    """Differs within every group, so that there is a gradient."""
    return [float(number) for number in range(len(completions))]


class StepClock(TrainerCallback):
    """When each step ended; the first entry is when training began."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.after_step: Callable[[], None] = lambda: None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.times_s.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.times_s.append(time.perf_counter())
        self.after_step()

    def step_s(self) -> list[float]:
        return [end - start for start, end in zip(self.times_s, self.times_s[1:], strict=False)]


class Stopwatch:
    """Seconds inside of methods, the device synchronised around them; what is nested counts only there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.host_s: dict[str, float] = {}
        """Seconds in which this thread had a core, nested ones too. Near to all of them: the host is slow."""
        self._nested_s: list[float] = []

    def take(self) -> dict[str, dict[str, float]]:
        """What was measured since the last time."""
        taken = {"engine_s": self.seconds, "host_s": self.host_s}
        self.seconds, self.host_s = {}, {}
        return taken

    def watch(self, owner: Any, method: str) -> None:
        """Measure `owner.method` from now on, under its own name."""
        function = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self._measuring(method):
                return function(*args, **kwargs)

        setattr(owner, method, measured)

    @contextmanager
    def _measuring(self, name: str) -> Iterator[None]:
        synchronize()
        start_s, start_host_s = time.perf_counter(), time.thread_time()
        self._nested_s.append(0.0)
        yield
        host_s = time.thread_time() - start_host_s
        synchronize()
        elapsed_s = time.perf_counter() - start_s
        own_s = elapsed_s - self._nested_s.pop()
        self.seconds[name] = self.seconds.get(name, 0.0) + own_s
        self.host_s[name] = self.host_s.get(name, 0.0) + host_s
        if self._nested_s:
            self._nested_s[-1] += elapsed_s


class FixedHandover(Handover):
    """Lets the engine keep what is said instead of what is learnt; the learning goes on."""

    fixed_bytes: int | None = None

    @property
    def keep_bytes(self) -> int:  # type: ignore[override]
        return self._learnt_bytes if self.fixed_bytes is None else self.fixed_bytes

    @keep_bytes.setter
    def keep_bytes(self, num_bytes: int) -> None:
        self._learnt_bytes = num_bytes


def made_up_rollout(work: Work) -> Any:
    """A `rollout_func` of TRL: random completions of the work's length."""
    rng = random.Random(0)

    def rollout(rows: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(rows)["input_ids"]
        completion_ids = [
            [rng.randrange(*TOKEN_RANGE[work.model]) for _ in range(work.new_tokens)] for _ in rows
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    return rollout


def settings(options: argparse.Namespace, work: Work, directory: str) -> dict[str, Any]:
    """Options of the same name and meaning in both libraries."""
    return dict(
        output_dir=directory,
        max_steps=options.warm_up + options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=work.num_completions // (options.micro_batch * num_processes()),
        num_generations=work.num_generations,
        max_completion_length=work.new_tokens,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        beta=0.0,
        learning_rate=1e-6,
        temperature=1.0,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options.option,
    )


def peft_config(work: Work) -> Any:
    if work.lora_rank is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=work.lora_rank, lora_alpha=work.lora_rank, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM"
    )


def make_trainer(trainer_class: Any, args: Any, options: argparse.Namespace, work: Work, **more: Any) -> Any:
    """Either library's trainer of the work, with a `clock` that notes when its steps end."""
    directory, clock = model_directory(options.model_dir, work.model), StepClock()
    trainer = trainer_class(
        str(directory),
        reward,
        args,
        prompts(work, work.num_prompts * args.max_steps),
        processing_class=load_tokenizer(directory, work),
        callbacks=[clock],
        peft_config=peft_config(work),
        **more,
    )
    trainer.clock = clock
    return trainer


def watch_engine(engine: Any, model: Any) -> Callable[[], dict[str, Any]]:
    """Measure the engine's methods from now on; what is returned takes what came since it was last called."""
    stopwatch = Stopwatch()
    for method in ENGINE_METHODS:
        if hasattr(engine, method):
            stopwatch.watch(engine, method)

    # vLLM counts what it copies, which is less than all of a model with an adapter.
    num_bytes = 0 if engine.shares_weights else sum(parameter.nbytes for parameter in model.parameters())
    return lambda: stopwatch.take() | {"published_bytes": getattr(engine, "published_bytes", num_bytes)}


def colocate_trainer(options: argparse.Namespace, work: Work, directory: str) -> Any:
    """Our trainer of the work, whose completions all have the work's length."""
    from colocate import GRPOConfig, GRPOTrainer

    args = GRPOConfig(**settings(options, work, directory))
    trainer = make_trainer(GRPOTrainer, args, options, work)
    player = trainer.run.player
    player.sampling = dataclasses.replace(player.sampling, stop_token_ids=())
    return trainer


def run_colocate(options: argparse.Namespace, work: Work, directory: str) -> dict[str, Any]:
    trainer = colocate_trainer(options, work, directory)
    args = trainer.args
    take_watched = watch_engine(trainer.engine, trainer.model) if options.watch_engine else lambda: {}
    watched: list[dict[str, Any]] = []
    keeps_all = [False] * args.max_steps
    if options.keep != "learnt":
        handover = FixedHandover(trainer.engine)
        handover.fixed_bytes = 0 if options.keep == "nothing" else None
        trainer.run = dataclasses.replace(trainer.run, handover=handover)
    if options.keep == "in-turns":
        keeps_all = [i >= options.warm_up and (i - options.warm_up) // STANDBY_BLOCK % 2 == 1
                     for i in range(args.max_steps)]  # fmt: skip

    def after_step() -> None:
        watched.append(take_watched())
        if options.keep == "in-turns" and len(watched) < args.max_steps:
            # The end of a step comes before the next one's rollout, whose sleep it decides on.
            handover.fixed_bytes = 1 << 62 if keeps_all[len(watched)] else None

    trainer.clock.after_step = after_step
    trainer.train()
    ranks = gather_object([watched])
    if not trainer.is_world_process_zero():
        return {}
    lines = (Path(directory) / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if not record.get("eval")]
    shares_prompts = bool(getattr(args, "share_prompts", False))
    steps = [
        {"step_s": step_s, "keeps_kv_cache": keeps, **from_metrics(record)}
        for step_s, record, keeps in zip(trainer.clock.step_s(), records, keeps_all, strict=True)
    ]
    if options.watch_engine:
        for i, step in enumerate(steps):
            step |= ranks[0][i] | {"ranks": [rank[i] for rank in ranks]}
    return {
        "steps": steps,
        "engine": type(trainer.engine).__name__,
        "shares_weights": trainer.engine.shares_weights,
        "shares_prompts": shares_prompts,
        "flop": training_flop(work, shares_prompts=shares_prompts),
        "flop_unshared": training_flop(work, shares_prompts=False),
    }


def from_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """What a line of metrics.jsonl says of its step."""
    spans = record["memory"]["spans"]
    return {
        "phases_s": record["phases"],
        "mean_length": record["completions/mean_length"],
        "peak_bytes": max(span["peak_bytes"] for span in spans),
        "train_peak_bytes": max(span["peak_bytes"] for span in spans if span["phase"] == "train"),
        "kv_cache_bytes": max(span["categories"].get("kv_cache", 0) for span in spans),
    }


def trl_config(options: argparse.Namespace, work: Work, directory: str, *, has_vllm: bool, **own: Any) -> Any:
    """TRL's configuration, as fast as it goes.

    Args:
        has_vllm: whether vLLM generates, in this process.
        own: options that the benchmark needs.
    """
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    vllm = dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_MEMORY,
        vllm_enable_sleep_mode=True,
        vllm_max_model_length=work.prompt_tokens + work.new_tokens + 8,
    )
    return GRPOConfig(
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32", "attn_implementation": "sdpa"},
        use_liger_kernel=options.liger and on_gpu,
        **((vllm if has_vllm else {}) | own | settings(options, work, directory)),
    )


def run_trl(options: argparse.Namespace, work: Work, directory: str) -> dict[str, Any]:
    from trl import GRPOTrainer

    has_vllm = torch.cuda.is_available() and not options.made_up_completions
    more = {"ignore_eos": True} if has_vllm else {"min_new_tokens": work.new_tokens}
    args = trl_config(options, work, directory, has_vllm=has_vllm, generation_kwargs=more)
    made_up = made_up_rollout(work) if options.made_up_completions else None
    trainer, stopwatch = make_trainer(GRPOTrainer, args, options, work, rollout_func=made_up), Stopwatch()
    stopwatch.watch(trainer, "_generate_and_score_completions")
    if has_vllm:
        stopwatch.watch(trainer.vllm_generation, "generate")
        stopwatch.watch(trainer.vllm_generation, "sync_weights")
    else:
        stopwatch.watch(trainer, "_generate_single_turn")
    phases: list[dict[str, float]] = []
    trainer.clock.after_step = lambda: phases.append(stopwatch.take()["engine_s"])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return {
        "steps": [
            {
                "step_s": step_s,
                "phases_s": phase | {"train": step_s - sum(phase.values())},
                "mean_length": log["completions/mean_length"],
            }
            for step_s, phase, log in zip(trainer.clock.step_s(), phases, logs, strict=True)
        ],
        "liger": args.use_liger_kernel,
        "vllm_memory": args.vllm_gpu_memory_utilization if has_vllm else None,
    }


def assignment(text: str) -> tuple[str, Any]:
    """`name=value`, the value in JSON or, if it is none, as it stands."""
    name, is_there, value = text.partition("=")
    if not is_there:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=("colocate", "trl"), required=True)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--lora-rank", type=int, help="default: full fine-tuning")
    parser.add_argument("--tiny", action="store_true", help="the work made tiny, to try the script")
    parser.add_argument("--model-dir", type=Path, default=Path(tempfile.gettempdir()) / "colocate-models")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, default=16, help="completions")
    parser.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=False, help="TRL's")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", choices=("learnt", "nothing", "in-turns"), default="learnt", help="asleep")
    parser.add_argument("--made-up-completions", action="store_true", help="TRL's; only training is compared")
    parser.add_argument("--watch-engine", action="store_true", help="seconds in its methods, by rank")
    parser.add_argument("--option", type=assignment, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--label", default="", help="tells records of one case apart")
    options = parser.parse_args(words)
    options.option = dict(options.option)
    return options


def chosen_work(options: argparse.Namespace) -> Work:
    work = Work(
        options.shape, options.prompts, options.generations, options.prompt_tokens, options.new_tokens,
        options.lora_rank,
    )  # fmt: skip
    return tiny(work) if options.tiny else work


def check_division(options: argparse.Namespace, work: Work) -> None:
    """Raises SystemExit if the processes' micro-batches do not make up the work."""
    micro_step = options.micro_batch * num_processes()
    if micro_step == 0 or work.num_completions % micro_step:
        raise SystemExit(
            f"--micro-batch {options.micro_batch} × {num_processes()} processes = {micro_step} does not "
            f"divide {work.num_completions} completions."
        )


def main() -> None:
    options = parse()
    work = chosen_work(options)
    if options.tiny:
        options.micro_batch = work.num_completions // 2 // num_processes()
    check_division(options, work)
    await_model(options.model_dir, work.model)  # not within the measurement
    record: dict[str, Any] = {
        "kind": "step",
        "framework": options.framework,
        "label": options.label,
        **origin(),
        "work": dataclasses.asdict(work),
        "num_warm_up": options.warm_up,
        "world_size": num_processes(),
        "micro_batch": options.micro_batch,
        "gradient_checkpointing": options.gradient_checkpointing,
        "options": options.option,
    }
    watch = DeviceWatch() if torch.cuda.is_available() and is_main_process() else None
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        run = run_colocate if options.framework == "colocate" else run_trl
        record |= run(options, work, directory)
    if not is_main_process():
        return
    record["total_s"] = time.perf_counter() - start_s
    if watch is not None:
        record["torch_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        record["torch_reserved_bytes"] = torch.cuda.memory_reserved()
        record["driver_peak_bytes"] = watch.peak_bytes()
        watch.close()
    lengths = {step["mean_length"] for step in record["steps"]}
    if lengths != {work.new_tokens}:
        raise RuntimeError(f"Completions of {work.new_tokens} tokens were asked for; mean lengths {lengths}.")
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for step in record["steps"]:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in step["phases_s"].items())
        print(f"{step['step_s']:.2f} s ({phases})", flush=True)


if __name__ == "__main__":
    main()
