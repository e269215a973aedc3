"""Compares the packed stack with the model's own forward pass, on a few tokens, before a run.

`DecoderStack` and the native engine never call the forward of transformers' layers: they repeat the
computation as it was when an architecture's layout was written. A later transformers, an option or a patch
may compute something else, and engine and trainer would go on agreeing with one another. So two short
sequences of one prompt go through both, forward and backward. Every layer starts from the model's own states,
so that rounding does not add up over layers, and the remaining difference is far below a change of the
arithmetic. Both run as in training, where dropout acts; only LoRA's is switched off, since the stack draws
its masks itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from colocate.policy.attention.pack import Pack
from colocate.policy.head.output_head import output_head
from colocate.policy.model.training_mode import dropout_rates
from colocate.policy.stack.host_activations import HostActivations
from colocate.policy.stack.layer import LayerContext
from colocate.policy.stack.stack import DecoderStack
from colocate.types import Sample
from colocate.weights.layouts import WHOLE, Layout, causal_lm, layout_for
from colocate.weights.weight_parts import random_parts

PROMPT_TOKENS = 4
COMPLETION_TOKENS = (6, 3)

FINEST_UNIT, FINEST_CUDA_UNIT = 2.0**-20, 2.0**-10
"""The finest rounding units that are assumed, on a CPU and on a GPU, whatever the model's type is:
transformers' norms are in float32 even in a float64 model, and a GPU may multiply float32 matrices in
TF32."""


def check_stack(model: nn.Module) -> None:
    """Compare `DecoderStack` of a model with the model's own forward and backward pass.

    Compared are, for every layer from the same input, its output [T, hidden] and the gradients of its input,
    of its trained parameters and, before the first layer, of the embedding; then the last norm's, and the
    logits. With u the type's rounding unit (2^-7 for bfloat16) a token's states x may differ by u |x| and by
    6 u of what the layer has added to them, in their gradient by 32 u of that; the parameters' gradients by
    32 u of their norm (in each case 0.001 at least): where keys have a large bias, as Qwen2's, rounding alone
    makes 10 % of difference in bfloat16. One layer's gradients exist at a time, on either side.

    The model's mode and gradients and the random generators are as before when it returns.

    transformers' modules cannot compute with a part of the weights. If the model holds a part, a small model
    of the same configuration is compared instead (`small_model_of`), without the adapters.
    """
    layout = layout_for(model)
    if layout.part.count > 1:
        model = small_model_of(model)
        layout = layout_for(model)
    devices = [layout.device] if layout.device.type == "cuda" else []
    with _modes_kept(model), torch.random.fork_rng(devices), torch.enable_grad():
        model.eval()
        stack = DecoderStack(model, HostActivations())
        model.train()
        for module in model.modules():
            for dropout in getattr(module, "lora_dropout", {}).values():
                dropout.eval()
        for where, relative, share in _differences(model, layout, stack):
            if not share <= 1:
                raise ValueError(
                    f"{type(causal_lm(model)).__name__}: the packed stack and the model's own forward pass "
                    f"differ. On {len(COMPLETION_TOKENS)} short sequences {where} differs by {relative:.2g} "
                    f"of its norm, which is {share:.3g} times what rounding to {layout.dtype} may cause. "
                    f"{_advice(model)}"
                )


def small_model_of(model: nn.Module) -> Any:
    """A model of the same configuration with random weights, on the same device and of the same type, with
    two layers of each kind (with and without a window, rotated or not) and at most 1,024 tokens."""
    layout, config = layout_for(model), causal_lm(model).config
    options: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": min(layout.vocab_size, 1024)}
    settings = {n: getattr(config, n, None) for n in ("layer_types", "no_rope_layers")}
    by_layer = {name: setting for name, setting in settings.items() if setting is not None}
    if by_layer:
        kinds = [kind for kind in dict.fromkeys(zip(*by_layer.values(), strict=False)) for _ in range(2)]
        options |= dict(zip(by_layer, map(list, zip(*kinds, strict=True)), strict=True))
        options["num_hidden_layers"] = len(kinds)
    if (config.pad_token_id or 0) >= options["vocab_size"]:
        options["pad_token_id"] = 0  # the embedding has no gradient there, whatever token it is
    small = type(config).from_dict(config.to_dict() | options)
    devices = [layout.device] if layout.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        result = random_parts(small, WHOLE, device=layout.device, dtype=layout.dtype)
        for parameter in result.parameters():
            # Norms of ones and biases of zeros would hide one that is left out.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return result


def _differences(model: nn.Module, layout: Layout, stack: DecoderStack) -> Iterator[tuple[str, float, float]]:
    """The differences between stack and model: each layer's output and gradients, the last norm's, logits.

    Each is the place, the norm of the difference over the norm of the model's own result, and the difference
    over the largest that rounding may make; above 1 the two do not agree. Both start each layer from the
    model's own state, so that a difference shows at the layer that makes it.
    """
    finest = FINEST_CUDA_UNIT if layout.device.type == "cuda" else FINEST_UNIT
    unit = max(torch.finfo(layout.dtype).eps, finest)
    tolerance, gradient_tolerance = (max(num_units * unit, 1e-3) for num_units in (6, 32))

    def by_token(ours: Tensor, own: Tensor, passed: Tensor | float, tolerance: float) -> tuple[float, float]:
        """Compare [T, C] by token: `tolerance` of what was added to `passed`, and one unit of the sum."""
        ours, own = ours.detach().double(), own.detach().double()
        difference = (ours - own).norm(dim=1)
        allowed = tolerance * (own - passed).norm(dim=1) + unit * own.norm(dim=1)
        share = (difference / allowed.clamp(min=1e-30)).square().mean().sqrt()
        return (difference.norm() / own.norm()).item(), share.item()

    pack, states, logits = _own_pass(model, layout, stack)
    context = LayerContext(pack, stack.rotary_tables(states[0], pack), "keep")
    generator = torch.Generator().manual_seed(0)
    layers = {f"layer {index}": layer for index, layer in enumerate(causal_lm(model).model.layers)}
    for index, (where, module) in enumerate([*layers.items(), ("the last norm", layout.norm)]):
        # Layer 0 reads the stack's own embedding, whose gradient is compared, too; later layers read the
        # model's states.
        x = (stack.embedded(pack) if index == 0 else states[index].detach()).requires_grad_()
        compared = {where: module} | ({"the embedding": layout.embed_tokens} if index == 0 else {})
        groups = {name: [p for p in m.parameters() if p.requires_grad] for name, m in compared.items()}
        is_layer, own = where in layers, states[index + 1]
        own = own if is_layer else own[pack.predicting]
        ours = stack.after_layer(index, x, context) if is_layer else stack.last_states(x, pack)
        yield f"{where}'s output", *by_token(ours, own, x.detach() if is_layer else 0.0, tolerance)
        grad = torch.randn(own.shape, generator=generator).to(own)
        (ours_x, *our_grads), (own_x, *own_grads) = (
            torch.autograd.grad(
                y, [x, *itertools.chain(*groups.values())], grad, retain_graph=True, materialize_grads=True
            )
            for y, x in ((ours, x), (own, states[index]))
        )
        # The residual connection passes the gradient on unchanged; the layer adds its own to it.
        passed = grad if is_layer else 0.0
        yield f"the gradient of {where}'s input", *by_token(ours_x, own_x, passed, gradient_tolerance)
        for name, group in groups.items():
            a, b = ([grads.pop(0) for _ in group] for grads in (our_grads, own_grads))
            difference = get_total_norm([x - y for x, y in zip(a, b, strict=True)]).item()
            relative = difference / max(get_total_norm(b).item(), 1e-30)
            yield f"the gradient of {name}'s parameters", relative, relative / gradient_tolerance
    for scale in {layout.logits_multiplier, output_head(model).scale}:  # the engine's and the trainer's
        ours = F.linear(own, layout.lm_head.weight) * scale
        yield "the logits", *by_token(ours, logits[pack.predicting], 0.0, tolerance)


def _own_pass(model: nn.Module, layout: Layout, stack: DecoderStack) -> tuple[Pack, list[Tensor], Tensor]:
    """The compared tokens, packed, and the results of the model's own forward pass on them as padded rows:
    the outputs of embedding, layers and last norm, each [T, hidden], in one graph, and the logits [T, V].

    Every output is packed and padded again on its way to the next layer, so that in the model, as in the
    stack, a shared prompt's gradient is the sum over its rows.
    """
    lm, device, vocab_size = causal_lm(model), layout.device, layout.embed_tokens.num_embeddings
    shape = num_rows, length = len(COMPLETION_TOKENS), PROMPT_TOKENS + max(COMPLETION_TOKENS)
    places = torch.arange(num_rows * length, device=device).view(shape)
    ids = (7 * places + 1) % vocab_size
    ids[:, :PROMPT_TOKENS] = ids[0, :PROMPT_TOKENS]
    ids[:, [1, PROMPT_TOKENS]] = layout.embed_tokens.padding_idx or 0
    # Places are packed instead of tokens, so that the pack tells where each of its tokens comes from.
    samples = [
        Sample(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:][:n], torch.ones(n), advantage=0.0, prompt_key=0)
        for row, n in zip(places, COMPLETION_TOKENS, strict=True)
    ]
    pack = stack.pack(samples)
    packed = pack.token_ids
    tokens = torch.full_like(places.flatten(), -1)  # what is in no pack is masked
    tokens[packed] = torch.arange(len(packed), device=device)
    tokens = tokens.view(shape)
    prompts = tokens[:, :PROMPT_TOKENS]  # of a shared one the pack has the first row's
    prompts[:] = prompts.where(prompts >= 0, prompts[0])
    states: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> Any:
        state = (output[0] if isinstance(output, tuple) else output).flatten(0, 1)[packed]
        # With a frozen embedding there is no graph before the first adapter.
        states.append(state.requires_grad_())
        return (state[tokens], *output[1:]) if isinstance(output, tuple) else state[tokens]

    def note_input(module: nn.Module, args: Any) -> Any:
        return (note(module, args, args[0]), *args[1:])  # the embeddings with their factor

    modules = (*lm.model.layers, layout.norm)
    handles = [module.register_forward_hook(note) for module in modules]
    handles.append(lm.model.layers[0].register_forward_pre_hook(note_input))
    try:
        logits = lm(input_ids=ids, attention_mask=(tokens >= 0).long(), use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if len(states) != len(modules) + 1:
        raise ValueError(
            f"{type(lm).__name__} makes {len(states)} calls of its {len(modules) + 1} modules (embedding, "
            f"layers and last norm) in a forward pass, and the packed stack one of each. {_advice(model)}"
        )
    return replace(pack, token_ids=ids.flatten()[packed]), states, logits.flatten(0, 1)[packed]


def _advice(model: nn.Module) -> str:
    for path, _, key, rate in dropout_rates(model):
        name = path if key == "p" else f"{path}.{key}"
        if rate and ".lora_dropout." not in name:  # which is the stack's own
            return (
                f"The model has dropout that the stack does not apply ({name} = {rate}): set "
                "disable_dropout=True, or 0 in the model's configuration."
            )
    return (
        f"transformers {transformers.__version__}, or a patch of it, computes this architecture in a way "
        "that this version of colocate does not know: it would train another model than yours, with any "
        "engine. Remove the patch, or install the transformers that this colocate was released with, and "
        "report this message."
    )


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore training mode and checkpointing, which is off within: the re-entrant kind keeps no graph."""
    names = ("training", "gradient_checkpointing")
    kept = [(m, name, vars(m)[name]) for m in model.modules() for name in names if name in vars(m)]
    for module, name, value in kept:
        setattr(module, name, value and name == "training")
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
