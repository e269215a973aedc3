"""An optimizer's hyperparameters, and how a resumed run takes over them and the schedule."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's hyperparameters that can be compared: numbers, switches, betas."""

    def comparable(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    simple = (bool, int, float, str, tuple, type(None))
    return [
        {
            name: comparable(value)
            for name, value in group.items()
            if name != "params" and isinstance(comparable(value), simple)
        }
        for group in optimizer.param_groups
    ]


def changed_since(
    saved: list[dict[str, Any]], now: list[dict[str, Any]], scheduler: LRScheduler
) -> list[dict[str, Any]]:
    """Each parameter group's hyperparameters of `now` that differ from the saved ones."""
    changed = [
        {name: value for name, value in new.items() if name in was and was[name] != value}
        for was, new in zip(saved, now, strict=True)
    ]
    if any("lr" in values for values in changed) and not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"The learning rate was {[was['lr'] for was in saved]} when the checkpoint was written "
            f"and is {[new['lr'] for new in now]} now, but "
            f"{type(scheduler).__name__} derives each rate from the one before. Go back to the "
            "former, or leave the scheduler in `optimizers` out and choose one by lr_scheduler_type."
        )
    return changed


def restore_schedule(optimizer: Optimizer, scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    """Take over the saved schedule's position; rates follow from it and this run's own base and schedule."""
    if not isinstance(scheduler, LambdaLR):
        scheduler.load_state_dict(saved)
        return
    bases = scheduler.base_lrs
    scheduler.load_state_dict(saved)
    scheduler.base_lrs = bases
    rates = [
        base * factor(scheduler.last_epoch) for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)
    ]
    scheduler._last_lr = rates
    for group, base, rate in zip(optimizer.param_groups, bases, rates, strict=True):
        group["initial_lr"] = base
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
