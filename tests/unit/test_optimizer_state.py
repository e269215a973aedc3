"""The state of split optimizers by name, of bitsandbytes' in 8 bits above all."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainingArguments

from colocate.parallel.mesh import Mesh
from colocate.policy.optimizer.optimizer import PolicyOptimizer
from colocate.policy.optimizer.state import StatePlacement, read_state, shapes_of, tensors_of
from colocate.weights.weight_parts import UNSPLIT

bitsandbytes = pytest.importorskip("bitsandbytes")

ONE = Mesh(None)


@pytest.fixture
def mesh():
    """The mesh of the first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield Mesh.of("cpu")
    dist.destroy_process_group()


def policy_optimizer(optim: str, mesh: Mesh | None = None) -> PolicyOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 6)).bfloat16()
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], optim=optim)
    return PolicyOptimizer(model, args, 10, mesh=mesh)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_maps_of_8_bit_codes_are_known_by_their_values(is_loaded):
    """A parameter that is shaped as a map of 256 values is cut by rows; the map is not."""
    leaf = nn.Parameter(torch.linspace(-1, 1, 256))
    optimizer = bitsandbytes.optim.AdamW([leaf], optim_bits=8, min_8bit_size=1)
    leaf.grad = torch.linspace(1, 3, 256)
    optimizer.step()
    if is_loaded:  # with copies of the maps
        optimizer.load_state_dict(optimizer.state_dict())
    before = dict(optimizer.state[leaf])
    places = {"w": StatePlacement(ONE, leaf, UNSPLIT)}
    tensors = tensors_of(optimizer, {"w": leaf}, places, ONE)
    maps = {name: tensor for name, tensor in tensors.items() if name.startswith("maps/")}
    assert sorted(maps) == ["maps/w/qmap1", "maps/w/qmap2"]
    for name, is_signed in (("qmap1", True), ("qmap2", False)):
        table = bitsandbytes.functional.create_dynamic_map(signed=is_signed)
        assert torch.equal(maps[f"maps/w/{name}"], table)
    assert {"state/w/state1", "state/w/state2", "weights/w"} < tensors.keys()

    def read(targets):
        for name, target in targets.items():
            target.copy_(tensors[name])

    state = read_state({"w": leaf}, shapes_of(tensors), read, places, ONE)["w"]
    assert state.keys() == before.keys() - {"step"}
    for key, value in state.items():
        assert value.dtype == before[key].dtype and torch.equal(value, before[key]), key


def test_maps_are_saved_once_for_all_ranks(mesh):
    optimizer = policy_optimizer("adamw_bnb_8bit", mesh)
    for leaf in optimizer.leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    names = optimizer.tensors().keys()
    assert {name for name in names if "qmap" in name} == {"maps/0.weight/qmap1", "maps/0.weight/qmap2"}
    of_rank = {name for name in names if "@" in name}
    assert of_rank == {"state/0.weight/absmax1@0of2t1", "state/0.weight/absmax2@0of2t1"}


def test_blocks_are_read_by_the_rank_that_has_their_rows(mesh):
    """Two ranks with a part of the weights each have other rows than two with whole weights."""
    optimizer = policy_optimizer("adamw_bnb_8bit", mesh)
    for leaf in optimizer.leaves:
        leaf.grad = torch.linspace(1, 2, leaf.numel()).view_as(leaf)
    optimizer.step()
    tensors = optimizer.tensors()

    def read(targets):
        for name, target in targets.items():
            local, saved = (x.to_local() if isinstance(x, DTensor) else x for x in (target, tensors[name]))
            local.copy_(saved)

    again = policy_optimizer("adamw_bnb_8bit", mesh)
    again.load_tensors(shapes_of(tensors), read, optimizer.data())
    for ours, theirs in zip(again.leaves, optimizer.leaves, strict=True):
        state, expected = again.optimizer.state[ours], optimizer.optimizer.state[theirs]
        assert state.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(expected[k])) for k in expected)
    parts = policy_optimizer("adamw_bnb_8bit", Mesh.of("cpu", 2))
    message = r"absmax1.* saved with 2 processes and shard=1, and this run has 2 processes and shard=2"
    with pytest.raises(ValueError, match=message):
        parts.load_tensors(shapes_of(tensors), read, optimizer.data())


def test_whole_8_bit_state_is_not_taken_for_that_of_rows(mesh):
    """bitsandbytes hides 8-bit state from `state_dict`'s readers: 128 rows of it are not this rank's 64."""
    whole = policy_optimizer("adamw_bnb_8bit")
    whole.gradients()
    whole.step()
    split = policy_optimizer("adamw_bnb_8bit", mesh)
    weights = [leaf.detach().clone() for leaf in split.leaves]
    with pytest.raises(ValueError, match=r"absmax1.* saved with one process or shard='none', and this"):
        split.load_whole(whole.state_dict())
    assert all(map(torch.equal, split.leaves, weights))


def test_whole_state_without_blocks_is_cut_into_rows(mesh):
    whole = policy_optimizer("adamw_torch_fused")
    for number, leaf in enumerate(whole.leaves):
        leaf.grad = torch.linspace(1, 2 + number, leaf.numel()).view_as(leaf)
    whole.step()
    split = policy_optimizer("adamw_torch_fused", mesh)
    split.load_whole(whole.state_dict())
    for ours, theirs in zip(split.leaves, whole.leaves, strict=True):
        state, of_whole = split.optimizer.state[ours], whole.optimizer.state[theirs]
        rows = slice(0, -(-len(theirs) // 2))
        assert torch.equal(ours, theirs[rows])
        assert torch.equal(state["exp_avg_sq"], of_whole["exp_avg_sq"][rows])
