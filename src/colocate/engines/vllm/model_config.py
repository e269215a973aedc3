"""The model's configuration where vLLM reads it: on disk, without weights."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def config_directory(base: Any) -> Path:
    """A directory with the model's configuration and nothing else, which vLLM takes for the model.

    Its name is a hash of what is in it: vLLM's cache of compiled models goes by the model's path, and would
    never be found again under a path that is new in each run.
    """
    config = type(base.config).from_dict(base.config.to_dict())
    # Weights arrive dequantised. An unset architecture is one that was never saved.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(base).__name__]
    text = config.to_json_string(use_diff=False)
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    root = _private_root()
    directory = root / name
    if not (directory / "config.json").is_file():
        new = Path(tempfile.mkdtemp(dir=root))
        config.save_pretrained(new)
        try:
            new.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return directory


def _private_root() -> Path:
    """A directory that nobody else can have filled: vLLM takes its files for the model's."""
    root = Path(tempfile.gettempdir()) / f"colocate-vllm-{os.getuid()}"
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return root
    fresh = Path(tempfile.mkdtemp(prefix="colocate-vllm-"))
    atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    logger.warning(
        f"{root} is not a directory of this user's that nobody else can enter (it is uid {status.st_uid}'s, "
        f"mode {stat.S_IMODE(status.st_mode):04o}); {fresh} is used instead, and vLLM's cache of compiled "
        "models is of no use. Remove it."
    )
    return fresh
