"""Checks before a model is loaded that the packages of the trackers in `report_to` are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

_PACKAGES = {
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "comet_ml": ("comet_ml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "flyte": ("flytekit",),
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
_HINTS = {
    "tensorboard": "pip install 'tensorboard>=2.18'",
    "trackio": "pip install 'trackio>=0.2'",
    "wandb": "pip install 'wandb>=0.19'",
}


def check_installed(report_to: str | Iterable[str] | None) -> None:
    """Refuse a tracker whose package is missing.

    Args:
        report_to: the name of a tracker, several of them in a list or with commas between them, or None.
            Names that transformers does not know are not checked here.
    """
    texts = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in ",".join(texts).split(","):
        name = name.strip(" []'\"")
        packages = _PACKAGES.get(name, ())
        if packages and not any(_is_installed(package) for package in packages):
            hint = _HINTS.get(name, f"pip install {packages[0]}")
            raise ImportError(f"report_to={name!r} needs the package {packages[0]}: {hint}")


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A directory without code is none, such as the ./wandb that earlier runs have left.
    return spec is not None and spec.origin is not None
