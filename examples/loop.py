"""GRPO on one page: colocate's parts put together by hand, without its trainer. Runs on a CPU in seconds.

    python examples/loop.py

A model of two layers, with random weights, is shown a letter and writes six. Each of the six that is the
letter it was shown earns a sixth of the reward. Nobody tells the model so: it writes, is rewarded, and
completions that were better than their neighbours become more likely.

`GRPOTrainer` does the same with checkpoints, callbacks, metrics, several GPUs and plans for their memory
(`src/colocate/loop.py`), and a test holds the two to the same weights, bit for bit.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from colocate import GRPOConfig
from colocate.algorithms.objective import Objective
from colocate.algorithms.objective_params import ObjectiveParams
from colocate.data.sampler import PromptBatches
from colocate.engines.native.engine import NativeEngine
from colocate.experience.judge import Judge
from colocate.experience.players.play import SingleTurnPlayer
from colocate.experience.requests import RequestBuilder
from colocate.experience.select import Selector
from colocate.experience.window import TrainingWindow
from colocate.memory.train_plan import TrainPlan
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.policy import Policy
from colocate.rewards.base import RewardFunctions
from colocate.types import SamplingParams

LETTERS = "abcd"
PAD, EOS = 0, 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter."""
    tokenizer = Tokenizer(WordLevel({"<pad>": PAD, "<eos>": EOS, **{x: i for i, x in enumerate(LETTERS, 2)}}))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2 + len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
            pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
        )
    )  # fmt: skip


def make_dataset() -> Dataset:
    """Rows of a prompt; further columns would reach the reward function as arguments."""
    return Dataset.from_dict({"prompt": [letter for letter in LETTERS for _ in range(8)]})


def share_of_letter(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """The reward: how much of each completion is the letter of its prompt."""
    return [text.count(letter) / 6 for letter, text in zip(prompts, completions, strict=True)]


def make_config(output_dir: str, **options: object) -> GRPOConfig:
    """The options, with TRL's names and defaults; this run sets a few itself, and `options` override them."""
    own = dict(
        num_generations=8,  # completions of a prompt: its group, whose members are compared
        per_device_train_batch_size=64,  # completions of an optimizer step: eight groups
        max_completion_length=6,
        learning_rate=2e-2,
        max_steps=40,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    )
    return GRPOConfig(output_dir=output_dir, **{**own, **options})


def train(args: GRPOConfig, model: Qwen3ForCausalLM) -> list[float]:
    """Train `args.max_steps` optimizer steps in place; returns the mean reward of every rollout."""
    device, tokenizer = torch.device("cpu"), make_tokenizer()

    # The trainer's side. The policy is the model with its optimizer; its plan says how a step is cut to fit
    # the memory (here, not at all). The objective is the loss: DAPO's, which clips ratios of probabilities.
    optimizer = PolicyOptimizer(model, args, args.max_steps)
    plan = TrainPlan(sequences_per_microbatch=args.per_device_train_batch_size)
    policy = Policy(
        model, optimizer, temperature=args.temperature, plan=plan, max_grad_norm=args.max_grad_norm
    )
    objective = Objective(args.options_of(ObjectiveParams))

    # The engine's side. It reads the very weights that the policy trains, so nothing is ever copied. A
    # completion depends on the seed, on its prompt's number and on its own, not on who is in the batch.
    engine = NativeEngine(model)
    sampling = SamplingParams(args.max_completion_length, stop_token_ids=(EOS,), seed=args.seed)
    player = SingleTurnPlayer(engine, sampling)

    # The stages between the two, in the order in which a step goes through them.
    num_prompts = args.generation_batch_size // args.num_generations
    batches = PromptBatches(make_dataset(), num_prompts, seed=args.seed)
    requests = RequestBuilder(tokenizer, args, model.config.max_position_embeddings)
    judge = Judge(RewardFunctions(share_of_letter), tokenizer, device)
    selector = Selector(policy, args)
    window = TrainingWindow(args.gradient_accumulation_steps, args.num_iterations, device)

    def old_logprobs(samples):
        return [logprobs for logprobs, _ in policy.logprobs(samples)]

    rewards = []
    for _ in range(args.max_steps):
        # A rollout may hold more completions than a step trains on. The window hands them out, and keeps the
        # log-probs under the policy that wrote them for when that policy has moved on.
        while not window.ready:
            batch = next(batches)
            request = requests.training(batch)

            # The engine's turn. On a GPU, waking maps memory for keys and values, as much as there is, and
            # sleeping gives it back: what decoding fills now holds activations and gradients a moment later.
            engine.wake_up()
            episodes = player.play(request)
            engine.sleep()

            # A completion's advantage is its reward less the mean of its group, over the group's deviation.
            # That is GRPO's whole idea: the neighbours are the baseline, and no value network is needed.
            rollout = judge.score(request, episodes)
            rewards.append(rollout.metrics["reward"])
            window.add(selector.slices(rollout, batch.number), old_logprobs)

        # The policy's turn: forward and backward in micro-batches, the gradient's norm clipped, one step of
        # AdamW. What it computes for the old log-probs of later steps comes back with the result.
        update = policy.update(selector.for_step(window.peek()), objective)
        window.advance(update.logprobs)

        # The weights are in place already; the engine forgets what it computed with those before.
        engine.update_weights(policy.version)
    engine.close()
    return rewards


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rewards = train(make_config(directory), make_model())
    for step in range(0, len(rewards), 5):
        reward = sum(rewards[step : step + 5]) / 5
        print(f"steps {step + 1:2} to {step + 5:2}   reward {reward:.2f}   {'█' * round(50 * reward)}")


if __name__ == "__main__":
    main()
