"""Facts about transformers' optimizers by their names in `optim`, without importing any of them."""

from __future__ import annotations

_IN_BACKWARD = (
    "it steps inside the backward pass, before gradients are added up in float32, reduced over the processes "
    "and clipped"
)
_OTHER_WEIGHTS = (
    "it evaluates and saves other weights than it trains, and the engine has only the trainer's; an ordinary "
    "optimizer with lr_scheduler_type='constant' comes closest"
)
_OTHER_HARDWARE = "it is for hardware that this version does not run on"

REFUSED_OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(("lomo", "adalomo"), _IN_BACKWARD),
    **dict.fromkeys(
        (
            *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
            "apollo_adamw_layerwise",
        ),
        _IN_BACKWARD,
    ),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _OTHER_WEIGHTS),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), _OTHER_HARDWARE),
}
"""The names in `optim` that are refused, each with the reason."""

LOW_RANK = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
"""Optimizers that project the gradients of `optim_target_modules` to a low rank."""

_PAGED = (
    *("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
    *("paged_lion_32bit", "paged_lion_8bit"),
)
_NEEDS_MEMORY = (
    *("adafactor", "adagrad", "rmsprop", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit"),
    *("grokadamw", "stable_adamw", *LOW_RANK),
)

OPTIMIZERS: tuple[str, ...] = (
    *("adamw_torch_fused", "adamw_torch", "adamw_bnb_8bit", "adamw_8bit", "sgd"),
    *("lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
    *_PAGED,
    *_NEEDS_MEMORY,
)

WHOLE_MATRIX = ("adafactor", "grokadamw", *LOW_RANK)
"""Optimizers that need a whole matrix to step on any value in it: they use means of rows and columns, a
projection, or the norm of the matrix's gradient. Ranks that hold only some of its rows cannot run them."""

_GALORE_ARGUMENTS = ("rank", "update_proj_gap", "scale", "proj_type")
_LOW_BIT_ARGUMENTS = ("block_size", "bf16_stochastic_round")
_ADEMAMIX_ARGUMENTS = ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3")
_RMSPROP_ARGUMENTS = ("alpha", "eps", "momentum", "centered")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    **dict.fromkeys(("rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), _RMSPROP_ARGUMENTS),
    **dict.fromkeys((name for name in OPTIMIZERS if "ademamix" in name), _ADEMAMIX_ARGUMENTS),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _LOW_BIT_ARGUMENTS),
    "adamw_anyprecision": (
        *("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype"),
    ),
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    **dict.fromkeys(LOW_RANK, _GALORE_ARGUMENTS),
    "apollo_adamw": (*_GALORE_ARGUMENTS, "proj", "scale_type"),
}
"""The arguments, by name in `optim`, that `optim_args` may hold; a name that is missing reads none."""


def check_optimizer(name: str, optim_args: str | None, target_modules: object) -> None:
    """Refuse optimizer options that transformers would ignore, or fail on in the middle of a run."""
    if not isinstance(optim_args, str | None):
        raise ValueError(f"optim_args={optim_args!r} must be text like 'momentum=0.9,nesterov=true'.")
    known = ARGUMENTS.get(name, ())
    for part in (optim_args or "").replace(" ", "").split(",") if optim_args else ():
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"optim_args={optim_args!r} must be a list like 'momentum=0.9,nesterov=true'.")
        if key not in known:
            can = f"it may set {', '.join(known)}" if known else "it reads none; remove optim_args"
            raise ValueError(
                f"optim_args={optim_args!r}: optim={name!r} does not read {key}: {can}. Learning rate, "
                "weight decay and Adam's betas and epsilon are options of their own."
            )
    if name in LOW_RANK and not target_modules:
        raise ValueError(
            f"optim={name!r} projects the gradients of some linear layers: name them in "
            "optim_target_modules, such as ['q_proj', 'down_proj'] or 'all-linear'."
        )
    if target_modules is not None and name not in LOW_RANK:
        raise ValueError(
            f"optim_target_modules={target_modules!r} is only read with optim={', '.join(LOW_RANK)}; "
            "remove it."
        )


def shortcomings(name: str) -> str | None:
    """A line on the limits of this optimizer in memory or checkpoints, compared with others; or None."""
    found = []
    if name in _NEEDS_MEMORY:
        found.append("needs memory to step, so that running out of it there ends the run")
    if name in _PAGED:
        found.append("keeps its state where the driver pages it: offload_optimizer leaves it there")
    if name in (*_NEEDS_MEMORY, *_PAGED):
        found.append("has state whose size the planner does not know, so that micro-batches have fixed sizes")
    if name in LOW_RANK:
        found.append(
            "keeps objects in its state that a checkpoint cannot hold, so that no run can be resumed"
        )
    return f"optim={name!r} " + "; it ".join(found) + "." if found else None
