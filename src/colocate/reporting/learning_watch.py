"""Warnings that a run learns nothing, each given once, with an example and where to look."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from colocate.reporting.completions import CompletionTable, as_text

NUM_ROLLOUTS, NUM_COMPLETIONS = 5, 32
"""Rollouts in a row, and completions in them, that a symptom must last: small rollouts are often all alike by
chance."""
NUM_UNREWARDED = 4
"""Factor by which a single function may give nothing for longer while others do: a format takes time to be
found."""

MOSTLY_ALIKE = 0.9
"""The share of prompts without a signal from which on the few others decide where the weights go."""

_PENALTIES = ("penalty", "punish")
_NUM_SHOWN = 160


@dataclass
class LearningWatch:
    """A search in each rollout for symptoms that training is pointless.

    A symptom that has lasted long enough makes one warning in the whole run; it may come back unmentioned.
    """

    forms: Mapping[str, str] = field(default_factory=dict)
    """The forms that reward functions look for in a completion, by the functions' names."""
    _lasting: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rollouts in a row that had each symptom, and the completions in these."""
    _said: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        """The duration of each symptom, and which have been told."""
        return {
            "lasting": {name: list(counts) for name, counts in self._lasting.items()},
            "said": [*self._said],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the `state_dict` of an earlier part of the run; of an empty one, from nothing."""
        self._lasting = {name: (counts[0], counts[1]) for name, counts in state.get("lasting", {}).items()}
        self._said = set(state.get("said", ()))

    def look(self, metrics: Mapping[str, float], table: CompletionTable) -> list[str]:
        """The warnings that a rollout gives reason for.

        Args:
            metrics: the metrics of the rollout, under the names that they are logged with.
            table: its completions, over all ranks.
        """
        found = dict(_symptoms(metrics, table, self.forms))
        warnings = []
        for symptom in self._lasting.keys() - found.keys():
            del self._lasting[symptom]
        for symptom, text in found.items():
            rollouts, completions = self._lasting.get(symptom, (0, 0))
            rollouts, completions = rollouts + 1, completions + len(table.prompts)
            self._lasting[symptom] = rollouts, completions
            factor = NUM_UNREWARDED if symptom.startswith("unrewarded ") else 1
            is_long = rollouts >= factor * NUM_ROLLOUTS and completions >= factor * NUM_COMPLETIONS
            if is_long and symptom not in self._said:
                self._said.add(symptom)
                lasted = f"For {rollouts} rollouts ({completions:,} completions) {text}"
                warnings.append(f"{lasted}\n{_sample(table)}")
        return warnings

    def look_at_step(self, metrics: Mapping[str, float], *, has_advantages: bool) -> list[str]:
        """The warnings that an optimizer step gives reason for.

        Args:
            metrics: the metrics of the step.
            has_advantages: whether it had tokens with an advantage other than 0.
        """
        is_zero = metrics["grad_norm"] == 0 and not metrics.get("skipped_updates", 0.0)
        if not (is_zero and has_advantages) or "zero gradient" in self._said:
            return []
        self._said.add("zero gradient")
        return [_zero_gradient(metrics)]


def _zero_gradient(metrics: Mapping[str, float]) -> str:
    """Say that nothing was learned from a step that had advantages, and why that may be."""
    if metrics.get("sampling/importance_sampling_ratio/max") == 0:
        cause = (
            "The importance-sampling correction has given every completion the weight 0: policy and engine "
            "differ by more than vllm_importance_sampling_clip_max allows "
            "(sampling/sampling_logp_difference/mean is "
            f"{metrics.get('sampling/sampling_logp_difference/mean', math.nan):.3g} nats per token). See "
            "whether the engine has the run's weights and precision."
        )
    elif metrics.get("clip_ratio/region_mean", 0.0) >= 1:
        cause = "Every token's ratio is clipped (clip_ratio/region_mean): lower learning_rate."
    else:
        cause = (
            "The parameters that are trained may have no part in the log-probs: an adapter that the model's "
            "forward pass goes around, tokens that did not occur (trainable_token_indices), experts that "
            "were not reached, or a layer that lets no gradient through. See whether a plain LoRA has one."
        )
    return (
        "The gradient of this step is exactly 0, although its advantages are not: nothing was learned from "
        f"it. {cause}"
    )


