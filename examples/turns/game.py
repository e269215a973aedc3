"""A model learns to use what a game tells it: GRPO in an environment of three turns.

    python examples/turns/game.py [--output_dir runs/game] [--seed 0]    # three minutes on a CPU

The environment thinks of a number from 1 to 7 and answers each of three guesses with what is left: "5 to 7".
Whoever ignores the answers has guessed at most three of the seven numbers, and wins at most 3/7 = 43% of the
games; whoever halves what is left, 7 → 3 → 1, wins them all. First a Qwen3 of 0.2 million random parameters
imitates somebody who halves with four guesses in ten and is blind with the others, until it does so as well,
and wins every second game. Then reward for winning teaches it to halve always.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from chat import Message, build_model, build_tokenizer, called, imitate
from datasets import Dataset

from colocate import GRPOConfig, GRPOTrainer

PHRASES = ['{"name": "guess", "arguments": {"number": ', "}}", "guess", " to ", "right", "Play."]
NUMBERS = range(1, 8)
NUM_GUESSES = 3
SHARE_OF_HALVING = 0.4
NUM_IMITATION_STEPS = 900
"""In its first two or three hundred steps the model learns how to call and which numbers are frequent, but
not yet to look at the answers. Reward has nothing to strengthen in a model that never does."""
PROMPT: list[Message] = [{"role": "user", "content": "Play."}]


class Game:
    """Thinks of a number; `guess` is the tool by which it is played."""

    def reset(self, secret: int, **row: Any) -> None:
        self.secret, self.low, self.high = secret, NUMBERS[0], NUMBERS[-1]
        self.num_guesses, self.is_won, self.done = 0, False, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess, from 1 to 7.
        """
        self.num_guesses += 1
        self.is_won = number == self.secret
        self.done = self.is_won or self.num_guesses == NUM_GUESSES
        if number < self.secret:
            self.low = max(self.low, number + 1)
        else:
            self.high = min(self.high, number - 1)
        return "right" if self.is_won else f"{self.low} to {self.high}"

    def get_reward(self) -> float:
        return float(self.is_won)


def demonstration(rng: random.Random) -> list[Message]:
    """A game of somebody who does not always heed the answers."""
    game, conversation = Game(), list(PROMPT)
    game.reset(rng.choice(NUMBERS))
    while not game.done:
        is_halving = rng.random() < SHARE_OF_HALVING
        number = (game.low + game.high) // 2 if is_halving else rng.choice(NUMBERS)
        answer = {"role": "tool", "name": "guess", "content": game.guess(number)}
        conversation += [called("guess", number=number), answer]
    return conversation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", default="runs/game")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--imitation_steps", type=int, default=NUM_IMITATION_STEPS)
    parser.add_argument("--max_steps", type=int, default=100)
    arguments = parser.parse_args()

    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(PHRASES)
    model = build_model(tokenizer)
    imitate(model, tokenizer, demonstration, [Game().guess], num_steps=arguments.imitation_steps, rng=rng)
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=arguments.output_dir,
            max_steps=arguments.max_steps,
            per_device_train_batch_size=16 * len(NUMBERS),
            num_generations=16,
            shuffle_dataset=False,  # so that each batch has every secret, one for each group
            max_completion_length=60,
            learning_rate=1e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            adam_beta2=0.99,  # the default, 0.999, remembers more steps than there are
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            seed=arguments.seed,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "secret": number} for number in NUMBERS]),
        processing_class=tokenizer,
        environment_factory=Game,
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"won in the first five steps: {rewards[0]:.0%}; in the last five: {rewards[-1]:.0%}")


if __name__ == "__main__":
    main()
