"""Engine and policy of a small model compile ahead what they launch afterwards, for a GPU that is not here.

    python rehearsal_worker.py CACHE FAMILY

Triton's driver is the stand-in of `absent_gpu.py`, so tensors are a CPU's and no kernel writes any.
"""

from __future__ import annotations

import json
import sys

import absent_gpu as stand_in
import torch
import triton
from engine_models import make_model
from triton.runtime import driver

from colocate.engines.native import decoder as decoders
from colocate.engines.native.decoder import Decoder
from colocate.engines.native.eight_bit_weights import EightBitWeights
from colocate.engines.native.kv_cache import KVCache
from colocate.engines.native.rollout_weights import RolloutWeights
from colocate.engines.native.scheduler import Prefill
from colocate.engines.native.triton_backend import TritonBackend
from colocate.kernels.train import operations
from colocate.policy.checks import kernel_compilation as rehearsal
from colocate.policy.head import logprobs
from colocate.policy.head.output_head import output_head
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.stack import DecoderStack
from colocate.types import Sample, SamplingParams
from colocate.weights.layouts import layout_for
from colocate.weights.shared_views import fuse_parameters


def num_compiled() -> int:
    return sum(map(len, stand_in.compiled.values()))


def rollout(model: torch.nn.Module) -> dict[str, int]:
    """How many kernels a rollout of 40 rows compiles ahead, and how many when they are needed."""
    layout, backend, before = layout_for(model), TritonBackend(), num_compiled()
    torch.cuda.graph_pool_handle = lambda: None  # nothing is captured here
    sizes = dict(num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim, page_size=16)
    scratch_bytes = backend.scratch_bytes(layout, 64)
    cache = KVCache(num_layers=len(layout.layers), scratch_bytes=scratch_bytes, **sizes)
    cache.allocate(16, layout.dtype, layout.device)
    fuse_parameters(layout, room_for_adapters=True)
    weights = RolloutWeights(stacks_adapters=True)
    weights.prepare(layout)
    decoder = Decoder(cache, weights, EightBitWeights(), backend, layout, max_num_seqs=40, max_len=64)
    decoder.start_rollout(SamplingParams(max_tokens=8))
    prefills = [Prefill(tuple(range(1, 33)), 0, (0, 1))]
    state = [tensor.clone() for tensor in decoder.batch.save()]
    decoder.compile_ahead(prefills, 40, has_prefixes=True)
    assert all(map(torch.equal, state, decoder.batch.save())), "the rows are as before"
    assert not backend.shares_prefixes and len(decoder.runner._layers) == len(layout.layers)
    num_ahead = num_compiled() - before
    assert not stand_in.launched, "a rehearsal launches nothing"
    decoder.runner.prefill(prefills)
    decoder.backend.sample(decoder._logits[:40], decoder._sampler, decoder.batch, slice(0, 40))
    for backend.shares_prefixes in (True, False):
        for bucket in (8, 32, 64):
            decoder._captured_step(bucket)
    assert stand_in.launched
    stand_in.launched.clear()
    return {"ahead": num_ahead, "as needed": num_compiled() - before - num_ahead}


def training(model: torch.nn.Module) -> dict[str, int]:
    """How many kernels a training step compiles ahead, and how many when they are needed."""
    operations._have_kernels = logprobs._runs_kernels = lambda *tensors: True
    before, generator = num_compiled(), torch.get_rng_state()
    weights = [parameter.clone() for parameter in model.parameters()]
    rehearsal.compile_ahead(model)
    assert all(map(torch.equal, weights, model.parameters())), "the weights are as before"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    num_ahead = num_compiled() - before
    assert not stand_in.launched, "a rehearsal launches nothing"
    step(model)
    return {"ahead": num_ahead, "as needed": num_compiled() - before - num_ahead}


def step(model: torch.nn.Module) -> None:
    """Forward and backward pass of longer samples than those of the rehearsal, which recompute the MLP and
    the logits."""
    stack = DecoderStack(model, HostActivations())
    prompt, ids = torch.arange(40), torch.arange(33)
    samples = [Sample(prompt, ids[:n], torch.ones(n), advantage=0.0, prompt_key=0) for n in (17, 33)]
    with torch.autograd.set_multithreading_enabled(False):
        hidden = stack.hidden_states(stack.pack(samples), "selective")
        targets, head = torch.cat([ids[:17], ids]), output_head(model)
        of_targets, _ = logprobs.token_logprobs(hidden, targets, head, entropy_gradient=False)
        of_targets.sum().backward()


def main(cache: str, family: str) -> None:
    triton.knobs.cache.dir = cache
    triton.knobs.compilation.listener = stand_in.note
    driver.set_active(stand_in.Driver(90))
    for module in (decoders, rehearsal):
        module.can_compile_ahead = lambda device: True
    model = make_model(family)
    with torch.inference_mode():
        of_rollout = rollout(model)
    print(json.dumps({"rollout": of_rollout, "training": training(model)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
