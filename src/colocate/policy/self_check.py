"""The packed stack beside the model's own forward pass, on a few tokens, before a run begins.

`DecoderStack` and the native engine never call the forward of transformers' layers: they compute what those
did when an architecture's layout was written. A later transformers, an option or a patch may compute
something else, and engine and trainer would go on agreeing with one another. So two short sequences of one
prompt go through both, forward and backward. Every layer starts from the model's own states, so that rounding
does not add up over layers, and what is left of it is far below a change of the arithmetic. Both run as in
training, where dropout acts; only LoRA's is switched off, whose masks the stack draws itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import get_total_norm

from colocate.policy.host_activations import HostActivations
from colocate.policy.pack import Pack
from colocate.policy.stack import DecoderStack, LayerContext
from colocate.types import Sample
from colocate.weights.layouts import Layout, causal_lm, layout_for

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

    Raises:
        ValueError: they differ by more; the message names the place, the difference and what to do.
    """
    layout = layout_for(model)
    devices = [layout.device] if layout.device.type == "cuda" else []
    with _modes_kept(model), torch.random.fork_rng(devices), torch.enable_grad():
        model.eval()
        stack = DecoderStack(model, HostActivations())
        model.train()
        for module in model.modules():
            for dropout in getattr(module, "lora_dropout", {}).values():
                dropout.eval()
        for difference in _differences(model, layout, stack):
            if not difference.share <= 1:
                raise ValueError(
                    f"{type(causal_lm(model)).__name__}: the packed stack and the model's own forward pass "
                    f"differ. On {len(COMPLETION_TOKENS)} short sequences {difference.where} differs by "
                    f"{difference.relative:.2g} of its norm, which is {difference.share:.3g} times what "
                    f"rounding to {layout.dtype} may cause. {_advice(model)}"
                )


@dataclass(frozen=True)
class _Difference:
    where: str
    relative: float
    """The norm of the difference over the norm of the model's own result."""
    share: float
    """The difference over the largest that rounding may make; above 1 the two do not agree."""


@dataclass(frozen=True)
class _Probe:
    """The compared tokens, once in S padded rows of up to L, as the model reads them, and once packed."""

    ids: Tensor  # [S, L]
    mask: Tensor  # [S, L]
    pack: Pack
    places: Tensor  # [T]: where the pack's tokens are among S · L

    @classmethod
    def of(cls, layout: Layout, stack: DecoderStack) -> _Probe:
        device, vocab_size = layout.device, layout.embed_tokens.num_embeddings
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
        # A completion's last token is not read.
        lengths = torch.tensor([PROMPT_TOKENS + n - 1 for n in COMPLETION_TOKENS], device=device)
        return cls(
            ids=ids,
            mask=(torch.arange(length, device=device) < lengths[:, None]).long(),
            pack=replace(pack, token_ids=ids.flatten()[pack.token_ids]),
            places=pack.token_ids,
        )

    def packed(self, rows: Tensor) -> Tensor:
        """States [S, L, C] of the rows, in the order of the pack: [T, C]."""
        return rows.flatten(0, 1)[self.places]

    def packed_gradient(self, rows: Tensor) -> Tensor:
        """Gradients [S, L, C] of the rows, in the pack's order, [T, C]; a shared prompt's are summed over
        rows."""
        if self.pack.to_prompts is not None:
            rows = rows.clone()
            rows[0, :PROMPT_TOKENS] = rows[:, :PROMPT_TOKENS].sum(0)
        return self.packed(rows)


def _differences(model: nn.Module, layout: Layout, stack: DecoderStack) -> Iterator[_Difference]:
    """The differences between stack and model: each layer's output and gradients, the last norm's, logits.

    Both start each layer from the model's own state, so that a difference shows at the layer that makes it.
    """
    probe, comparison = _Probe.of(layout, stack), _Comparison(layout)
    pack, layers = probe.pack, causal_lm(model).model.layers
    states, logits = _own_states(model, layout, probe)
    context = LayerContext(pack, *stack.rotary_tables(states[0], pack), "keep")
    for index, (before, after) in enumerate(itertools.pairwise(states[:-1])):
        # Layer 0 reads the stack's own embedding, whose gradient is compared, too; later layers read the
        # model's states.
        x = stack.embedded(pack) if index == 0 else probe.packed(before).detach()
        x = x if x.requires_grad else x.requires_grad_()
        ours, own, where = stack.after_layer(index, x, context), probe.packed(after), f"layer {index}"
        yield comparison.states(f"{where}'s output", ours, own, x)
        groups = {where: _trained(layers[index])}
        if index == 0:
            groups["the embedding"] = _trained(layout.embed_tokens)
        yield from comparison.gradients(where, probe, (ours, x), (own, before), groups)
    x = probe.packed(states[-2]).detach().requires_grad_()
    ours, own, where = stack.last_states(x, pack), probe.packed(states[-1])[pack.predicting], "the last norm"
    yield comparison.states(f"{where}'s output", ours, own)
    yield from comparison.gradients(
        where, probe, (ours, x), (own, states[-2]), {where: _trained(layout.norm)}
    )
    ours = F.linear(own, layout.lm_head.weight)
    yield comparison.states("the logits", ours, probe.packed(logits)[pack.predicting])


