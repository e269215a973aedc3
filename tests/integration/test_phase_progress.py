"""What a run tells of its phases while they go on, from the first to the last."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset

from tiny import StubEngine, count_digits, logged, make_model, make_trainer, sums
from tool_chat import call, make_chat_tokenizer, user

CHAT = make_chat_tokenizer()


def noted(trainer) -> dict[str, str]:
    """What was last told of each phase, by its name; filled while the trainer trains."""
    told: dict[str, str] = {}
    progress = trainer.run.journal.progress
    set_phase = progress.set_phase

    def note(name: str) -> None:
        if words := progress.counts.words():
            told[progress._phase] = words
        set_phase(name)

    progress.set_phase = note
    return told


async def waits(completions, **columns) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    "options",
    [{}, {"engine": "transformers"}, {"max_policy_lag": 1, "engine": "native"}],
    ids=["native", "transformers", "carried over"],
)
def test_every_long_phase_says_how_much_of_it_is_done(tmp_path, options):
    trainer = make_trainer(
        tmp_path,
        reward_funcs=[count_digits, waits],
        eval_dataset=sums(3),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=1,
        beta=0.1,
        max_tokens_per_microbatch=16,
        **options,
    )
    told = noted(trainer)
    trainer.train()
    num_tokens = round(4 * logged(trainer, "completions/mean_length")[0])
    if "max_policy_lag" in options:  # the engine draws of the next batch, too
        assert re.fullmatch(r"4 of 4 completions, \d+ tokens", told["rollout"])
    else:
        bound = "at most 24" if num_tokens < 24 else "24"
        assert told["rollout"] == f"{num_tokens} of {bound} tokens, 4 of 4 completions"
        assert re.fullmatch(r"\d+ of (at most )?\d+ tokens, 12 of 12 completions", told["evaluate/rollout"])
    assert told["score"] == "2 of 2 reward functions"
    done, total, *layers = re.match(
        r"(\d+) of (\d+) micro-batches, (\d+) of (\d+) layers", told["train"]
    ).groups()
    assert done == total != "1" and layers == ["4", "4"]  # two, forward and backward
    assert "reward functions" in told["evaluate"] and "micro-batches" in told["evaluate"]
    done, total = re.fullmatch(r"(\d+) of (\d+) MB", told["save"]).groups()
    assert done == total


def test_episodes_turns_and_tools_are_told(tmp_path):
    def slow_add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        waiting.append(trainer.run.journal.progress.counts.words())
        return a + b

    waiting: list[str] = []
    trainer = make_trainer(
        tmp_path,
        model=make_model(vocab_size=len(CHAT), eos_token_id=CHAT.eos_token_id),
        stub=StubEngine(calls_once),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": user(f"{n} + 1")} for n in range(4)]),
        tools=[slow_add],
        processing_class=CHAT,
        max_completion_length=300,
        max_steps=1,
    )
    told = noted(trainer)
    trainer.train()
    assert re.fullmatch(r"4 of 4 episodes, \d+ tokens, 8 turns", told["rollout"])
    assert len(waiting) == 4 and "of 4 episodes" in waiting[0]


def calls_once(prompt, member: int) -> list[int]:
    text = CHAT.decode(prompt.token_ids)
    answer = "done" if "<|im_start|>tool\n" in text else call("slow_add", a=1, b=member)
    return [*CHAT(answer)["input_ids"], CHAT.eos_token_id]
