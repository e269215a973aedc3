"""The model's configuration where vLLM reads it: on disk, without weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any


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
    root = Path(tempfile.gettempdir()) / f"colocate-vllm-{os.getuid()}"
    directory = root / name
    if not (directory / "config.json").is_file():
        root.mkdir(mode=0o700, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=root))
        config.save_pretrained(new)
        try:
            new.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(new)
    return directory
