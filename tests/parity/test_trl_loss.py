"""Loss, gradient, metrics, advantages and corrections against TRL's own GRPOTrainer, on the same batch.

One real trainer with a tiny random model. Only two of its methods are replaced: the one that generates and
the one that scores return crafted completions and rewards. All the rest, from masking over advantages and
old log-probs to the loss, is TRL's code; its numbers are the expected ones.
"""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head, split_tensor_dict

from colocate.algorithms.advantages import AdvantageOptions, compute_advantages
from colocate.algorithms.entropy import EntropyController, EntropyOptions
from colocate.algorithms.losses import LOSSES, loss_weights
from colocate.algorithms.masks import entropy_threshold
from colocate.algorithms.normalization import entropy_weights, mean_tokens_per_step
from colocate.algorithms.objective import LossBatch, Objective, ObjectiveParams
from colocate.algorithms.objective_params import IMPORTANCE_SAMPLING_MODES
from colocate.reporting.metrics import Metrics

PAD, EOS, VOCAB = 0, 1, 24
NUM_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 10
# Three groups of four. The fourth completion of the second group runs into the length limit.
LENGTHS = [3, 9, 1, 5, 7, 2, 4, 10, 6, 8, 3, 5]
TRUNCATED = 7


def tiny_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,  # far from uniform: log-probs, entropies and gradients are of order one
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config).train()


