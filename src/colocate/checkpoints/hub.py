"""A trained model on the Hugging Face Hub: which files are uploaded, and where to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from colocate.weights.adapter_files import BASE_FILE

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", BASE_FILE)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *ADAPTER_FILES,
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
    *("modeling_*.py", "configuration_*.py", "tokenization_*.py"),  # of a model that brings its code
    *("training_args.bin", "README.md"),
)
"""Files that are uploaded: those that `from_pretrained` reads, the training arguments, and the card. Options,
metrics, and above all prompts and completions, which may be private, are not."""

LAST_CHECKPOINT = "last-checkpoint"
"""Folder of the repository that holds the newest checkpoint with hub_strategy="checkpoint"."""


def model_files(directory: Path, model: Any, tokenizer: Any) -> list[str]:
    """The files in a run's directory that make up its model, relative to it, in alphabetical order.

    Args:
        model: names its adapters; each one but the default one has a folder of its own.
        tokenizer: names the files of its vocabulary.
    """
    adapters = getattr(model, "peft_config", {})
    patterns = (
        *MODEL_FILES,
        *getattr(tokenizer, "vocab_files_names", {}).values(),
        *(f"{adapter}/{name}" for adapter in adapters for name in ADAPTER_FILES),
    )
    found = {file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}
    return sorted(file.relative_to(directory).as_posix() for file in found)


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub, made by its first upload if it does not exist.

    Args:
        name: id of the repository, or the part of it behind the user's name.
        token: token of a user who may write; None: the token of this machine's login.
        revision: branch to commit to; None: the main branch.
        private: whether a new repository is private; None: the default of the user or organization.
    """

    name: str
    token: str | None = None
    revision: str | None = None
    private: bool | None = None

    def upload_model(
        self, directory: Path, files: Collection[str], *, commit_message: str | None, blocking: bool = True
    ) -> Any:
        """Upload these files of a run's directory. Returns a future if not `blocking`."""
        return self._upload(
            directory, commit_message=commit_message, run_as_future=not blocking, allow_patterns=list(files)
        )

    def upload_checkpoint(self, directory: Path, *, folder: str, commit_message: str) -> None:
        """Upload a whole checkpoint into `folder`, so that a run can resume from it.

        It contains the optimizer's state, and prompts and completions that were not yet trained on.
        """
        self._upload(directory, commit_message=commit_message, run_as_future=False, path_in_repo=folder)

    def _upload(self, directory: Path, **options: Any) -> Any:
        api = HfApi(token=self.token)
        repository = api.create_repo(self.name, private=self.private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=repository, folder_path=directory, revision=self.revision, **options)


def repository_of(
    args: TrainingArguments,
    *,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
) -> Repository:
    """The repository that a run's options name; arguments given here override them."""
    return Repository(
        name=args.hub_model_id or Path(str(args.output_dir)).name,
        token=token or args.hub_token,
        revision=revision or args.hub_revision,
        private=args.hub_private_repo if private is None else private,
    )


def checkpoint_folder(hub_strategy: HubStrategy | str, directory: Path) -> str | None:
    """The folder of the repository for a checkpoint; None: checkpoints are not uploaded."""
    if hub_strategy == HubStrategy.CHECKPOINT:
        return LAST_CHECKPOINT
    return directory.name if hub_strategy == HubStrategy.ALL_CHECKPOINTS else None
