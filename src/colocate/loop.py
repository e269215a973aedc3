"""The training loop. Read this file first.

The rollout engine and the policy share one device and take turns with its memory. A step is

    roll out   offload → wake → play → sleep → prefetch     the engine's turn: a KV cache fills the device
    judge      rewards, and advantages within each group    reward models and reference are awake
    train      select → window → update                     the policy's turn: activations, gradients
    publish    the engine takes the new weights

This file alone says whose turn it is. Two more things happen to memory, elsewhere: a native engine that is
awake maps pages as its sequences grow; and if training runs out of memory while a sleeping engine still keeps
some, the policy has the hand-over take it back (`Handover.take_back`) before it tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from colocate.checkpoints.stop_signals import StopRequest
from colocate.episodes.episode import Episode
from colocate.experience import ranks
from colocate.experience.requests import RolloutRequest
from colocate.experience.slices import Step
from colocate.memory.garbage import lasting_objects_left_out
from colocate.policy.policy import UpdateResult
from colocate.run.record import Run
from colocate.run.skipped_steps import keep_skipped_step
from colocate.types import Sample


class TrainerHooks(Protocol):
    """The methods that the loop calls on the object that started it, `GRPOTrainer`, whose subclasses may
    override it."""

    def note_request(self, request: RolloutRequest) -> None:
        """Called before a generation batch is completed by the engine."""
        ...

    def around_step(self, take: Callable[[], Step]) -> Step:
        """Called to take an optimizer step: it must call `take` once, and return what `take` returns."""
        ...

    def between_steps(self, stop: StopRequest) -> None:
        """Called when a step is done and logged: evaluates, saves, or raises if the run was asked to stop."""
        ...


def train(run: Run, hooks: TrainerHooks) -> None:
    """Take the steps of a run."""
    journal, timeline, window = run.journal, run.timeline, run.window
    has_own_callbacks = any(ranks.of_all_ranks([journal.has_own_callbacks]))
    at_work = run.playing.tools_at_work()
    with StopRequest(run.accelerator) as stop, journal.progress, at_work, lasting_objects_left_out():
        while not is_over(run):
            journal.event("on_step_begin")
            if has_own_callbacks:
                publish_changes(run)
            while not window.ready:  # a rollout may feed several steps, and a step may take several rollouts
                batch = run.selector.next_batch(run.batches)
                request = run.requests.training(batch)
                hooks.note_request(request)
                episodes = roll_out(run, request)
                with timeline.phase("score"):
                    run.scorers.wake()
                    rollout = run.judge.score(request, episodes)
                journal.add_rollout(run.selector.metrics(rollout), rollout.table, rollout.num_tokens)
                with timeline.phase("train"):
                    run.agreement.check(rollout.samples)
                    window.add(run.selector.slices(rollout, batch.number), partial(old_logprobs, run))
                    run.scorers.sleep()
            with timeline.phase("train"):
                samples, update = hooks.around_step(partial(take_step, run))
            with timeline.phase("publish"):
                publish(run)
            learn(run, samples, update)
            if has_own_callbacks:
                publish_changes(run)
            hooks.between_steps(stop)


def is_over(run: Run) -> bool:
    """Whether there are no steps left to take, or a callback has ended the training."""
    state, control = run.journal.state, run.journal.control
    return state.global_step >= state.max_steps or control.should_training_stop


def roll_out(run: Run, request: RolloutRequest, within: str = "") -> list[Episode]:
    """The engine's turn: it gets the device's memory, completes the request, and gives the memory back.

    Args:
        within: for the timeline, the phase that the rollout is a part of, with a slash ("evaluate/").
    """
    run.scorers.sleep()
    if run.policy.plan.offload_optimizer:
        with run.timeline.phase(f"{within}offload"):
            run.policy.optimizer.offload()  # masters and moments go to the host
    with run.timeline.phase(f"{within}rollout"):
        run.engine.wake_up()
        try:
            episodes = run.player.play(request)
            run.timeline.sample()  # while the KV cache is still there
        finally:
            run.engine.sleep(run.handover.keep_bytes)
    run.policy.optimizer.prefetch()  # arrives while the episodes are scored and trained on
    return episodes


def old_logprobs(run: Run, samples: list[Sample]) -> list[Tensor]:
    """Log-probs of `samples` under the policy that generated them, before a step changes it."""
    return [logprobs for logprobs, _ in run.policy.logprobs(samples)]


def take_step(run: Run) -> Step:
    """The policy's turn: one optimizer step on the next slices of the window."""
    samples = run.selector.for_step(run.window.peek())
    update = run.policy.update(samples, run.objective, keep_logprobs=run.window.keeps_logprobs)
    run.window.advance(update.logprobs)
    return samples, update


def publish(run: Run) -> None:
    """Make the engine use the new weights: shared weights are in place already, of others it makes a copy."""
    run.engine.update_weights(run.policy.version)


def publish_changes(run: Run) -> None:
    """Go on from the weights as they are now, if somebody else has changed them: a callback, or a script."""
    if run.policy.take_changed_parameters():
        publish(run)


def learn(run: Run, samples: list[Sample], update: UpdateResult) -> None:
    """Pass the results of the step to every part that adapts, and record the step.

    Raises:
        FloatingPointError: `max_skipped_steps` steps in a row were skipped.
    """
    run.judge.add_waiting(update.metrics)
    metrics = ranks.totals(update.metrics)
    if run.objective.has_entropy_bonus:
        run.entropy.update(metrics["entropy_trained"])
        metrics["entropy_coef"] = run.entropy.coef
    record = run.timeline.drain()
    if update.has_signal:  # else training has needed less than it will need
        run.handover.learn(record["memory"])
    run.policy.learn(record["memory"], update)
    # Advantages are on the device: they are asked for only where it matters.
    has_advantages = metrics["grad_norm"] == 0 and any(sample.has_advantage for sample in samples)
    run.journal.end_step(metrics, record, has_advantages=has_advantages)
    if run.args.sync_ref_model and run.journal.state.global_step % run.args.ref_model_sync_steps == 0:
        run.policy.sync_reference(run.args.ref_model_mixup_alpha)
    if update.skipped:
        keep_skipped_step(run, samples, update)
