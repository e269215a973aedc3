"""Sequence-classification models as reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from colocate.data.encoding import is_continued, without_continuing
from colocate.data.prompts import is_conversational
from colocate.weights.context_length import longest_context
from colocate.weights.model_files import check_complete, naming_damage

# Sequences per forward pass: enough to fill the device, and the memory that it takes from the policy does not
# grow with the generation batch.
BATCH_SIZE = 16


class RewardModel:
    """A reward function that is the single logit of a sequence-classification model on prompt and completion.

    Args:
        model: A name on the Hub or a directory, or a loaded (possibly compiled) model, with one label.
        tokenizer: The model's tokenizer; None: the one found by the name in the model's configuration.
        chat_template_kwargs: Arguments of the chat template for conversations.
        model_init_kwargs: Arguments of `from_pretrained` for a model given by name.

    Raises:
        ValueError: the model has more than one label, or its tokenizer can neither pad nor end.
    """

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        init_kwargs = dict(model_init_kwargs or {})
        if isinstance(model, str):
            with naming_damage(model, init_kwargs.get("revision")):
                name = model
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    name, num_labels=1, output_loading_info=True, **init_kwargs
                )
                check_complete(name, report)
        assert isinstance(model, nn.Module)
        config: Any = model.config
        self.__name__ = config._name_or_path.rstrip("/").split("/")[-1] or type(model).__name__
        if getattr(config, "num_labels", 1) != 1:
            raise ValueError(
                f"The reward model {self.__name__!r} has {config.num_labels} labels; a reward is one number. "
                "Load it with num_labels=1."
            )
        if tokenizer is None:
            known = {key: init_kwargs[key] for key in ("revision", "trust_remote_code") if key in init_kwargs}
            tokenizer = AutoTokenizer.from_pretrained(config._name_or_path, **known)
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token is None:
                raise ValueError(
                    f"The tokenizer of the reward model {self.__name__!r} has neither a padding nor an end "
                    "token; set its pad_token."
                )
            tokenizer.pad_token = tokenizer.eos_token
        # The model reads the logit at the last token that is not padding, and finds it by this id.
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._longest = longest_context(config)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        ids = self.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        longest = max(len(sequence) for sequence in ids)
        if self._longest.num_tokens is not None and longest > self._longest.num_tokens:
            raise ValueError(
                f"Prompt and completion are {longest} tokens together, but the reward model "
                f"{self.__name__!r} reads {self._longest.num_tokens} ({self._longest.reason}). Lower "
                "max_completion_length, or choose one with a longer context."
            )
        order = sorted(
            range(len(ids)), key=lambda i: len(ids[i])
        )  # neighbours of like length need little padding
        rewards = torch.empty(len(ids))
        for start in range(0, len(order), BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            rewards[chosen] = self._score([ids[i] for i in chosen])
        return rewards.tolist()

    def _text(self, prompt: Any, completion: Any) -> str:
        if not is_conversational(prompt):
            return prompt + completion
        messages = prompt + completion
        arguments = self._chat_template_kwargs
        if is_continued(prompt, arguments):
            whole = f"{prompt[-1]['content']}{completion[0]['content']}"
            messages = [*prompt[:-1], {**prompt[-1], "content": whole}, *completion[1:]]
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, **without_continuing(arguments))
        )

    @torch.inference_mode()
    def _score(self, ids: list[list[int]]) -> Tensor:
        """[B] rewards of B token sequences."""
        inputs = self.tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
        device = next(self.model.parameters()).device
        return self.model(**inputs.to(device)).logits[:, 0].float().cpu()