class TRLReference:
    """TRL's trainer, brought to a given configuration and a crafted rollout."""

    def __init__(self, output_dir: str) -> None:
        words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
        tokenizer.pre_tokenizer = Whitespace()
        args = trl.GRPOConfig(
            output_dir,
            per_device_train_batch_size=len(LENGTHS),
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            mask_truncated_completions=True,
            gradient_checkpointing=False,
            report_to="none",
            use_cpu=True,
            bf16=False,
        )
        self.model = tiny_model(seed=0)
        self.trainer = trl.GRPOTrainer(
            self.model,
            reward_funcs=[lambda completions, **kwargs: [0.0] * len(completions)] * 2,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * len(LENGTHS)}),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
            ),
        )
        self.reference_model = tiny_model(seed=1)
        add_fused_lm_head(self.reference_model)
        self.weights_at_rollout = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.craft_rollout()

    def craft_rollout(self) -> None:
        generator = torch.Generator().manual_seed(2)

        def draw(length: int) -> list[int]:
            return torch.randint(2, VOCAB, (length,), generator=generator).tolist()

        prompts = [draw(n) for n in (4, 2, 6) for _ in range(NUM_GENERATIONS)]
        self.prompt_ids = [prompts[i // NUM_GENERATIONS * NUM_GENERATIONS] for i in range(len(LENGTHS))]
        self.completion_ids = [[*draw(n - 1), EOS] for n in LENGTHS]
        self.completion_ids[TRUNCATED][-1] = 5
        self.rewards = torch.randn(len(LENGTHS), 2, generator=generator)
        self.rewards[1, 0] = self.rewards[5, 1] = math.nan
        self.rewards[9] = math.nan
        self.rollout_logprobs: list[list[float | None]] = []
        for prompt, completion in zip(self.prompt_ids, self.completion_ids, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            noise = 0.4 * torch.randn(len(completion), generator=generator)
            self.rollout_logprobs.append((logprobs + noise).tolist())
        self.rollout_logprobs[0][1] = None  # what the engine reports as NaN arrives as None

    def configure(self, options: dict, *, with_engine: bool) -> None:
        """Set what TRL's __init__ would have set for these options."""
        trainer, defaults = self.trainer, trl.GRPOConfig.__dataclass_fields__
        values = {f.name: defaults[f.name].default for f in fields(ObjectiveParams)}
        for name in (
            "scale_rewards",
            "multi_objective_aggregation",
            "num_iterations",
            "top_entropy_quantile",
        ):
            values[name] = defaults[name].default
        for name in ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"):
            values[name] = defaults[name].default
        values |= options
        for name, value in values.items():
            for owner in (trainer, trainer.args):
                if hasattr(owner, name):
                    setattr(owner, name, value)
        trainer.epsilon_low = values["epsilon"]
        trainer.epsilon_high = values["epsilon"] if values["epsilon_high"] is None else values["epsilon_high"]
        trainer.args.steps_per_generation = values.get("steps_per_generation", 1)
        trainer.args.gradient_accumulation_steps = values.get("gradient_accumulation_steps", 1)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.use_vllm = with_engine
        trainer.ref_model = self.reference_model if values["beta"] else None
        trainer._entropy_bonus_enabled = values["entropy_coef"] != 0.0 or values["use_adaptive_entropy"]
        trainer._last_world_entropy = math.inf
        trainer._entropy_window_stats = None
        trainer._metrics["train"].clear()

    def rollout(self) -> dict[str, torch.Tensor]:
        """The whole generation batch, masked, scored and corrected by TRL with the weights at the rollout."""
        trainer = self.trainer
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights_at_rollout[name])
        texts = ["w2"] * len(LENGTHS)
        logprobs = self.rollout_logprobs if trainer.use_vllm else None
        trainer._generate = lambda prompts: (
            *(self.prompt_ids, self.completion_ids, None, texts),
            *(logprobs, {}, None, None),
        )
        trainer._calculate_rewards = lambda *args: self.rewards.clone()
        return trainer._generate_and_score_completions([{"prompt": text} for text in texts])

    def update_policy(self) -> None:
        """Move the weights as earlier steps would, far enough to leave the clip range on both sides."""
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))

    def loss(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.trainer._compute_loss(self.model, inputs)
        return loss.detach(), gradient(self.model, loss)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(g is not None for g in grads)
    return torch.cat([g.flatten() for g in grads])


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> TRLReference:
    torch.set_num_threads(1)
    return TRLReference(str(tmp_path_factory.mktemp("trl")))


def our_params(options: dict, *, with_engine: bool) -> ObjectiveParams:
    names = {f.name for f in fields(ObjectiveParams)}
    known = {name: value for name, value in options.items() if name in names}
    # TRL's switch is `use_vllm`; without an engine it does not look at how its log-probs would be corrected.
    return ObjectiveParams(**known if with_engine else known | {"vllm_importance_sampling_correction": False})


def our_loss(
    model: torch.nn.Module, objective: Objective, inputs: dict[str, torch.Tensor], options: dict
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """The same slice through plain logits and `Objective`."""
    completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"].float()
    length = completion_ids.shape[1]
    logits = model(
        torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
    ).logits[:, -length - 1 : -1]
    all_logprobs = logits.log_softmax(dim=-1)
    logprobs = all_logprobs.gather(-1, completion_ids[..., None])[..., 0]
    entropies = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)

    num_accumulated = options.get("gradient_accumulation_steps", 1)
    thresholds, trained = None, mask
    if options.get("top_entropy_quantile", 1.0) < 1.0:
        threshold = entropy_threshold(entropies.detach()[mask.bool()], options["top_entropy_quantile"])
        thresholds = threshold.expand(len(mask))
        trained = mask * (entropies >= threshold)
    batch = LossBatch(
        mask=mask,
        advantages=inputs["advantages"],
        loss_weights=loss_weights(
            objective.params.loss_type,
            mask.sum(dim=1),
            num_accumulated=num_accumulated,
            tokens_per_step=mean_tokens_per_step(
                inputs["num_items_in_batch"].item(),
                num_processes=1,
                num_accumulated=num_accumulated,
                steps_per_generation=options.get("steps_per_generation", 1),
            ),
            max_completion_length=MAX_COMPLETION_LENGTH,
        ),
        entropy_weights=entropy_weights(trained.sum(dim=1), num_accumulated=num_accumulated),
        old_logprobs=inputs.get("old_per_token_logps"),
        rollout_logprobs=inputs.get("sampling_per_token_logps"),
        reference_logprobs=inputs.get("ref_per_token_logps"),
        entropy_thresholds=thresholds,
    )
    loss, metrics = objective(logprobs, entropies, batch)
    return loss.detach(), gradient(model, loss), metrics


def assert_same(loss: torch.Tensor, grad: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected_loss, expected_grad = expected
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    largest = expected_grad.abs().max().item()
    # Relative to the largest entry, or small gradients would pass whatever they are.
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-8 + 1e-5 * min(largest, 1.0))


ON_POLICY: dict = {}
OFF_POLICY = {"num_iterations": 2}
TOKEN_TRUNCATE = OFF_POLICY | {"vllm_importance_sampling_mode": "token_truncate"}
TRAINER_CASES = {
    "on-policy": ON_POLICY,
    "off-policy": OFF_POLICY,
    "clip-higher": OFF_POLICY | {"epsilon": 0.1, "epsilon_high": 0.5},
    "clip-from-above": OFF_POLICY | {"epsilon": 10.0, "epsilon_high": 0.1},
    "delta": OFF_POLICY | {"delta": 1.3},
    "kl": OFF_POLICY | {"beta": 0.1, "use_bias_correction_kl": False},
    "corrected-kl": OFF_POLICY | {"beta": 0.1},
    "on-policy-corrected-kl": ON_POLICY | {"beta": 0.1},
    "off-policy-mask": OFF_POLICY | {"off_policy_mask_threshold": 0.02},
    "high-entropy-tokens": OFF_POLICY | {"top_entropy_quantile": 0.4},
    "entropy-bonus": OFF_POLICY | {"entropy_coef": 0.05},
    "accumulation": OFF_POLICY | {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
    "two-steps-per-generation": OFF_POLICY | {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
}
ENGINE_CASES = {
    **{mode: OFF_POLICY | {"vllm_importance_sampling_mode": mode} for mode in IMPORTANCE_SAMPLING_MODES},
    "token_truncate-on-both-sides": TOKEN_TRUNCATE
    | {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2},
    "token_mask-below": OFF_POLICY
    | {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.8,
        "vllm_importance_sampling_clip_max": None,
    },
    "uncorrected": OFF_POLICY
    | {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.02},
    "everything": TOKEN_TRUNCATE
    | {
        "epsilon_high": 0.28,
        "beta": 0.1,
        "off_policy_mask_threshold": 0.05,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.05,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 3,
    },
}
CASES = TRAINER_CASES | ENGINE_CASES


def is_sensible(case: str, loss_type: str) -> bool:
    if not LOSSES[loss_type].in_trl:
        return False
    if case == "delta":
        return LOSSES[loss_type].reads_delta
    return not (loss_type == "vespo" and case.startswith("sequence_"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "case"), [(t, c) for t in LOSSES for c in CASES if is_sensible(c, t)])
def test_loss_gradient_and_metrics(reference: TRLReference, loss_type: str, case: str, level: str):
    options = {"loss_type": loss_type, "importance_sampling_level": level, **CASES[case]}
    with_engine = case in ENGINE_CASES
    reference.configure(options, with_engine=with_engine)
    batch = reference.rollout()
    assert ("old_per_token_logps" in batch) == (options.get("num_iterations", 1) > 1)
    assert batch["completion_mask"].sum(dim=1).tolist() == [
        n * (i != TRUNCATED) for i, n in enumerate(LENGTHS)
    ]
    reference.update_policy()
    objective = Objective(our_params(options, with_engine=with_engine))
    for inputs in split_tensor_dict(batch, options.get("steps_per_generation", 1)):
        reference.trainer._metrics["train"].clear()
        expected = reference.loss(inputs)
        loss, grad, metrics = our_loss(reference.model, objective, inputs, options)
        assert_same(loss, grad, expected)
        ours = metrics.compute()
        for name, (value,) in reference.trainer._metrics["train"].items():
            if name == "entropy_coef":
                assert objective.entropy_coef == value
            elif name == "policy_loss" and options.get("gradient_accumulation_steps", 1) > 1:
                continue  # TRL's is per slice or per step, depending on the loss type; ours always per step
            else:
                assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_crafted_batch_leaves_the_clip_range_on_both_sides(reference: TRLReference, level: str):
    """Without this, the parity of clipping would mean nothing."""
    options = {**OFF_POLICY, "loss_type": "grpo", "importance_sampling_level": level}
    reference.configure(options, with_engine=False)
    batch = reference.rollout()
    assert (batch["advantages"] > 0.1).any() and (batch["advantages"] < -0.1).any()
    reference.update_policy()
    reference.loss(batch)
    metrics = reference.trainer._metrics["train"]
    assert metrics["clip_ratio/low_mean"][0] > 0.02
    assert metrics["clip_ratio/high_mean"][0] > 0.02


@pytest.mark.parametrize("case", [case for case in CASES if case != "off-policy"])
def test_every_case_changes_the_gradient_of_trl(reference: TRLReference, case: str):
    """Each option is felt on the crafted batch: an implementation that ignored it would not pass."""
    gradients = []
    for name in (case, "off-policy"):
        reference.configure({"loss_type": "grpo", **CASES[name]}, with_engine=name in ENGINE_CASES)
        batch = reference.rollout()
        reference.update_policy()
        steps = CASES[case].get("steps_per_generation", 1)
        gradients.append(reference.loss(split_tensor_dict(batch, steps)[0])[1])
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3 * gradients[1].abs().max()


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.8, 1.2)])
@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_sampling_metrics_merge_over_micro_batches(reference: TRLReference, mode: str, bounds: tuple):
    """TRL measures the whole generation batch at once; ours is the merge of its parts."""
    options = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": bounds[0],
        "vllm_importance_sampling_clip_max": bounds[1],
    }
    reference.configure(options, with_engine=True)
    batch = reference.rollout()
    merged = Metrics()
    for inputs in split_tensor_dict(batch, 6):
        merged.merge(
            our_loss(reference.model, Objective(our_params(options, with_engine=True)), inputs, options)[2]
        )
    ours = merged.compute()
    expected = {k: v[0] for k, v in reference.trainer._metrics["train"].items() if k.startswith("sampling/")}
    assert len(expected) == 5
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("target", [0.5, 10.0])
def test_adaptive_entropy_follows_the_same_path(reference: TRLReference, target: float):
    """Over several optimizer steps: first no bonus, then the coefficient rises or falls to its bound."""
    bounds = {"entropy_coef_max": 0.03, "entropy_target": target}
    settings = {"entropy_coef": 0.02, "use_adaptive_entropy": True}
    options = {**OFF_POLICY, **settings, **bounds, "loss_type": "dapo", "top_entropy_quantile": 0.5}
    reference.configure(options, with_engine=False)
    batch = reference.rollout()
    reference.update_policy()
    controller = EntropyController(options=EntropyOptions(**bounds), **settings)
    objective = Objective(our_params(options, with_engine=False), controller)
    for _ in range(6):
        expected = reference.loss(batch)
        loss, grad, metrics = our_loss(reference.model, objective, batch, options)
        assert_same(loss, grad, expected)
        controller.update(metrics.compute()["entropy_trained"])
        assert controller.coef == pytest.approx(reference.trainer.entropy_coef)
    assert controller.coef == pytest.approx(0.03 if target == 10.0 else 0.0)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", ["missing", "equal", "one_scored"])
def test_advantages(reference: TRLReference, monkeypatch, rewards: str, scale: str, aggregation: str):
    table = reference.rewards.clone()
    if rewards == "equal":
        table[:4] = 0.5
    elif rewards == "one_scored":
        table[5:8] = math.nan
    monkeypatch.setattr(reference, "rewards", table)
    weights = torch.tensor([1.0, 0.3])
    monkeypatch.setattr(reference.trainer, "reward_weights", weights)
    options = {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    reference.configure(options, with_engine=False)
    expected = reference.rollout()["advantages"]
    ours = compute_advantages(table, NUM_GENERATIONS, weights, AdvantageOptions(**options))
    torch.testing.assert_close(ours.advantages, expected, rtol=1e-5, atol=1e-6)
    logged = {name: values[0] for name, values in reference.trainer._metrics["train"].items()}
    assert ours.rewards.nanmean().item() == pytest.approx(logged["reward"])
    assert ours.is_std_zero.float().mean().item() == pytest.approx(logged["frac_reward_zero_std"])
