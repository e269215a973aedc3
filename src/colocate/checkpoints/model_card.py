"""The model card, `README.md`, of each directory with a saved model: its origin and how to load it.

Its metadata has the keys of TRL's cards, which the Hub reads. Facts that may be private stay out: paths,
addresses, prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

CARD = "README.md"
TAGS = ("generated_from_trainer", "colocate", "grpo")
_PRIVATE = ("dir", "path", "url", "host", "port", "hub_", "run_name", "token")
"""Parts of option names whose values tell where a run was, which is private."""
_NOT_OF_TRAINING = (
    *("logging", "save", "report", "disable", "debug", "dataloader", "use_cpu", "eval_on", "pad_to"),
)
"""Beginnings of the names of options that change no weight."""
_PAPER = "https://arxiv.org/abs/2402.03300"
_SHOWN_METRICS = (
    *("reward", "eval_reward", "completions/mean_length", "completions/clipped_ratio", "kl", "entropy"),
)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about a run, for its card.

    Attributes:
        base_model: the model that training started from, as it was named.
        dataset: its name, as given. options: those that were set, without secrets.
        metrics: the last that were logged.
        steps: the progress, such as "step 100 of 200".
        commit: of the repository that the run was in; None: it was in none.
    """

    base_model: str | None
    dataset: str | None
    rewards: Sequence[str]
    options: Mapping[str, Any]
    metrics: Mapping[str, float]
    steps: str
    commit: str | None
    is_adapter: bool
    versions: Mapping[str, str | None] = field(default_factory=dict)


def write_card(
    directory: Path,
    facts: TrainingFacts,
    *,
    name: str,
    dataset_name: str | None = None,
    tags: str | Sequence[str] | None = None,
) -> None:
    """Write the card of a model.

    Args:
        name: its title, and the name by which the card loads it.
        dataset_name: the dataset's name on the Hub, in place of that of `facts`.
        tags: more tags.
    """
    base, dataset = _on_hub(facts.base_model), dataset_name or _on_hub(facts.dataset)
    own_tags = [tags] if isinstance(tags, str) else list(tags or ())
    data = ModelCardData(
        base_model=base,
        datasets=[dataset] if dataset else None,
        library_name="peft" if facts.is_adapter else "transformers",
        licence="license",
        model_name=name,
        tags=sorted({*own_tags, *TAGS, *(["lora"] if facts.is_adapter else [])}),
    )
    sections = (
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        _origin(facts, base, dataset),
        _use(facts, base, name),
    )
    text = "\n\n".join((*sections, _training(facts), _results(facts), _versions(facts)))
    ModelCard(text.rstrip() + "\n").save(directory / CARD)


def write_merged_card(adapter: Path, directory: Path, name: str) -> None:
    """Write the card of a model that an adapter was merged into. It keeps the adapter's account of the
    training, if there is one, but not how to load the adapter."""
    source = adapter / CARD
    if not source.is_file():
        return
    card = ModelCard.load(source)
    card.data.library_name, card.data.model_name = "transformers", name
    before, _, after = card.text.partition("## Use")
    _, _, after = after.partition("\n## ")
    use = f"The adapter is merged into the weights of this copy.\n\n{_whole(name)}"
    ModelCard(f"---\n{card.data.to_yaml()}\n---\n\n{before.strip()}\n\n{use}\n\n## {after}").save(
        directory / CARD
    )


def _on_hub(name: str | None) -> str | None:
    """The name, if it is one on the Hub; a path is private, and a generated task has no page."""
    if (
        not name
        or ":" in name
        or name.startswith((".", "/", "~"))
        or name.count("/") != 1
        or Path(name).exists()
    ):
        return None
    return name


def _origin(facts: TrainingFacts, base: str | None, dataset: str | None) -> str:
    what = "An adapter (LoRA)" if facts.is_adapter else "A model"
    start = f" for [{base}](https://huggingface.co/{base})" if base and facts.is_adapter else ""
    if base and not facts.is_adapter:
        start = f" that began as [{base}](https://huggingface.co/{base})"
    on = f" on [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    if not dataset and facts.dataset:
        on = f" on {Path(facts.dataset).name}"
    return f"{what}{start}, trained with GRPO ([arXiv 2402.03300]({_PAPER})){on} by colocate."


def _use(facts: TrainingFacts, base: str | None, name: str) -> str:
    if not facts.is_adapter:
        return _whole(name)
    below = base or "BASE_MODEL"
    return (
        "## Use\n\n```python\nfrom peft import AutoPeftModelForCausalLM\n"
        "from transformers import AutoTokenizer\n\n"
        f'model = AutoPeftModelForCausalLM.from_pretrained("{name}", dtype="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        f"```bash\ncolocate chat {name}\ncolocate merge {name} {name}-merged\n"
        f"vllm serve {below} --enable-lora --lora-modules trained={name}\n```"
    )


def _whole(name: str) -> str:
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n\n'
        f"```bash\ncolocate chat {name}\nvllm serve {name}\n```"
    )


def _training(facts: TrainingFacts) -> str:
    """The section on how it was trained, with the options that were set."""
    lines = ["## Training", "", f"- Progress: {facts.steps}", f"- Rewards: {', '.join(facts.rewards)}"]
    if facts.commit:
        lines.append(f"- Commit: `{facts.commit}`")
    shown = {
        name: value
        for name, value in facts.options.items()
        if value is not None
        and not any(part in name for part in _PRIVATE)
        and not name.startswith(_NOT_OF_TRAINING)
        and not _is_path(value)
    }
    if shown:
        lines += ["", "Options that were set or derived:", "", "| option | value |", "|---|---|"]
        lines += [
            f"| `{name}` | `{str(value).replace('|', chr(92) + '|')}` |" for name, value in shown.items()
        ]
    return "\n".join(lines)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("/", "~", "./", "../"))


def _results(facts: TrainingFacts) -> str:
    """The section with the last metrics, or an empty text if nothing was logged."""
    names = [name for name in _SHOWN_METRICS if name in facts.metrics]
    names += [name for name in facts.metrics if name.removeprefix("eval_").startswith("rewards/")]
    if not names:
        return "## Results\n\nNothing was logged yet."
    rows = (f"| `{name}` | {facts.metrics[name]:.4g} |" for name in names)
    return "\n".join(
        ["## Results", "", "The last values that were logged:", "", "| metric | value |", "|---|---|", *rows]
    )


def _versions(facts: TrainingFacts) -> str:
    known = [f"{name} {version}" for name, version in facts.versions.items() if version]
    return f"Versions: {', '.join(known)}."
