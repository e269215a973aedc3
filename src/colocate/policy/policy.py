"""The model being trained, and one optimizer step of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colocate.algorithms.objective import LossBatch
from colocate.data.packing import pack, pack_padded
from colocate.memory.recovery import Remedy
from colocate.memory.train_plan import TrainPlan, TrainPlanner
from colocate.parallel.collectives import all_reduce_mean, is_distributed
from colocate.parallel.mesh import Mesh
from colocate.parallel.verdict import Peers
from colocate.policy.attention.pack import groups_of, padded
from colocate.policy.checks.forward_check import check_forward_pass
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import output_head
from colocate.policy.microbatches import filler, for_each, loss_batch, vanishes
from colocate.policy.model.forward import padded_hidden_states, padded_with_router_loss
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.optimizer.state import Read, Shapes
from colocate.policy.reference import FrozenCopy, Reference
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack, runs_packed
from colocate.policy.stack.stacks import Stacks
from colocate.policy.step_plan import RepeatedWork, StepPlan
from colocate.policy.whole_weights import find_nonfinite_weight, starting_checksums
from colocate.reporting.metrics import Metrics
from colocate.reporting.run_log import reserve_metrics
from colocate.reporting.work_counts import WorkCounts
from colocate.types import Sample
from colocate.weights.context_length import longest_context
from colocate.weights.fully_sharded import is_fully_sharded, run_gathered
from colocate.weights.layouts import causal_lm

reserve_metrics("loss", "learning_rate", "grad_norm", "skipped_updates", "updates_without_signal", "aux_loss")
LossFunction = Callable[[Tensor, Tensor, LossBatch], tuple[Tensor, Metrics]]
"""(policy_logprobs [B, T], entropies [B, T], batch) -> (loss to be summed over micro-batches, metrics)

The entropies carry a gradient, unless the function's attribute `has_entropy_bonus` is False: without the
entropies' gradient, the log-probabilities' gradient costs less.
"""


@dataclass(frozen=True)
class UpdateResult:
    metrics: Metrics
    """The objective's metrics and `loss` of this rank's samples, `grad_norm` (of all ranks' mean gradient,
    before clipping), `learning_rate`, `skipped_updates` and `updates_without_signal`."""
    loss: Tensor
    """The loss of this rank's samples, a scalar."""
    logprobs: list[Tensor]
    """Each sample's log-probabilities [C] before the step, the old ones for later passes over the sample;
    empty tensors where no passes were made."""
    skipped: bool
    """Whether nothing was changed, because the loss or the gradient of some rank was not finite."""
    largest_microbatch: int
    """The tokens of the step's largest micro-batch; 0 where the model runs padded."""
    has_signal: bool = True
    """Whether passes were made. False: the gradient was known to be 0 (`Policy.update`)."""


