"""A run's checkpoints: all of its state between two optimizer steps, written and read back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from colocate.checkpoints import changes, disk_space, model_card, sealed, shards, snapshot
from colocate.config.grpo_config import GRPOConfig
from colocate.data.loading import READERS
from colocate.experience import ranks
from colocate.options.declared import marked
from colocate.options.redaction import redacted
from colocate.options.requirements import IN_COMPLETIONS
from colocate.parallel.watch import watched
from colocate.policy.footprint import MOMENTS_BYTES
from colocate.policy.weight_export import save_parts
from colocate.reporting.panel import without_bars
from colocate.reporting.provenance import provenance
from colocate.run.identity import versions
from colocate.run.record import Run
from colocate.weights.adapter_files import note_base
from colocate.weights.generation_defaults import make_savable
from colocate.weights.layouts import causal_lm
from colocate.weights.weight_parts import sizes_of

logger = logging.getLogger(__name__)


def _splits_weights(run: Run) -> bool:
    return run.mesh.weight_group is not None


@watched(lambda run: "in save_model()", when=_splits_weights)
def save_model(run: Run, directory: Path) -> None:
    """Write a directory that `from_pretrained` reads; all ranks must call it if they split the weights."""
    sealed.check_finite_weights(run.policy, run.args, "saved model")
    with sealed.saving_model(directory):
        write_model(run, directory)


@watched(lambda run: "in push_to_hub()", when=_splits_weights)
def write_model(run: Run, directory: Path) -> None:
    """Write model, tokenizer and `training_args.bin`; all ranks must call it, and the main process writes."""
    is_main, mesh = run.accelerator.is_main_process, run.mesh
    make_savable(causal_lm(run.model))  # a callback may have changed what was in order at the start
    is_split = mesh.weight_group is not None and not hasattr(run.model, "peft_config")  # adapters are whole
    if is_split and mesh.replica == 0:
        assert mesh.weight_group is not None, "the weights are split"
        save_parts(run.model, directory, mesh.weight_group, is_writer=is_main)
    if is_main:
        if not is_split:
            with without_bars():  # a log would have each of its states
                run.model.save_pretrained(directory)
        run.tokenizer.save_pretrained(directory)
        torch.save(run.args.without_secrets(), directory / "training_args.bin")
        if hasattr(run.model, "peft_config"):
            revision = (run.args.model_init_kwargs or {}).get("revision")
            note_base(directory, causal_lm(run.model).config.name_or_path, revision)
        write_card(run, directory)


def write_card(
    run: Run,
    directory: Path,
    *,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | Sequence[str] | None = None,
) -> None:
    """Write the model card; the arguments are those of TRL's `create_model_card`."""
    name = model_name or run.args.hub_model_id or run.args.run_dir.name
    model_card.write_card(directory, _facts(run), name=name, dataset_name=dataset_name, tags=tags)


def _facts(run: Run) -> model_card.TrainingFacts:
    state, known = run.journal.state, provenance(run.args)
    info = getattr(run.train_dataset, "info", None)
    read = getattr(info, "dataset_name", None)
    # The command line's callback knows what the dataset was called; of a file `datasets` knows only the
    # reader.
    named = [c.dataset_name for c in run.journal.handler.callbacks if hasattr(c, "dataset_name")]
    metrics: dict[str, float] = {}
    for logs in state.log_history:
        metrics |= {name: value for name, value in logs.items() if isinstance(value, int | float)}
    return model_card.TrainingFacts(
        base_model=causal_lm(run.model).config.name_or_path or None,
        dataset=named[0] if named else None if read in READERS.values() else read,
        rewards=run.judge.reward_functions.names,
        options=redacted(known["options"]),
        metrics=metrics,
        steps=f"step {state.global_step} of {state.max_steps}",
        commit=known["commit"],
        is_adapter=hasattr(run.model, "peft_config"),
        versions=versions(("torch", "transformers", "peft", "datasets")),
    )


def check_space(run: Run) -> None:
    """Compare what the checkpoints to come will take with what is free; all ranks must call it, and the main
    process looks for all, since they write into one directory."""
    args, state = run.args, run.journal.state
    steps = disk_space.steps_to_save(run.journal.save_interval, state.global_step, state.max_steps)
    if args.save_strategy == SaveStrategy.NO or not steps:
        return
    warning, refusal = None, None
    if run.accelerator.is_main_process:
        most = disk_space.most_at_once(args.run_dir, steps, args.save_total_limit)
        try:
            warning = disk_space.check(args.run_dir, _checkpoint_bytes(run), most)
        except ValueError as error:
            refusal = str(error)
    refusal = ranks.of_all_ranks([refusal])[0]
    if refusal is not None:
        raise ValueError(refusal)
    if warning is not None:
        logger.warning(warning)


