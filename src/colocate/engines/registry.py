"""The rollout engines by name, and the facts that a run needs of one before it is loaded.

An engine plugs in by one `Engine`: here, or in another distribution as an entry point of the group
`colocate.engines`. It is data: the modules that it names are imported when a run has chosen the engine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from colocate.engines.base import RolloutEngine
    from colocate.memory.workload import VLLMDemand
    from colocate.parallel.mesh import Mesh
    from colocate.types import SamplingParams

logger = logging.getLogger(__name__)

ENTRY_POINTS = "colocate.engines"
_UNREAD = "only that engine reads it; set engine={!r} to generate with it"


@dataclass(frozen=True)
class EngineParts:
    """The parts of a run from which its engine is made.

    Attributes:
        model: the policy, possibly inside a PEFT wrapper, on the device to use.
        options: the engine's own record.
        sampling: how training's completions will be drawn.
        generate_kwargs: arguments that only transformers' `model.generate` knows.
        mesh: which ranks share one copy of the weights; None: each rank has one.
        reserve_bytes: device memory that training will still take and keep during rollouts.
        num_seqs: the most completions that this rank asks for at a time.
    """

    model: nn.Module
    options: Any
    accelerator: Accelerator
    sampling: SamplingParams
    generate_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None
    output_dir: str = "."
    trust_remote_code: bool = False
    reserve_bytes: int = 0
    num_seqs: int = 1


@dataclass(frozen=True)
class Engine:
    """An engine as data.

    Attributes:
        name: the value of the option `engine` that chooses it.
        build: "module:function" of the function that makes it, asleep, from `EngineParts`.
        options: "module:class" of its options: a dataclass that extends `EngineOptions`, each field with its
            range beside it, which become options of a run. Those of another distribution's engine begin
            with its name ("mine_size"), and their module imports neither torch nor transformers.
        words: words for the engine in the header of a run.
        planned_as: the engine whose memory it takes: "native"; "vllm", for one with a cache of its own;
            "rollout_server", for one on other devices. None: its memory is unknown, and no run is planned.
        demand: "module:function" of the `VLLMDemand` of its options, if it is planned as vLLM and has options
            of its own for that.
        gpu_shares: how many processes share each rank's GPU in Ray's books: 2 for an engine whose workers
            Ray places beside the ranks.
        unread: the reason why its own options have no effect with another engine.
        replaced: options that it does not read, each with the one to set instead.
        asked_for_by: TRL's options that ask for this engine.
    """

    name: str
    build: str
    options: str
    words: str
    planned_as: Literal["native", "vllm", "rollout_server"] | None = None
    demand: str = ""
    gpu_shares: int = 1
    unread: str = ""
    replaced: Mapping[str, str] = field(default_factory=dict)
    asked_for_by: Sequence[str] = ()

    @property
    def record(self) -> type:
        """The class of its options."""
        return pkgutil.resolve_name(self.options)

    @property
    def own_options(self) -> Mapping[str, Any]:
        """The options that its record declares itself, with their annotations."""
        return inspect.get_annotations(self.record, eval_str=True)

    def make(self, parts: EngineParts) -> RolloutEngine:
        """Make the engine; it is asleep, and raises errors of its own."""
        return pkgutil.resolve_name(self.build)(parts)

    def demand_of(self, options: Any) -> VLLMDemand:
        """The memory that the engine takes with these options; only where `demand` says how."""
        return pkgutil.resolve_name(self.demand)(options)


_ON_SERVER = "{0} on the server's own command line (`colocate rollout-serve`; {0})"

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "native",
            build="colocate.engines.native.gathered_engine:build",
            options="colocate.engines.native.options:NativeOptions",
            words="native, which decodes on the trainer's own weights",
            planned_as="native",
        ),
        Engine(
            "vllm",
            build="colocate.engines.vllm.options:build",
            options="colocate.engines.vllm.options:VLLMOptions",
            words="vLLM in this process",
            planned_as="vllm",
            unread="only vLLM reads it; set engine='vllm' to generate with vLLM",
            replaced={
                "page_size": "vllm_engine_kwargs={'block_size': ...}",
                "kv_cache_tokens": "vllm_gpu_memory_utilization, or "
                "vllm_engine_kwargs={'kv_cache_memory_bytes': ...}",
            },
            asked_for_by=("use_vllm",),
        ),
        Engine(
            "rollout_server",
            build="colocate.rollout_server.options:build",
            options="colocate.rollout_server.options:ServerOptions",
            words="a rollout server",
            planned_as="rollout_server",
            unread="only a rollout server needs it; set engine='rollout_server' to generate with one",
            replaced={
                "page_size": _ON_SERVER.format("vLLM: -- --block-size"),
                "kv_cache_tokens": _ON_SERVER.format(
                    "native: --kv_cache_tokens, vLLM: -- --kv-cache-memory-bytes"
                ),
            },
            asked_for_by=("use_vllm", "vllm_mode"),
        ),
        Engine(
            "transformers",
            build="colocate.engines.transformers_engine:build",
            options="colocate.engines.options:EngineOptions",
            words="transformers' model.generate, which is slow",
            planned_as="native",
        ),
    )
}
"""The engines of this distribution, by name."""

OLDER_NAMES = {"vllm_server": "rollout_server"}
"""Names that the option `engine` takes, too, and the engines that they mean."""


@functools.cache
def plugged_in() -> dict[str, importlib.metadata.EntryPoint]:
    """The engines of other distributions by name; none of them takes a name that is here."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry for entry in found if entry.name not in {"auto", *ENGINES, *OLDER_NAMES}}


def engine_of(name: str) -> Engine:
    """The engine of a name that the option `engine` takes, "auto" aside.

    Raises:
        ImportError, AttributeError: the distribution that brings it is broken.
        KeyError: there is none.
        TypeError: its entry point is no `Engine` of this name.
    """
    if name in ENGINES:
        return ENGINES[name]
    engine = plugged_in()[name].load()
    if not isinstance(engine, Engine) or engine.name != name:
        raise TypeError(
            f"The entry point {name!r} of the group {ENTRY_POINTS!r} is {engine!r:.200}, where a "
            f"colocate.engines.registry.Engine named {name!r} is needed."
        )
    if foreign := [option for option in engine.own_options if not option.startswith(f"{name}_")]:
        raise TypeError(
            f"Options of the engine {name!r}, which another distribution brings, must begin with {name}_: "
            f"{', '.join(foreign)} would be other options of a run."
        )
    return engine


@functools.cache
def engines() -> dict[str, Engine]:
    """All engines by name, those here first. What another distribution brings that is broken is left out,
    with a warning."""
    found = dict(ENGINES)
    for name in plugged_in():
        try:
            engine = engine_of(name)
            found[name] = engine if engine.unread else replace(engine, unread=_UNREAD.format(name))
        except Exception as error:
            logger.warning(f"engine={name!r} cannot be chosen: {type(error).__name__}: {error}")
    return found


class _EngineNames(Sequence[str]):
    """The values of the option `engine`; other distributions are looked through only after those here."""

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def __len__(self) -> int:
        return len([*self])

    def __iter__(self) -> Iterator[str]:
        yield from ("auto", *ENGINES)
        yield from plugged_in()


ENGINE_CHOICES = _EngineNames()
