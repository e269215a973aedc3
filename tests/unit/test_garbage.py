"""What lives through a run is left out of searches for garbage while it trains, and only then."""

from __future__ import annotations

import gc
import weakref

import pytest
from transformers import TrainerCallback

from colocate.memory import garbage
from tiny import make_trainer

pytestmark = pytest.mark.usefixtures("all_garbage_is_found")


class Cycle:
    def __init__(self):
        self.me = self


def dead_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def num_looked_through() -> int:
    """Objects that a full search would look through."""
    return len(gc.get_objects())


def test_lasting_objects_are_left_out_and_searched_again_afterwards():
    lasting, before, garbage_of_before = Cycle(), num_looked_through(), dead_cycle()
    kept = weakref.ref(lasting)
    with garbage.lasting_objects_left_out():
        assert garbage_of_before() is None and num_looked_through() < before / 10
        fresh = dead_cycle()
        del lasting
        gc.collect()
        assert fresh() is None and kept() is not None
        garbage.collect()  # as before memory is given back to the device
        assert kept() is None and num_looked_through() < before / 10
    assert num_looked_through() > before / 2


def test_they_are_searched_after_an_error():
    before = num_looked_through()
    with pytest.raises(RuntimeError), garbage.lasting_objects_left_out():
        raise RuntimeError
    assert num_looked_through() > before / 2
    left_out = gc.get_freeze_count()
    garbage.collect()
    assert gc.get_freeze_count() == left_out == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_searched_quickly_while_it_trains_and_freed_afterwards(fails, tmp_path):
    before, seen = num_looked_through(), []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(num_looked_through())
            if fails:
                raise RuntimeError("a callback's")

    trainer = make_trainer(tmp_path, max_steps=2, callbacks=[Watch()])
    model = weakref.ref(trainer.model)
    if fails:
        with pytest.raises(RuntimeError, match="a callback's"):
            trainer.train()
    else:
        trainer.train()
    assert len(seen) == 2 - fails and max(seen) < before / 4
    assert gc.get_freeze_count() == 0
    del trainer
    garbage.collect()
    assert model() is None