def _own_states(model: nn.Module, layout: Layout, probe: _Probe) -> tuple[list[Tensor], Tensor]:
    """The model's own forward pass, in one graph: the outputs of embedding, layers and last norm, each
    [S, L, hidden], and the logits [S, L, V]."""
    lm = causal_lm(model)
    states: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        # With a frozen embedding there is no graph before the first adapter.
        states.append(output if output.requires_grad else output.requires_grad_())

    modules = (layout.embed_tokens, *lm.model.layers, layout.norm)
    handles = [module.register_forward_hook(note) for module in modules]
    try:
        logits = lm(input_ids=probe.ids, attention_mask=probe.mask, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if len(states) != len(modules):
        raise ValueError(
            f"{type(lm).__name__} makes {len(states)} calls of its {len(modules)} modules (embedding, layers "
            f"and last norm) in a forward pass, and the packed stack one of each. {_advice(model)}"
        )
    return states, logits


class _Comparison:
    """Compares the stack's tensors with the model's own, in units of the rounding of the model's type."""

    def __init__(self, layout: Layout) -> None:
        finest = FINEST_CUDA_UNIT if layout.device.type == "cuda" else FINEST_UNIT
        self._unit = max(torch.finfo(layout.dtype).eps, finest)
        self._generator = torch.Generator().manual_seed(0)

    def states(
        self, where: str, ours: Tensor, own: Tensor, before: Tensor | float = 0.0, num_units: int = 6
    ) -> _Difference:
        """Compare states [T, C] token by token. A difference may be `num_units` rounding units of what was
        added to `before`, and one unit of the sum."""
        ours, own = ours.detach().double(), own.detach().double()
        added = own - (before.detach() if isinstance(before, Tensor) else before)
        difference = (ours - own).norm(dim=1)
        allowed = self._tolerance(num_units) * added.norm(dim=1) + self._unit * own.norm(dim=1)
        share = (difference / allowed.clamp(min=1e-30)).square().mean().sqrt()
        return _Difference(where, (difference.norm() / own.norm()).item(), share.item())

    def gradients(
        self,
        where: str,
        probe: _Probe,
        ours: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        groups: dict[str, list[nn.Parameter]],
    ) -> Iterator[_Difference]:
        """Compare the gradients of a layer's input, and of each group of parameters.

        Args:
            ours: the stack's output [N, hidden] and what it was made of, [T, hidden].
            own: the model's output [N, hidden] and what it was made of, [S, L, hidden].
        """
        grad = torch.randn(own[0].shape, generator=self._generator).to(own[0])
        parameters = [parameter for group in groups.values() for parameter in group]
        (ours_x, *our_grads), (own_x, *own_grads) = (
            torch.autograd.grad(y, [x, *parameters], grad, retain_graph=True, materialize_grads=True)
            for y, x in (ours, own)
        )
        # The residual connection passes the gradient on unchanged; the layer adds its own to it.
        passed = grad if len(grad) == len(ours_x) else 0.0
        own_x = probe.packed_gradient(own_x)
        yield self.states(f"the gradient of {where}'s input", ours_x, own_x, passed, num_units=32)
        for name, group in groups.items():
            a, b = ([grads.pop(0) for _ in group] for grads in (our_grads, own_grads))
            difference = get_total_norm([x - y for x, y in zip(a, b, strict=True)]).item()
            relative = difference / max(get_total_norm(b).item(), 1e-30)
            yield _Difference(
                f"the gradient of {name}'s parameters", relative, relative / self._tolerance(32)
            )

    def _tolerance(self, num_units: int) -> float:
        return max(num_units * self._unit, 1e-3)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _advice(model: nn.Module) -> str:
    if dropouts := _active_dropouts(model):
        name, rate = dropouts[0]
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


def _active_dropouts(model: nn.Module) -> Sequence[tuple[str, float]]:
    """The names and rates of all dropout that acts in training, except LoRA's."""
    rates: list[tuple[str, float]] = []
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            rates.append((name, module.p))
        rates += [(f"{name}.{k}", x) for k, x in vars(module).items() if "drop" in k and isinstance(x, float)]
    return [(name, rate) for name, rate in rates if rate and ".lora_dropout." not in name]


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore every module's training mode and checkpointing afterwards; within, checkpointing is off,
    because its re-entrant way keeps no graph."""
    modes = [(module, module.training) for module in model.modules()]
    checkpointing: list[Any] = [m for m in model.modules() if vars(m).get("gradient_checkpointing")]
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module in checkpointing:
            module.gradient_checkpointing = True
