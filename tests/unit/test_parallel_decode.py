"""What ranks that decode together agree on, as far as one process can say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_models import make_model
from peft import LoraConfig, get_peft_model

from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.footprint import engine_rows, rollout_rows
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.tensor_parallel import Shortage, TensorParallel, joined_groups
from colocate.memory.workload import Sharding, Workload
from colocate.types import Prompt
from colocate.weights.layouts import WeightPart, layout_for
from colocate.weights.shapes import Lora, ModelShapes
from colocate.weights.weight_parts import split_weights


def test_a_shortage_that_no_other_rank_learns_of_is_not_tried_again():
    """`Recovery` repeats what ends with OutOfMemoryError; the other ranks would wait in another place."""
    ranks: Any = SimpleNamespace(num_parts=2, part=0)
    parallel = TensorParallel(ranks, torch.device("cpu"))

    def fails(error: Exception) -> None:
        raise error

    with pytest.raises(RuntimeError, match="a rollout of 2 ranks that wait for each other") as raised:
        parallel.together(lambda: fails(torch.OutOfMemoryError("here")))
    assert not isinstance(raised.value, torch.OutOfMemoryError)
    with pytest.raises(Shortage):
        parallel.together(lambda: fails(Shortage("on some rank")))


def test_after_a_shortage_nothing_is_tried_until_all_know():
    ranks: Any = SimpleNamespace(num_parts=2, part=0)
    parallel, done = TensorParallel(ranks, torch.device("cpu")), []

    def short() -> str:
        raise torch.OutOfMemoryError("here")

    assert parallel.attempt(lambda: "done", "nothing") == "done"
    assert parallel.attempt(short, "nothing") == "nothing"
    assert parallel.attempt(lambda: done.append(1), None) is None
    assert not done


def test_groups_that_ranks_share_are_put_together_again():
    first, second = Prompt((1, 2), 5, range(0, 3)), Prompt((1, 2), 5, range(3, 8), (4, 9, 9, 1, 2))
    others = [
        Prompt((1, 2), 6, range(8, 9)),
        Prompt((1, 3), 6, range(9, 10)),
        Prompt((1, 3), 6, range(11, 12)),
    ]
    joined = joined_groups([first, second, *others], max_tokens=9)
    assert joined == [Prompt((1, 2), 5, range(0, 8), (9, 9, 9, 4, 9, 9, 1, 2)), *others]


@pytest.mark.parametrize(
    ("targets", "num_whole", "partial"),
    [("all-linear", 5, ["hidden_size", "intermediate_size"]), (["v_proj", "o_proj"], 1, ["hidden_size"])],
)
def test_the_planned_copy_of_adapters_is_what_a_rank_takes(targets, num_whole, partial):
    """Of adapters that are loaded, and of those that the model will get. Rank 20 takes 32 rows."""
    base = make_model("llama-biases", vocab_size=98)
    planned_before = ModelShapes.of(base, lora=Lora(20, targets)).part(2)
    model = get_peft_model(base, LoraConfig(r=20, target_modules=targets))
    split_weights(model, WeightPart(1, 2))
    weights, layout = RolloutWeights(stacks_adapters=True), layout_for(model)
    weights.allocate(layout, is_copy=True)
    sizes = model.config
    inputs = num_whole * sizes.hidden_size + sum(getattr(sizes, name) // 2 for name in partial)
    assert weights.num_bytes == sizes.num_hidden_layers * 32 * inputs * 4
    workload = Workload(
        prompt_tokens=8, completion_tokens=8, parameter_dtype=torch.float32, sharding=Sharding(2, 2)
    )
    for shapes in (planned_before, ModelShapes.of(model).part(2)):
        rows = {row.name: row.size_bytes for row in rollout_rows(shapes, workload)[0]}
        assert rows["adapters beside weights"] == weights.num_bytes
        assert "adapters below weights" not in {row.name for row in engine_rows(shapes, workload)}


def test_a_part_of_the_weights_needs_the_ranks_of_all():
    model = make_model("llama-biases", vocab_size=98)
    split_weights(model, WeightPart(1, 2))
    with pytest.raises(ValueError, match=r"part 1 of 2 of its weights.*rank 0 of 1.*Pass as `group`"):
        NativeEngine(model)