def _checkpoint_bytes(run: Run) -> dict[str, int]:
    """The bytes of a whole checkpoint by what they are for, from shapes alone; without what is small or not
    known before: waiting completions, generators, the state of an unknown optimizer."""
    model, optimizer = run.model, run.policy.optimizer
    sizes, parameters = sizes_of(model), dict(model.named_parameters())
    is_adapter = hasattr(model, "peft_config")
    saved = [n for n, p in parameters.items() if not is_adapter or p.requires_grad]
    parts = {"weights": sum(sizes[name] * parameters[name].itemsize for name in saved)}
    if run.args.save_only_model:
        return parts
    steps_on = optimizer.named_leaves
    parts["masters"] = sum(sizes[name] * leaf.itemsize for name, leaf in steps_on.items())
    optim = None if optimizer.is_own else OptimizerNames(run.args.optim).value
    if optim in MOMENTS_BYTES:
        parts["moments"] = sum(MOMENTS_BYTES[optim](sizes[name]) for name in steps_on)
    if run.args.sync_ref_model:
        parts["the reference"] = parts["weights"]
    return parts


@watched(lambda run: "in save_checkpoint()")
def save(run: Run) -> Path:
    """Write `output_dir/checkpoint-<step>`, whole or not at all."""
    sealed.check_finite_weights(run.policy, run.args, "checkpoint")
    state, output_dir = run.journal.state, run.args.run_dir
    directory = output_dir / f"checkpoint-{state.global_step}"
    is_main = run.accelerator.is_main_process
    with sealed.writing(directory, is_main=is_main, gather=gather_object) as unsealed:
        _count_bytes(run, unsealed)
        write_model(run, unsealed)
        run.best.note_saving(state, directory)
        run.journal.note_callbacks()
        if is_main:
            run.journal.save_state(unsealed)
        if not run.args.save_only_model:
            if run.policy.optimizer.is_split:
                shards.save(unsealed, run.policy.optimizer.tensors())
            if is_main:
                changes.save(unsealed, run.identity.describe(run.journal.run_id))
                snapshot.save_policy(unsealed, run.policy.state_dict())
            snapshot.save_rank_state(unsealed, run.accelerator.process_index, _resumable_parts(run))
    if is_main:
        sealed.rotate(output_dir, run.args.save_total_limit, state.best_model_checkpoint, written=directory)
    return directory


def _count_bytes(run: Run, directory: Path) -> None:
    """Have the display tell how much of a checkpoint is written."""
    counts = run.journal.progress.counts
    counts.begin("MB", round(sum(_checkpoint_bytes(run).values()) / 1e6))

    def written() -> dict[str, int]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {"MB": round(sum(path.stat().st_size for path in files) / 1e6)}

    counts.measure(written)


@watched(lambda run: "in load_checkpoint()")
def load(run: Run, directory: Path, *, or_older: bool = False) -> Path:
    """Restore everything that `save` wrote, and return the checkpoint; the caller publishes the weights. What
    has changed since is listed. With `or_older`, the newest whole checkpoint next to a corrupt one is
    restored, with a warning."""
    if or_older:
        directory = _newest_whole(directory)
    else:
        sealed.verify(directory)
    policy_state = snapshot.load_policy(directory)
    changed = changes.compare(directory, run.identity.describe(run.journal.run_id))
    changed.refuse()
    snapshot.load_rank_state(directory, run.accelerator.process_index, _resumable_parts(run))
    run.journal.load_state(directory)
    run.journal.run_id = changed.run_id
    is_split = shards.is_in(directory)
    left_out = (shards.shapes(directory), partial(shards.load, directory)) if is_split else None
    run.policy.load_state_dict(policy_state, left_out)
    spoilt = changed.concern_waiting_completions(marked(GRPOConfig, IN_COMPLETIONS))
    if spoilt:
        run.window.clear()
        run.player.clear()
    if run.player.has_restored:
        run.agreement.leave_out()
    if changed.changes and run.accelerator.is_main_process:
        # The main process has read one rank's; another number of ranks may have saved.
        waiting = snapshot.saved_by_ranks(directory, "window") if spoilt else ()
        logger.warning(changed.told(sum(map(run.window.num_waiting, waiting))))
    run.best.find_again(run.journal.state, directory)
    return directory


def _newest_whole(directory: Path) -> Path:
    """The checkpoint, or the newest one beside it that every rank can read; all ranks must call it."""
    others = [found for found in reversed(sealed.list_checkpoints(directory.parent)) if found != directory]
    reasons: list[str] = []
    for candidate in ranks.of_all_ranks([[directory, *others]])[0]:
        reason = None
        try:
            sealed.verify(candidate)
        except sealed.CorruptCheckpoint as error:
            reason = error.reason
        told = next((text for text in ranks.of_all_ranks([reason]) if text is not None), None)
        if told is None:
            if reasons:
                logger.warning(f"{'; '.join(reasons)}. Going on from {candidate}, the newest that is whole.")
            return candidate
        reasons.append(f"{candidate} is corrupt: {told}")
    raise sealed.CheckpointError(
        f"No checkpoint in {directory.parent} is whole: {'; '.join(reasons)}. To begin the run anew, set "
        "another output_dir, or delete them."
    )


def _resumable_parts(run: Run) -> dict[str, snapshot.Resumable]:
    parts: dict[str, snapshot.Resumable] = {
        "batches": run.batches, "window": run.window, "entropy": run.entropy, "journal": run.journal
    }  # fmt: skip
    if run.player.is_resumable:
        parts["player"] = run.player
    if run.selector.is_resumable:
        parts["selector"] = run.selector
    return parts
