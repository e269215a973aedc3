"""The record of a run: the parts that training is made of, all of them finished. It has no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from colocate.algorithms.entropy import EntropyController
from colocate.algorithms.objective import Objective
from colocate.checkpoints.best import BestCheckpoint
from colocate.config.grpo_config import GRPOConfig
from colocate.data.sampler import PromptBatches
from colocate.data.splits import EvalDataset, TrainDataset
from colocate.engines.base import RolloutEngine
from colocate.experience.agreement import Agreement
from colocate.experience.judge import Judge
from colocate.experience.players.play import Player
from colocate.experience.requests import RequestBuilder
from colocate.experience.select import Selector
from colocate.experience.window import TrainingWindow
from colocate.memory.handover import Handover
from colocate.memory.sleeping import SleepingWeights
from colocate.memory.timeline import Timeline
from colocate.parallel.mesh import Mesh
from colocate.policy.policy import Policy
from colocate.reporting.journal import Journal
from colocate.run.identity import RunIdentity
from colocate.run.playing import Playing
from colocate.weights.layouts import causal_lm
from colocate.weights.weight_parts import sizes_of


@dataclass(frozen=True)
class Run:
    """The parts that `build_run` makes from a configuration and that `loop.train` trains with."""

    args: GRPOConfig
    accelerator: Accelerator
    mesh: Mesh
    tokenizer: PreTrainedTokenizerBase
    train_dataset: TrainDataset
    eval_dataset: EvalDataset | None
    playing: Playing

    # From prompts to optimizer steps, in the order in which a step comes by.
    batches: PromptBatches
    requests: RequestBuilder
    engine: RolloutEngine
    player: Player
    judge: Judge
    selector: Selector
    window: TrainingWindow
    policy: Policy
    objective: Objective
    entropy: EntropyController

    # What watches over it.
    agreement: Agreement
    handover: Handover
    scorers: SleepingWeights
    timeline: Timeline
    journal: Journal
    best: BestCheckpoint
    identity: RunIdentity

    @property
    def model(self) -> Any:
        """The model being trained, within its adapter's wrapper if it has one."""
        return self.policy.model

    def description(self) -> dict[str, Any]:
        """The contents of `run.json` besides versions."""
        lm = causal_lm(self.model)
        return {
            "model": lm.config.name_or_path or type(lm).__name__,
            "num_parameters": sum(sizes_of(self.model).values()),
            "engine": type(self.engine).__name__,
            "dataset": getattr(self.train_dataset.info, "dataset_name", None),
            "device": f"{self.accelerator.num_processes} x {self.accelerator.device.type}",
        }
