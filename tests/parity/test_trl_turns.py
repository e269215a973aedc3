"""Episodes of several turns against TRL's own GRPOTrainer: masks, lengths, advantages, losses and gradients.

TRL generates, masks, counts, scores and computes the loss with its own code; a `rollout_func` hands it the
episodes, with its mask of what was sampled. Here the same episodes go through judge, weights and policy, as
in a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_trl_loss import EOS, MAX_COMPLETION_LENGTH, VOCAB, TRLReference, our_params, tiny_model
from torch import Tensor
from transformers import TrainingArguments

from colocate.algorithms.losses import LOSSES
from colocate.algorithms.objective import Objective
from colocate.episodes.episode import Episode
from colocate.experience.judge import Judge, Rollout
from colocate.experience.requests import RolloutRequest
from colocate.experience.weighting import shuffled_slices, with_entropy_threshold
from colocate.memory.train_plan import TrainPlan
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.rewards.base import RewardFunctions
from colocate.types import Completion, Prompt, Sample

STEP = 2.0**12
"""So large that the weights' change shows the gradient to all its digits."""
GROUP, NUM_GROUPS = 4, 2
NUM_EPISODES = GROUP * NUM_GROUPS
REWARDS = [
    [0.3, 1.0],
    [math.nan, 0.5],
    [2.0, -1.0],
    [0.1, 0.2],
    [1.0, 1.0],
    [0.5, math.nan],
    [0.0, 3.0],
    [0.7, 0.1],
]
OFF_POLICY = {"num_iterations": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "off-policy": OFF_POLICY | {"off_policy_mask_threshold": 0.02},
    "penalised": OFF_POLICY | {"beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.5},
    "engine, by token": OFF_POLICY | {"vllm_importance_sampling_mode": "token_truncate", "beta": 0.1},
    "engine, by row": OFF_POLICY | {"vllm_importance_sampling_mode": "sequence_truncate"},
}


@dataclass
class Turns:
    """The shape of an episode: given and sampled tokens of each turn; the first is given the prompt only."""

    turns: list[tuple[int, int]]
    is_truncated: bool


turns = st.builds(
    lambda first, others, cut: Turns([(0, first), *others], cut),
    st.integers(3, 6),  # a token alone would be the same in all episodes, whose gradients would cancel
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=2),
    st.sampled_from([False, False, False, True]),
)


class TRLTurns(TRLReference):
    """TRL's trainer with episodes of several turns, of the shapes that `play` is given."""

    def __init__(self, output_dir: str) -> None:
        # First, because making them resets the state of the process that TRL's trainer goes by.
        self.plain_steps = TrainingArguments(
            "unused",
            use_cpu=True,
            report_to=[],
            optim="sgd",
            learning_rate=STEP,
            lr_scheduler_type="constant",
        )
        super().__init__(output_dir)
        self.prompt_ids = [(4, 9, 2, 7), (11, 3)]
        self.trainer.reward_weights = torch.tensor([1.0, 0.3])

    def play(self, shapes: list[Turns], seed: int) -> None:
        """Make the episodes: random tokens, and log-probs of an engine that differs from the model."""
        generator = torch.Generator().manual_seed(seed)
        self.episodes = []
        for number, shape in enumerate(shapes):
            episode, node = Episode(), None
            for given_tokens, sampled in shape.turns:
                ids = torch.randint(2, VOCAB, (given_tokens + sampled,), generator=generator).tolist()
                is_last = len(episode.nodes) == len(shape.turns) - 1
                ends = "length" if is_last and shape.is_truncated else "stop"
                ids[-1] = EOS if ends == "stop" else ids[-1]
                given_ids = ids[:given_tokens] if node is not None else self.prompt_ids[number // GROUP]
                noise = (-2.5 + 0.7 * torch.randn(sampled, generator=generator)).tolist()
                turn = Completion(tuple(ids[given_tokens:]), tuple(noise), ends, 0)
                node = episode.add(node, given_ids, turn)
            self.episodes.append(episode)

    def rollout(self) -> dict[str, Tensor]:
        """The episodes as TRL masks, counts and scores them, with the weights at the rollout."""
        trainer = self.trainer
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights_at_rollout[name])
        rows = [row for episode in self.episodes for row in episode.rows()]
        trainer.rollout_func = lambda prompts, trainer: {
            "prompt_ids": [list(row.prompt_ids) for row in rows],
            "completion_ids": [list(row.completion_ids) for row in rows],
            "logprobs": [[0.0 if math.isnan(x) else x for x in row.logprobs] for row in rows],
            "env_mask": [[int(x) for x in row.is_sampled] for row in rows],
        }
        trainer._last_loaded_step = trainer.state.global_step  # no vLLM server is told of new weights
        trainer._calculate_rewards = lambda *args: torch.tensor(REWARDS)
        return trainer._generate_and_score_completions([{"prompt": "w2"}] * NUM_EPISODES)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> TRLTurns:
    torch.set_num_threads(1)
    return TRLTurns(str(tmp_path_factory.mktemp("trl")))