def _symptoms(
    metrics: Mapping[str, float], table: CompletionTable, forms: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The symptoms of a rollout, each a name and a sentence with the most specific cause."""
    if metrics.get("completions/clipped_ratio", 0.0) >= 1:
        yield (
            "truncated",
            "every completion was cut off at max_completion_length, before its end. Raise it if the "
            "completion below is still at work; if it goes on after its answer, the model does not end its "
            "turn: see whether its chat template is applied (apply_chat_template).",
        )
    if metrics.get("tools/failure_frequency", 0.0) >= 1:
        yield (
            "failing tools",
            "every call of a tool failed, so the model learns not to call. In place of an answer it has last "
            f"read {_read_last(table)}. Call the tool by hand with arguments like those that the model "
            "gives.",
        )
    nothing = [name for name, rewards in table.rewards.items() if all(_is_nothing(r) for r in rewards)]
    if len(nothing) == len(table.rewards):
        yield (
            "nothing",
            f"every reward was 0 or None, so there is nothing to learn from. {_wanted(table.rewards, forms)}"
            "See whether the prompt asks for that, and whether the model ever does it; an easier task or a "
            "reward for partial success gives it a beginning.",
        )
        return
    alike = metrics.get("frac_reward_zero_std", 0.0)
    if alike >= 1:
        yield (
            "alike",
            "all completions of each prompt had the same reward, so no advantage differs from 0 and the "
            f"weights are not moved by rewards. The means are {_means(table)}. Rewards that are all high "
            "call for harder prompts, rewards that are all low for easier ones; a reward in steps tells more "
            "completions apart.",
        )
    elif alike >= MOSTLY_ALIKE:
        yield (
            "mostly alike",
            f"at least {MOSTLY_ALIKE:.0%} of the prompts had completions that all earned the same. The few "
            "others make the gradient, and Adam, which divides by its size, makes of it steps as large as "
            f"before: a good model can become worse. The means are {_means(table)}. If they are high, end "
            "here, or let the learning rate fall (lr_scheduler_type); load_best_model_at_end keeps the best "
            "weights. If they are low, easier prompts teach more; max_refill_rounds replaces those that "
            "teach nothing.",
        )
    for name in nothing:
        if not any(word in name for word in _PENALTIES):
            yield (
                f"unrewarded {name}",
                f"the reward function {name} gave 0 or None to every completion, while others gave more. "
                f"{_wanted([name], forms)}What is never done is never rewarded: see whether the prompt "
                "asks for it, or show an example there. If the function only punishes, this is well.",
            )


def _read_last(table: CompletionTable) -> str:
    """The content of the last tool's message, in one line."""
    messages = [m for turns in table.completions if isinstance(turns, list) for m in turns]
    read = [as_text(m.get("content")) for m in messages if m.get("role") == "tool"]
    return " ".join(read[-1].split())[:_NUM_SHOWN] if read else "nothing"


def _is_nothing(reward: float) -> bool:
    return reward == 0 or math.isnan(reward)


def _wanted(names: Iterable[str], forms: Mapping[str, str]) -> str:
    """Sentences about the forms that these functions look for, as far as they are known."""
    return " ".join([*(f"{name} looks for {forms[name]}." for name in names if name in forms), ""])


def _means(table: CompletionTable) -> str:
    known = {name: [r for r in rewards if not math.isnan(r)] for name, rewards in table.rewards.items()}
    return ", ".join(
        f"{name} {sum(rewards) / len(rewards):.3g}" if rewards else f"{name} None"
        for name, rewards in known.items()
    )


def _sample(table: CompletionTable) -> str:
    rewards = ", ".join(
        f"{name} {'None' if math.isnan(values[0]) else f'{values[0]:g}'}"
        for name, values in table.rewards.items()
    )
    return (
        f"  prompt      … {_end(as_text(table.prompts[0]))}\n"
        f"  completion  … {_end(as_text(table.completions[0]))}\n"
        f"  rewards     {rewards}"
    )


def _end(text: str) -> str:
    """The end of a text in one line: the question is there, and the answer."""
    return " ".join(text.split())[-_NUM_SHOWN:]
