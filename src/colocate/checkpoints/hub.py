"""A trained model on the Hugging Face Hub: its card and its upload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, ModelCard, ModelCardData

import colocate

TAGS = ("colocate", "grpo")
IGNORED = ("checkpoint-*", "partial-*", "completions*", "skipped_step_*")
"""What stays at home: optimizer states, three times the model in size, and prompts, which may be private."""

_CARD = """---
{data}
---

# {name}

{origin}trained with GRPO ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300)){dataset}, by colocate.

Versions: colocate {colocate}, transformers {transformers}, torch {torch}.
"""


def write_model_card(
    directory: Path,
    *,
    base_model: str | None = None,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | Sequence[str] | None = None,
) -> None:
    """Write `README.md`.

    Args:
        base_model: id of the model that training started from; a directory is not named.
    """
    base_model = base_model if base_model and not Path(base_model).is_dir() else None
    own_tags = [tags] if isinstance(tags, str) else list(tags or ())
    data = ModelCardData(
        library_name="transformers",
        base_model=base_model,
        datasets=[dataset_name] if dataset_name else None,
        tags=sorted({*own_tags, *TAGS}),
    )
    text = _CARD.format(
        data=data.to_yaml(),
        name=model_name or directory.name,
        origin=f"[{base_model}](https://huggingface.co/{base_model}), " if base_model else "A model ",
        dataset=f" on [{dataset_name}](https://huggingface.co/datasets/{dataset_name})"
        if dataset_name
        else "",
        colocate=colocate.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )
    ModelCard(text).save(directory / "README.md")


def upload(
    directory: Path,
    *,
    name: str,
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
) -> Any:
    """Upload a directory to the repository `name`, made if there is none; a future if not `blocking`."""
    api = HfApi(token=token)
    repository = api.create_repo(name, private=private, exist_ok=True).repo_id
    return api.upload_folder(
        repo_id=repository,
        folder_path=directory,
        commit_message=commit_message,
        revision=revision,
        run_as_future=not blocking,  # type: ignore[call-overload]
        ignore_patterns=list(IGNORED),
    )
