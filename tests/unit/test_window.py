"""The window against a plain simulation of TRL's micro-steps."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colocate.experience.window import TrainingWindow
from colocate.types import Sample

NUM_STEPS = 12
SLICE_SIZE = 2


@dataclass(frozen=True)
class Visit:
    """One slice in one optimizer step."""

    rollout: int
    slice: int
    generated_by: int  # version of the policy


def visits_in_trl(slices_per_step: int, num_iterations: int, slices_per_rollout: int) -> list[list[Visit]]:
    """The slices of each optimizer step, from `GRPOTrainer._prepare_inputs` of TRL 1.16."""
    steps: list[list[Visit]] = []
    accumulated: list[Visit] = []
    generate_every = slices_per_rollout * num_iterations
    micro_step, rollout, buffered_inputs = 0, -1, []
    while len(steps) < NUM_STEPS:
        if micro_step % generate_every == 0:
            rollout += 1
            buffered_inputs = [Visit(rollout, i, generated_by=len(steps)) for i in range(slices_per_rollout)]
        accumulated.append(buffered_inputs[micro_step % slices_per_rollout])
        micro_step += 1
        if micro_step % slices_per_step == 0:
            steps.append(accumulated)
            accumulated = []
    return steps


@dataclass
class Run:
    """The trainer's use of the window, with a policy whose log-probs are its version."""

    slices_per_step: int
    num_iterations: int
    slices_per_rollout: int
    window: TrainingWindow = field(init=False)
    version: int = 0
    num_rollouts: int = 0
    asked_for: list[list[int]] = field(default_factory=list)
    steps: list[list[list[Sample]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.window = self.new_window()

    def new_window(self) -> TrainingWindow:
        return TrainingWindow(self.slices_per_step, self.num_iterations, torch.device("cpu"))

    def step(self) -> None:
        while not self.window.ready:
            self.window.add([self.slice(i) for i in range(self.slices_per_rollout)], self.old_logprobs)
            self.num_rollouts += 1
        slices = self.window.peek()
        self.steps.append(slices)
        self.window.advance([self.logprobs(sample) for samples in slices for sample in samples])
        self.version += 1

    def slice(self, number: int) -> list[Sample]:
        ids = [torch.tensor([self.num_rollouts, number, i]) for i in range(SLICE_SIZE)]
        return [Sample(torch.tensor([0]), x, torch.ones(3), advantage=0.0) for x in ids]

    def logprobs(self, sample: Sample) -> Tensor:
        """Tells version and sample apart."""
        return sample.completion_ids + 1000.0 * self.version

    def old_logprobs(self, samples: list[Sample]) -> list[Tensor]:
        self.asked_for += [sample.completion_ids.tolist() for sample in samples]
        return [self.logprobs(sample) for sample in samples]


sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


@given(sizes)
def test_order_of_visits_is_trls(shape):
    run = Run(*shape)
    for _ in range(NUM_STEPS):
        run.step()
    visited = [[[s.completion_ids.tolist() for s in samples] for samples in step] for step in run.steps]
    expected = [
        [[[visit.rollout, visit.slice, i] for i in range(SLICE_SIZE)] for visit in step]
        for step in visits_in_trl(*shape)
    ]
    assert visited == expected


@given(sizes)
def test_old_logprobs_are_the_generating_policys(shape):
    run = Run(*shape)
    for _ in range(NUM_STEPS):
        run.step()
    for version, (step, visits) in enumerate(zip(run.steps, visits_in_trl(*shape), strict=True)):
        # One completion of an older policy makes all of a step need old log-probs: `Policy.update` requires
        # all or none.
        has_moved = any(visit.generated_by < version for visit in visits)
        for samples, visit in zip(step, visits, strict=True):
            for sample in samples:
                if has_moved:
                    expected = sample.completion_ids + 1000.0 * visit.generated_by
                    assert torch.equal(sample.old_logprobs, expected)
                else:
                    assert sample.old_logprobs is None


@given(sizes)
def test_a_forward_is_paid_only_for_what_no_step_computes(shape):
    run = Run(*shape)
    for _ in range(NUM_STEPS):
        run.step()
    needed, seen = [], set()
    for version, visits in enumerate(visits_in_trl(*shape)):
        has_moved = any(visit.generated_by < version for visit in visits)
        for visit in visits:
            if visit not in seen and has_moved:
                needed += [[visit.rollout, visit.slice, i] for i in range(SLICE_SIZE)]
            seen.add(visit)
    num_started = len(needed)  # the last rollout may reach beyond the steps looked at
    assert run.asked_for[:num_started] == needed


@settings(max_examples=40)
@given(sizes, st.sets(st.integers(0, NUM_STEPS - 1)))
def test_state_survives_a_file(shape, interruptions):
    straight, interrupted = Run(*shape), Run(*shape)
    for number in range(NUM_STEPS):
        straight.step()
        interrupted.step()
        if number in interruptions:
            file = io.BytesIO()
            torch.save(interrupted.window.state_dict(), file)
            file.seek(0)
            interrupted.window = interrupted.new_window()
            interrupted.window.load_state_dict(torch.load(file))
    assert straight.asked_for == interrupted.asked_for
    for step, other in zip(straight.steps, interrupted.steps, strict=True):
        for samples, others in zip(step, other, strict=True):
            assert len(samples) == len(others) == SLICE_SIZE
            for a, b in zip(samples, others, strict=True):
                assert vars(a).keys() == vars(b).keys()
                for name, value in vars(a).items():
                    same = torch.equal(value, vars(b)[name]) if isinstance(value, Tensor) else None
                    assert same is True or value == vars(b)[name]


def test_the_example_in_the_module():
    run = Run(slices_per_step=1, num_iterations=2, slices_per_rollout=2)
    for _ in range(6):
        run.step()
    assert [[s[0].completion_ids.tolist()[:2] for s in step] for step in run.steps] == [
        [[0, 0]], [[0, 1]], [[0, 0]], [[0, 1]], [[1, 0]], [[1, 1]]
    ]  # fmt: skip
    assert run.asked_for == [[0, 1, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1]]
