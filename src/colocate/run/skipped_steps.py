"""Steps whose loss or gradient was not finite: their samples are kept, and too many of them in a row end a
run."""

from __future__ import annotations

import json
import logging

from torch import Tensor

from colocate.checkpoints.sealed import check_finite_weights
from colocate.policy.policy import UpdateResult
from colocate.run.record import Run
from colocate.types import Sample

logger = logging.getLogger(__name__)


def keep_skipped_step(run: Run, samples: list[Sample], update: UpdateResult) -> None:
    """Write the samples of a step that was skipped into `output_dir`."""
    args, step = run.args, run.journal.state.global_step
    check_finite_weights(run.policy, args, "further step")
    file = args.run_dir / f"skipped_step_{step}_rank{run.accelerator.process_index}.jsonl"
    decode = run.tokenizer.decode
    with file.open("w") as stream:
        for sample, logprobs in zip(samples, update.logprobs, strict=True):
            advantage = sample.advantage
            record = {
                "prompt": decode(sample.prompt_ids),
                "completion": decode(sample.completion_ids),
                "advantage": advantage.tolist() if isinstance(advantage, Tensor) else advantage,
                "is_finite": bool(logprobs.isfinite().all()),
            }
            stream.write(json.dumps(record) + "\n")
    logger.warning(f"Step {step} was skipped: loss or gradient not finite. See {file}.")
    num_skipped = run.policy.num_skipped_updates
    if num_skipped >= args.max_skipped_steps:
        raise FloatingPointError(
            f"{num_skipped} steps in a row had a loss or gradient that is not finite and were "
            f"skipped (max_skipped_steps={args.max_skipped_steps}). Their prompts are in {file} and "
            "its neighbours; the weights are those of the last good step. Lower learning_rate or "
            "max_grad_norm, or look for extreme log-probs in those files."
        )
