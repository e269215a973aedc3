"""A check that weights are finite, before they are saved or evaluated."""

from __future__ import annotations

from typing import Any

from colocate.checkpoints.sealed import list_checkpoints

_SUSPECTS = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
"""Options that can make weights infinite or NaN although loss and gradient are finite."""


def check_finite_weights(policy: Any, args: Any, doing: str) -> None:
    """Raise if a weight is not finite. This reads every weight once and waits for the device.

    Args:
        policy: has `find_nonfinite_weight()`.
        doing: the action that the check comes before, as a noun for the message.
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
