"""`PluggedInOptions`: the options of engines that other distributions bring, as a base class of a run's."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING

from colocate.engines.options import EngineOptions
from colocate.engines.registry import ENGINES, engines

if TYPE_CHECKING:
    PluggedInOptions = EngineOptions
else:
    _RECORDS = [engine.record for name, engine in engines().items() if name not in ENGINES]
    PluggedInOptions = make_dataclass(
        "PluggedInOptions", (), bases=(*_RECORDS, EngineOptions), namespace={"__module__": __name__}
    )
