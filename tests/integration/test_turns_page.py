"""docs/turns.md: its examples run, with a tiny model in place of the one it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import colocate
from colocate.episodes.renderer import Renderer
from tiny import CHAT_TEMPLATE, StubEngine, logged, make_model, make_trainer
from tool_chat import call, make_chat_tokenizer, user

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "turns.md").read_text(), re.DOTALL
)


def test_a_template_for_tools(monkeypatch: pytest.MonkeyPatch):
    plain = make_chat_tokenizer(CHAT_TEMPLATE)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: plain)
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    Renderer(names["tokenizer"]).check_tools()


def test_tools_and_environments_of_the_page(tmp_path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = make_chat_tokenizer()
    model = make_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)

    def trainer_of(write: Any, **arguments: Any) -> Any:
        def complete(prompt, member):
            text = write(tokenizer.decode(prompt.token_ids), member)
            return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

        options = dict(
            max_completion_length=400, num_generations=4, per_device_train_batch_size=4, max_steps=1
        )
        arguments = {**arguments, "model": model, "processing_class": tokenizer, **options}
        arguments.pop("args", None)
        return make_trainer(tmp_path, stub=StubEngine(complete), **arguments)

    def multiplies(text: str, member: int) -> str:
        return "it is 391" if "<|im_start|>tool\n391" in text else call("multiply", a=17, b=23 + member % 2)

    monkeypatch.setattr(colocate, "GRPOTrainer", lambda **arguments: trainer_of(multiplies, **arguments))
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    names["trainer"].train()
    assert logged(names["trainer"], "reward") == [0.5]

    def halves(text: str, member: int) -> str:
        low, high = 0, 100
        for number, answer in re.findall(r'"number": (\d+)\}.*?<\|im_start\|>tool\n(\w+)', text, re.DOTALL):
            low, high = (int(number), high) if answer == "higher" else (low, int(number))
        return call("guess", number=(low + high) // 2)

    exec(BLOCKS[2], names)
    dataset = Dataset.from_list([{"prompt": user("Play."), "secret": secret} for secret in (50, 25)])
    trainer = trainer_of(
        halves,
        reward_funcs=None,
        train_dataset=dataset,
        environment_factory=names["Guess"],
        shuffle_dataset=False,
    )
    trainer.train()
    assert logged(trainer, "rewards/Guess/mean") == [1.0]
