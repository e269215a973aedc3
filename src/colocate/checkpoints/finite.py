"""Weights that are not finite: never saved over good ones, never evaluated as if nothing was wrong."""

from __future__ import annotations

from typing import Any

from colocate.checkpoints.sealed import list_checkpoints

_SUSPECTS = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
"""Options that make weights not finite although loss and gradient are."""


def check_finite_weights(policy: Any, args: Any, doing: str) -> None:
    """Look before it is too late; reads every weight once and waits for the device.

    Args:
        policy: asked for `find_nonfinite_weight()`.
        doing: what will not be done, as a noun.

    Raises:
        FloatingPointError: a weight is NaN or infinite.
    """
    name = policy.find_nonfinite_weight()
    if name is None:
        return
    checkpoints = list_checkpoints(args.run_dir)
    suspects = ", ".join(f"{option}={getattr(args, option)}" for option in _SUSPECTS)
    raise FloatingPointError(
        f"No {doing}: the weights are not finite ({name} for one). An optimizer step can make them so though "
        f"its loss and gradient are finite; this run has {suspects}. Lower learning_rate, raise adam_epsilon "
        "or set max_grad_norm to a positive number. "
        + (
            f"The last checkpoint is {checkpoints[-1]}: go on from it with resume_from_checkpoint=True."
            if checkpoints
            else f"{args.run_dir} holds no checkpoint, so the run has to begin again."
        )
    )