def judged(reference: TRLTurns) -> Rollout:
    def column(i: int):
        return lambda **_: [None if math.isnan(row[i]) else row[i] for row in REWARDS]

    request = RolloutRequest(
        [{"prompt": "w2"}] * NUM_GROUPS,
        [Prompt(ids, key, range(GROUP)) for key, ids in enumerate(reference.prompt_ids)],
        num_generations=GROUP,
    )
    judge = Judge(
        RewardFunctions([column(0), column(1)], reward_weights=[1.0, 0.3]),
        reference.trainer.processing_class,
        torch.device("cpu"),
        mask_truncated_completions=True,
        has_turns=True,
        calls_tools=True,
    )
    return judge.score(request, reference.episodes)


def policy_of(weights: dict[str, Tensor], args: TrainingArguments) -> Policy:
    model = tiny_model(seed=0)
    model.load_state_dict(weights)
    # Episodes are cut over several micro-batches, and share their prompts within each.
    plan = TrainPlan(tokens_per_microbatch=48, logprob_chunk_size=7)
    return Policy(model, PolicyOptimizer(model, args, 10), temperature=1.0, plan=plan, max_grad_norm=None)


def our_update(reference: TRLTurns, members: list[list[Sample]], case: str, loss_type: str, level: str):
    """Loss, gradient and metrics of the update that TRL's model is about to make."""
    options = {"loss_type": loss_type, "importance_sampling_level": level, **OPTIONS[case]}
    weighting = SimpleNamespace(
        seed=0, loss_type=loss_type, max_completion_length=MAX_COMPLETION_LENGTH, world_size=1,
        per_device_train_batch_size=NUM_EPISODES, gradient_accumulation_steps=1, steps_per_generation=1,
        top_entropy_quantile=options.get("top_entropy_quantile", 1.0),
    )  # fmt: skip
    moved = {name: p.clone() for name, p in reference.model.state_dict().items()}
    policy = policy_of(moved, reference.plain_steps)
    num_tokens = int(sum(s.completion_mask.sum() for member in members for s in member))
    (samples,) = shuffled_slices(members, weighting, 0, num_tokens)
    if "num_iterations" in options:
        policy.model.load_state_dict(reference.weights_at_rollout)
        old = [logprobs for logprobs, _ in policy.logprobs(samples)]
        samples = [replace(s, old_logprobs=x) for s, x in zip(samples, old, strict=True)]
        policy.model.load_state_dict(moved)
        policy.take_parameters()
    if "beta" in options:
        penalised = policy_of(reference.reference_model.state_dict(), reference.plain_steps)
        logprobs = penalised.logprobs(samples)
        samples = [replace(s, reference_logprobs=x) for s, (x, _) in zip(samples, logprobs, strict=True)]
    if weighting.top_entropy_quantile < 1.0:
        samples = with_entropy_threshold(samples, policy, weighting, num_accumulated=1)
    update = policy.update(samples, Objective(our_params(options, with_engine=case.startswith("engine"))))
    parts = [(moved[name] - p.detach()).flatten() / STEP for name, p in policy.model.named_parameters()]
    return update.loss, torch.cat(parts), update.metrics.compute()


FEW = settings(
    max_examples=4,
    phases=[Phase.reuse, Phase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.in_trl])
@FEW
@given(
    shapes=st.lists(turns, min_size=NUM_EPISODES, max_size=NUM_EPISODES),
    level=st.sampled_from(["token", "sequence"]),
    has_token_advantages=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_turns_train_as_in_trl(
    reference: TRLTurns, loss_type, case, shapes, level, has_token_advantages, seed
):
    if loss_type == "vespo" and case == "engine, by row":
        return
    with_engine = case.startswith("engine")
    reference.play(shapes, seed)
    reference.configure(
        {"loss_type": loss_type, "importance_sampling_level": level, **OPTIONS[case]}, with_engine=with_engine
    )
    batch = reference.rollout()
    logged = {name: values[-1] for name, values in reference.trainer._metrics["train"].items()}

    rollout = judged(reference)
    for n, sample in enumerate(rollout.samples):
        length = len(sample.completion_ids)
        assert batch["completion_ids"][n, :length].tolist() == sample.completion_ids.tolist()
        mask = batch["completion_mask"][n] * batch["tool_mask"][n]
        assert mask[:length].tolist() == sample.completion_mask.tolist() and not mask[length:].any()
        assert sample.advantage == pytest.approx(batch["advantages"][n].item(), rel=1e-5, abs=1e-6)
    for name in rollout.metrics:
        if name.startswith("completions/") or name in ("reward", "reward_std", "frac_reward_zero_std"):
            assert rollout.metrics[name] == pytest.approx(logged[name], rel=1e-5), name

    members = rollout.members
    if has_token_advantages:
        batch["advantages"] = torch.randn(
            batch["completion_ids"].shape, generator=torch.Generator().manual_seed(seed)
        )
        members = [
            [replace(sample, advantage=values[: len(sample.completion_ids)])]
            for (sample,), values in zip(members, batch["advantages"], strict=True)
        ]
    if "num_iterations" in OPTIONS[case]:
        reference.update_policy()
    reference.trainer._metrics["train"].clear()
    expected_loss, expected_gradient = reference.loss(batch)
    loss, gradient, metrics = our_update(reference, members, case, loss_type, level)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    # Episodes in which much cancels have small gradients; they are sums of entries as large as the largest.
    largest = expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7 + 1e-5 * largest)
    for name, (value,) in reference.trainer._metrics["train"].items():
        if name in metrics and name != "entropy_coef":
            least = 1e-5 if name == "policy_loss" else 1e-6  # much cancels in the loss
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=least, nan_ok=True), name