class Policy:
    """A causal language model with its optimizer, updated on scored samples.

    Data parallelism does not wrap the model: `update` reduces the accumulated fp32 gradients once, when done.
    DistributedDataParallel reduces in every backward, and packing gives each rank its own number of those.

    Args:
        model: on its device, in its precision, with its adapter.
        temperature: divides the logits, as it did when the completions were sampled.
        plan: how the first step is cut into micro-batches and what it keeps. A plan bounds the memory and
            does not change the gradient.
        planner: changes the plan if a prompt is longer than assumed, and by the memory that steps were
            measured to need; None: the plan stays, unless memory runs out.
        share_prompts: compute the beginning of samples with an equal `shared_key`, their prompt, once.
        max_grad_norm: the gradient is scaled down to this norm; None, 0 or less does not clip, as in
            transformers.
        reference: needed for `reference_logprobs` only.
        router_loss_coef: weight of a mixture of experts' load-balancing loss; 0 leaves it out.
        remedies: ways to free memory when work has run out of it. They are tried, and the work is repeated,
            before the plan is made smaller.
        mesh: the ranks that share the weights of a model that holds a part of them (`weights.weight_parts`).
            Their updates, evaluations and log-probs are made together.
        counts: where micro-batches are counted that have been launched.
        mark_memory: called with the name of the work that has just been launched and the kind of memory that
            is used only while it runs (`Timeline.mark`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: PolicyOptimizer,
        *,
        temperature: float,
        plan: TrainPlan | None = None,
        planner: TrainPlanner | None = None,
        share_prompts: bool = True,
        max_grad_norm: float | None,
        reference: Reference | None = None,
        router_loss_coef: float = 0.0,
        remedies: Sequence[Remedy] = (),
        mesh: Mesh | None = None,
        counts: WorkCounts | None = None,
        mark_memory: Callable[[str, str], None] = lambda name, transient: None,
    ) -> None:
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature}: greedy sampling has no gradient; set a temperature above 0."
            )
        self._runs_packed = runs_packed(model)
        check_forward_pass(model)
        self.model, self.optimizer, self.reference = model, optimizer, reference
        self.version = 0
        """The version of the weights, which grows by one with every change of them."""
        self.num_skipped_updates = 0
        """The number of updates skipped in a row, up to now."""
        self.planner = planner
        self._step_plan = StepPlan(plan or TrainPlan(), has_layers=self._runs_packed)
        self.router_loss_coef = router_loss_coef
        self._temperature = temperature
        self._share_prompts = share_prompts
        self._max_grad_norm = max_grad_norm
        self._everyone = Peers.all(self.device)
        self._mesh = mesh or Mesh(None)
        self._partners = Peers(self.device, self._mesh.weight_group)

        self._repeating = RepeatedWork(
            self._step_plan, remedies, can_repeat_passes=not is_fully_sharded(model)
        )
        self._counts, self._mark_memory = counts or WorkCounts(), mark_memory
        self._host_activations = HostActivations()
        self._stacks = Stacks(
            model,
            self._host_activations,
            share_prompts=share_prompts,
            weight_group=self._mesh.weight_group,
            add_gradient=optimizer.add_gradient,
        )
        self._largest_microbatch = 0
        self._longest = longest_context(causal_lm(model).config)

    @property
    def plan(self) -> TrainPlan:
        """The plan of the next step; the policy alone changes it."""
        return self._step_plan.plan

    def update(
        self, samples: Sequence[Sample], objective: LossFunction, *, keep_logprobs: bool = True
    ) -> UpdateResult:
        """Take one optimizer step on `samples`, whose loss is the sum of the micro-batches' losses.

        Where the advantages of all ranks' samples are 0, and with them the gradient, no pass is made that
        would only compute zeros, and the objective has no metrics. The optimizer steps with a gradient of 0
        nevertheless, as TRL's does: weights decay, and Adam's moments move the weights on.

        All ranks must call it together, with samples or without; their gradients are averaged. If the loss or
        the gradient of any rank is not finite, all ranks skip the step: parameters, masters, moments and
        schedule stay as they are.

        If any rank runs out of memory, all repeat their work with one smaller plan. No collective is begun
        before all ranks have the memory for it.

        Args:
            keep_logprobs: whether the log-probabilities are needed, which takes the passes in any case.

        Raises:
            PeerError: the update has failed on another rank.
        """
        if self.planner is not None:
            longest = max((len(sample.prompt_ids) for sample in samples), default=1)
            self._step_plan.plan = self.planner.with_prompts(self.plan, longest)
        self._step_plan.see(samples)
        may_differ = keep_logprobs or self.router_loss_coef or not vanishes(samples, objective)
        has_signal = self._step_plan.join(self._everyone, bool(may_differ))
        size = self._step_size(samples)
        passes = partial(self._accumulate_all, samples if has_signal else (), objective, size)
        loss, metrics, logprobs = self._repeating.run(passes, self._everyone)
        metrics.add_mean("updates_without_signal", float(not has_signal), 1)
        metrics.add_mean("loss", loss, 1)
        metrics.add_mean("learning_rate", self.optimizer.learning_rate, 1)
        grad_norm, losses = self.optimizer.reduce_gradients(loss)
        metrics.add_mean("grad_norm", grad_norm, 1)
        skipped = not bool(torch.isfinite(losses + grad_norm))  # alike on all ranks, as both numbers are
        metrics.add_mean("skipped_updates", float(skipped), 1)
        if skipped:
            self.optimizer.zero_grad()
            self.num_skipped_updates += 1
        else:
            if self._max_grad_norm is not None and self._max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(self.optimizer.leaves, self._max_grad_norm, grad_norm)
            self._repeating.run(self.optimizer.prepare_step, self._everyone, has_passes=False)
            self.optimizer.step()
            self._mark_memory("optimizer step", "workspace")
            self.version += 1
            self.num_skipped_updates = 0
        logprobs = logprobs if has_signal else [torch.empty(0, device=self.device) for _ in samples]
        return UpdateResult(metrics, loss, logprobs, skipped, self._largest_microbatch, has_signal)

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], objective: LossFunction) -> Metrics:
        """The objective's metrics and `loss` that `update` would report, without the update.

        Unlike an update it may be called with no samples.
        """
        metrics, loss = Metrics(), torch.zeros((), device=self.device)
        size = self._step_size(samples)
        microbatches = self._microbatches(samples, packed=self._runs_packed)
        for indices in self._counts.each("micro-batches", microbatches):
            microbatch = [samples[i] for i in indices]
            evaluated = self._evaluate(self.model, microbatch, "evaluation")
            if not evaluated:
                continue
            logprobs, entropies = zip(*evaluated, strict=True)
            part, part_metrics = objective(
                padded(logprobs),
                padded(entropies),
                loss_batch(microbatch),
            )
            if self.router_loss_coef:
                passes = partial(padded_with_router_loss, self.model, microbatch)
                _, router_loss = self._repeating.run(passes, self._partners)
                share = len(microbatch) / size
                part = part + self._weighted(router_loss, share, part_metrics)
            loss += part
            metrics.merge(part_metrics)
        metrics.add_mean("loss", loss, 1)
        return metrics

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies, each [C] float32, of every completion under the current policy."""
        counted = "micro-batches of log-probs"
        return self._evaluate(self.model, samples, "evaluation", counted)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probabilities [C] float32 of every completion under the reference."""
        if self.reference is None:
            raise RuntimeError("Policy has no reference; give it one, which beta > 0 needs.")
        with self.reference.model() as model:
            counted = "micro-batches of the reference"
            results = self._evaluate(model, samples, "reference", counted)
            return [logprobs for logprobs, _ in results]

    def learn(self, memory: dict[str, Any], update: UpdateResult) -> None:
        """Refine the plan with the memory that a step was measured to need.

        Args:
            memory: the entry "memory" of the step's `Timeline.drain`.
            update: the result of the step.
        """
        if self.planner is not None:
            self._step_plan.plan = self.planner.refined(self.plan, memory, update.largest_microbatch)

    def sync_reference(self, mixup_alpha: float) -> None:
        """Move the reference towards the policy; only a reference that is a model of its own can move."""
        assert isinstance(self.reference, FrozenCopy), "sync_ref_model is refused with an adapter"
        self.reference.sync(self.model, mixup_alpha)

    def take_parameters(self) -> None:
        """Go on from weights that were copied into the model's parameters."""
        self.optimizer.take_parameters()
        self.version += 1

    def take_changed_parameters(self) -> bool:
        """Go on from the present weights if somebody else has changed them on any rank; returns whether that
        was so. All ranks must call this together."""
        changed = self._everyone.any(not self.optimizer.has_current_masters())
        if changed:
            self.take_parameters()
        return changed

    def state_dict(self) -> dict[str, Any]:
        """Weights, masters, moments, schedule and version; the reference if it has moved. Where ranks split
        the optimizer's state its tensors are left out: they are `optimizer.tensors()`."""
        return {
            "optimizer": self.optimizer.data() if self.optimizer.is_split else self.optimizer.state_dict(),
            "version": self.version,
            "num_skipped_updates": self.num_skipped_updates,
            "reference": {} if self.reference is None else self.reference.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], left_out: tuple[Shapes, Read] | None = None) -> None:
        """Restore a `state_dict`, whether or not ranks split the optimizer's state then or now.

        Args:
            left_out: shapes and types of `optimizer.tensors()`, and a function that reads them; None: they
                are in the state.
        """
        if left_out is not None:
            self.optimizer.load_tensors(*left_out, state["optimizer"])
        elif self.optimizer.is_split:
            self.optimizer.load_whole(state["optimizer"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
        self.num_skipped_updates = state["num_skipped_updates"]
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])

    def starting_checksums(self, *, has_new_adapter: bool) -> dict[str, str | None]:
        """`whole_weights.starting_checksums`; all ranks that share the weights must call it together."""
        return starting_checksums(self.model, self.reference, self._mesh, has_new_adapter=has_new_adapter)

    def find_nonfinite_weight(self) -> str | None:
        """`whole_weights.find_nonfinite_weight`; all ranks that share the weights must call it together."""
        return find_nonfinite_weight(self.model, self._mesh)

    def _accumulate_all(
        self, samples: Sequence[Sample], objective: LossFunction, size: float
    ) -> tuple[Tensor, Metrics, list[Tensor]]:
        """Loss, metrics and log-probs of the forward and backward passes of a step of `size` sequences."""
        self.optimizer.check_trained(self.model)
        self.model.train()
        # An attempt that ran out of memory leaves gradients and activations behind.
        self.optimizer.zero_grad()
        self._host_activations.clear()
        self._largest_microbatch = 0
        metrics = Metrics()
        logprobs: dict[int, Tensor] = {}
        loss = torch.zeros((), device=self.device)
        with self._stacks.open(self.model, "update") as stack, self.optimizer.collecting_gradients():

            def accumulate(indices: list[int]) -> None:
                microbatch = [samples[i] for i in indices]
                if not microbatch:
                    self._go_along()
                    return
                share = len(indices) / size
                part, part_metrics, part_logprobs = self._accumulate(stack, microbatch, objective, share)
                loss.add_(part)
                metrics.merge(part_metrics)
                logprobs.update(zip(indices, part_logprobs, strict=True))

            microbatches = self._microbatches(samples, packed=stack is not None)
            counted = self._counts.each("micro-batches", microbatches)
            for_each(stack, counted, accumulate, has_backward=True)
        self.optimizer.prepare_reduction()
        return loss, metrics, [logprobs[i] for i in range(len(samples))]

    def _accumulate(
        self, stack: DecoderStack | None, samples: list[Sample], objective: LossFunction, share: float
    ) -> tuple[Tensor, Metrics, list[Tensor]]:
        """Forward and backward of one micro-batch, `share` of the step; gradients stay in the leaves."""
        hidden = router_loss = None
        if self.router_loss_coef:
            hidden, router_loss = padded_with_router_loss(self.model, samples)
        entropy_gradient = getattr(objective, "has_entropy_bonus", True)
        logprobs, entropies = self._scored(
            self.model, stack, samples, hidden, entropy_gradient=entropy_gradient
        )
        del hidden  # [N, hidden] that would stay through the layers' backward pass, where memory is fullest
        loss, metrics = objective(
            padded(logprobs),
            padded(entropies),
            loss_batch(samples),
        )
        if router_loss is not None:
            loss = loss + self._weighted(router_loss, share, metrics)
        loss.backward()
        if stack is not None:
            stack.settle()
        self._mark_memory("backward", "workspace")
        return loss.detach(), metrics, [x.detach() for x in logprobs]

    def _weighted(self, router_loss: Tensor, share: float, metrics: Metrics) -> Tensor:
        """The part of the step's loss that a micro-batch's router loss adds, `share` of the sequences."""
        metrics.add_mean("aux_loss", router_loss.detach() * share, share)
        return self.router_loss_coef * share * router_loss

    def _evaluate(
        self, model: nn.Module, samples: Sequence[Sample], use: str, counted: str | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`_evaluate_once`, repeated if memory runs out, with the ranks that share the weights."""
        return self._repeating.run(partial(self._evaluate_once, model, samples, use, counted), self._partners)

    def _evaluate_once(
        self, model: nn.Module, samples: Sequence[Sample], use: str, counted: str | None
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies of every completion; micro-batches are counted under that name."""
        model.eval()
        results: dict[int, tuple[Tensor, Tensor]] = {}
        with self._stacks.open(model, use) as stack:

            def evaluate(indices: list[int]) -> None:
                microbatch = [samples[i] for i in indices] or [filler(self.device)]
                logprobs, entropies = self._scored(model, stack, microbatch, entropy_gradient=False)
                # Of a filler nothing is kept.
                results.update(zip(indices, zip(logprobs, entropies, strict=True), strict=False))

            microbatches = self._microbatches(samples, packed=stack is not None)
            each = microbatches if counted is None else self._counts.each(counted, microbatches)
            for_each(stack, each, evaluate, has_backward=False)
        return [results[i] for i in range(len(samples))]

    def _go_along(self) -> None:
        """Take part in the passes of other ranks' micro-batch, while this rank has none."""
        logprobs, _ = self._scored(self.model, None, [filler(self.device)], entropy_gradient=False)
        (0 * logprobs[0].sum()).backward()

    def _scored(
        self,
        model: nn.Module,
        stack: DecoderStack | None,
        samples: list[Sample],
        hidden: Tensor | None = None,
        *,
        entropy_gradient: bool,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities and entropies of every completion, each [C], from `hidden` if it is known."""

        def work() -> tuple[Tensor, Tensor]:
            states = self._hidden_states(model, stack, samples) if hidden is None else hidden
            return self._logprobs(model, stack, states, samples, entropy_gradient=entropy_gradient)

        logprobs, entropies = run_gathered(model, work)
        lengths = [len(sample.completion_ids) for sample in samples]
        return list(logprobs.split(lengths)), list(entropies.split(lengths))

    def _hidden_states(self, model: nn.Module, stack: DecoderStack | None, samples: list[Sample]) -> Tensor:
        """The last hidden states that predict completion tokens, [N, hidden], sample after sample."""
        if stack is None:
            return padded_hidden_states(model, samples)
        packed = stack.pack(samples)
        self._largest_microbatch = max(self._largest_microbatch, packed.num_tokens)
        return stack.hidden_states(packed, self.plan.activation_policy, self._counts)

    def _logprobs(
        self,
        model: nn.Module,
        stack: DecoderStack | None,
        hidden: Tensor,
        samples: list[Sample],
        *,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of all completions, each [N], from their hidden states."""
        self._mark_memory("layers", "workspace")
        head = output_head(model)
        logprobs, entropies = token_logprobs(
            hidden,
            torch.cat([sample.completion_ids for sample in samples]),
            head if stack is None else stack.whole(head),
            temperature=self._temperature,
            chunk_size=self.plan.logprob_chunk_size,
            entropy_gradient=entropy_gradient,
            keep_softmax=self.plan.keep_softmax,
        )
        self._mark_memory("log-probs", "logits")
        return logprobs, entropies

    def _microbatches(self, samples: Sequence[Sample], *, packed: bool) -> list[list[int]]:
        """The indices of each micro-batch's samples; ranks that gather layers together get equally many."""
        for number, sample in enumerate(samples):
            if len(sample.prompt_ids) == 0 or len(sample.completion_ids) == 0:
                raise ValueError(
                    f"Sample {number} has {len(sample.prompt_ids)} prompt and {len(sample.completion_ids)} "
                    "completion tokens; each needs at least one."
                )
        lengths = [sample.num_tokens for sample in samples]
        self._longest.check_sample(max(lengths, default=0))
        self._step_plan.see(samples)
        budget = self._step_plan.budget
        if packed:
            groups = groups_of(samples, share_prompts=self._share_prompts)
            parts = pack(groups, [sample.num_shared for sample in samples], lengths, budget)
        else:
            parts = pack_padded(lengths, budget)
        most = max(count for (count,) in self._partners.gather(len(parts)))
        return parts + [[] for _ in range(most - len(parts))]

    def _step_size(self, samples: Sequence[Sample]) -> float:
        """The mean number of samples per rank, over which the ranks' router losses are averaged."""
        if not self.router_loss_coef or not is_distributed():
            return len(samples)
        size = torch.tensor(float(len(samples)), device=self.device)
        all_reduce_mean([size])
        return float(size)

    @property
    def num_weight_parts(self) -> int:
        """The number of ranks that share one copy of the weights, and compute together."""
        return self._mesh.num_weight_parts

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt that several samples of a micro-batch have is computed once."""
        return self._share_prompts and self._runs_packed

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device
