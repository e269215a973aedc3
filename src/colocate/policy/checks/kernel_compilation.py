"""The kernels of a training step, compiled side by side before the first of them is launched."""

from __future__ import annotations

import torch
from torch import nn

from colocate.kernels.compile_ahead import can_compile_ahead, compiling
from colocate.policy.head.logprobs import token_logprobs
from colocate.policy.head.output_head import output_head
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.layer import LayerContext
from colocate.policy.stack.stack import DecoderStack
from colocate.types import Sample
from colocate.weights.layouts import layout_for

PROMPT_TOKENS = 4
COMPLETION_TOKENS = (6, 3)
"""Two completions of one prompt, as `check_stack` has them, so that cuDNN's graphs for them serve it, too."""


def compile_ahead(model: nn.Module) -> None:
    """Compile the kernels of a packed model's forward and backward pass, of layers, last norm and log-probs.

    Parameters, gradients and the random generators are as before when it returns. The backward pass runs in
    this thread, since kernels of other threads are launched. A model that holds a part of its weights would
    need the other ranks for a pass; its kernels are compiled as they are needed.
    """
    layout = layout_for(model)
    if layout.part.count > 1 or not can_compile_ahead(layout.device):
        return
    devices = [layout.device] if layout.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        compiling(layout.device),
    ):
        _run_once(DecoderStack(model, HostActivations()), model)


def _run_once(stack: DecoderStack, model: nn.Module) -> None:
    """One forward and backward pass through one layer of each window, whose numbers mean nothing."""
    layout = layout_for(model)
    prompt = torch.zeros(PROMPT_TOKENS, dtype=torch.long, device=layout.device)
    samples = [
        Sample(prompt, prompt.new_zeros(n), torch.ones(n), advantage=0.0, prompt_key=0)
        for n in COMPLETION_TOKENS
    ]
    pack = stack.pack(samples)
    x = stack.embedded(pack).detach().requires_grad_()
    context = LayerContext(pack, stack.rotary_tables(x, pack), "keep")
    states = x
    for index in {layer.sliding_window: index for index, layer in enumerate(layout.layers)}.values():
        states = stack.after_layer(index, states, context)
    hidden, head = stack.last_states(states, pack), output_head(model)
    targets = torch.cat([sample.completion_ids for sample in samples])
    logprobs = [
        token_logprobs(hidden, targets, head, entropy_gradient=False, keep_softmax=keeps)[0]
        for keeps in (True, False)  # the plan chooses, and may change
    ]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(torch.cat(logprobs).sum(), [x, *trained], allow_unused=True)
