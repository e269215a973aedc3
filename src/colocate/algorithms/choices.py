"""Which names the options accept, and the error for one that is not among them."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from colocate.option_values import shown

SEQUENCE_MEAN_LOSSES = ("grpo", "sapo")
STEP_MEAN_LOSSES = ("dapo", "cispo", "vespo")
CLIPPED_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
LOSS_TYPES = (*CLIPPED_LOSSES, "cispo", "sapo", "vespo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REWARD_SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def check_choice(option: str, value: object, choices: Collection[str]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        ValueError: with every valid value, and the nearest one if the value looks like a slip of the pen.
    """
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value)[:100], choices, n=1)
    suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{option}={shown(value)} is unknown; it is one of {', '.join(choices)}.{suggestion}")
