"""How far log-probs move if parts of a real model's numbers are rounded to 8 bits, one way at a time.

    python -m benchmarks.precision.ablations MODEL_DIR QUESTIONS.jsonl

The model reads questions and their solutions in float32 (rows with `question` and `answer`, as GSM8K has).
At each place a token is drawn from its own distribution; of these tokens the log-prob with rounding is
compared with that without. Nothing but what a row of the table names is rounded, so rows say what each part
and each way of rounding costs, on a CPU, too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from benchmarks.common.results import committed, origin, write_result
from benchmarks.precision.scales import Rounding, largest_in, with_scale

BLOCK = 64
"""Values that an orthogonal rotation mixes before they are rounded: a head's size."""
ATTENTION, MLP, DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)
ALL = ATTENTION + MLP + DOWN


def e4m3_row(x: Tensor) -> Tensor:
    """Each row in e4m3, divided by a power of two of its own."""
    return with_scale(x, largest_in(x, x.shape[-1]), is_power_of_two=True)


def e4m3_matrix(x: Tensor) -> Tensor:
    """A whole matrix in e4m3, divided by one power of two."""
    return with_scale(x, x.abs().amax(), is_power_of_two=True)


def int8_row(x: Tensor) -> Tensor:
    """Each row as whole numbers up to 127, times a factor of its own."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-32)
    return (x / scale).round() * scale


def int8_power_of_two(x: Tensor) -> Tensor:
    """`int8_row` with a factor that is a power of two."""
    scale = torch.exp2(torch.ceil(torch.log2((x.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-32))))
    return (x / scale).round() * scale


def int8_blocks(x: Tensor) -> Tensor:
    """Each block of `BLOCK` values of a row as whole numbers up to 127."""
    return int8_row(x.unflatten(-1, (-1, BLOCK))).flatten(-2)


def rotated(rounding: Rounding) -> Rounding:
    """`rounding` between a Hadamard rotation of blocks and its inverse (QuaRot, arXiv:2404.00456, section
    4): an outlier is spread over its block, and rotations of inputs and weights cancel in their product."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix / math.sqrt(BLOCK)  # symmetric, and its own inverse

    def turned(x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, BLOCK)) @ matrix).flatten(-2)

    return lambda x: turned(rounding(turned(x)))


class Rounded:
    """A model in which parts are rounded for a while."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._keys: Rounding | None = None
        self._values: Rounding | None = None
        AttentionInterface.register("rounded", self._attend)
        AttentionMaskInterface.register("rounded", sdpa_mask)
        model.set_attn_implementation("rounded")

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        key = self._keys(key) if self._keys else key
        value = self._values(value) if self._values else value
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    @contextmanager
    def rounding(
        self,
        *,
        keys: Rounding | None = None,
        values: Rounding | None = None,
        inputs: Rounding | None = None,
        weights: Rounding | None = None,
        of: tuple[str, ...] = ALL,
        layers: range | None = None,
    ) -> Iterator[None]:
        """Round keys, values, and inputs and weights of the projections `of` in `layers` (None: all)."""
        self._keys, self._values = keys, values
        handles, before = [], {}
        for number, layer in enumerate(self.model.model.layers):
            for name, module in layer.named_modules():
                if not name.endswith(of) or (layers is not None and number not in layers):
                    continue
                if inputs is not None:
                    handles.append(module.register_forward_pre_hook(_rounding_hook(inputs)))
                if weights is not None:
                    before[module] = module.weight.data
                    module.weight.data = weights(module.weight.data)
        try:
            yield
        finally:
            self._keys = self._values = None
            for handle in handles:
                handle.remove()
            for module, weight in before.items():
                module.weight.data = weight


def _rounding_hook(rounding: Rounding) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    return lambda module, inputs: (rounding(inputs[0]),)


def ways(num_layers: int) -> dict[str, dict[str, Any]]:
    """What is rounded in each row of the table."""
    e4m3 = dict(inputs=e4m3_row, weights=e4m3_matrix)
    turned = dict(inputs=rotated(int8_row), weights=rotated(int8_row))
    table: dict[str, dict[str, Any]] = {}
    for name, rounding in (
        ("e4m3", e4m3_row), ("int8", int8_row), ("int8, powers of two", int8_power_of_two),
        ("e4m3, rotated", rotated(e4m3_row)), ("int8, rotated", rotated(int8_row)),
    ):  # fmt: skip
        table |= {f"keys {name}": dict(keys=rounding), f"values {name}": dict(values=rounding)}
        table[f"keys and values {name}"] = dict(keys=rounding, values=rounding)
    for name, parts in (("e4m3", e4m3), ("int8, rotated", turned)):
        table |= {f"{part} {name}": {part: rounding} for part, rounding in parts.items()}
        table |= {
            f"{kind} {name}": dict(parts, of=of)
            for kind, of in (("qkv", ATTENTION), ("gate, up", MLP), ("down", DOWN))
        }
        table[f"products {name}"] = parts
    table["products int8"] = dict(inputs=int8_row, weights=int8_row)
    table["products int8, blocks"] = dict(inputs=int8_blocks, weights=int8_blocks)
    table["inputs int8"], table["weights int8"] = dict(inputs=int8_row), dict(weights=int8_row)
    table["all e4m3"] = dict(e4m3, keys=e4m3_row, values=e4m3_row)
    table["all int8, rotated"] = dict(turned, keys=int8_row, values=int8_row)
    for first in range(0, num_layers, max(num_layers // 6, 1)):
        layers = range(first, min(first + max(num_layers // 6, 1), num_layers))
        table[f"products e4m3, layers {layers[0]} to {layers[-1]}"] = dict(e4m3, layers=layers)
    return table


@torch.no_grad()
def measure(model: Any, tokens: Tensor, mask: Tensor) -> dict[str, dict[str, float]]:
    """The mean, deviation and largest size of what each way changes of a drawn token's log-prob, in nats.

    Args:
        tokens, mask: [sequences, T]; mask is 0 on padding, which is on the left.
    """
    rounded, drawn = Rounded(model), None
    places, found, plain = mask.bool(), {}, torch.empty(0)
    for name, way in {"": {}, **ways(len(model.model.layers))}.items():
        with rounded.rounding(**way):
            logprobs = model(tokens, attention_mask=mask).logits[places].log_softmax(-1)
        if drawn is None:
            torch.manual_seed(0)
            drawn = torch.multinomial(logprobs.exp(), 1)
            plain = logprobs.gather(1, drawn)[:, 0]
            found["tokens"] = {"number": float(len(plain)), "mean_logprob": float(plain.mean())}
            continue
        moved = logprobs.gather(1, drawn)[:, 0] - plain
        found[name] = {
            "mean_abs": float(moved.abs().mean()),
            "sd": float(moved.std()),
            "max_abs": float(moved.abs().max()),
        }
        print(f"{name:40} {found[name]['mean_abs']:.4f} {found[name]['sd']:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="questions that are read")
    parser.add_argument("--tokens", type=int, default=192, help="the most tokens of each, its last ones")
    parser.add_argument("--hardware", default="cpu")
    options = parser.parse_args()
    commit = committed()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in options.questions.read_text().splitlines()[: options.rows]]
    texts = [
        tokenizer.apply_chat_template(
            [
                {"role": role, "content": row[name]}
                for role, name in (("user", "question"), ("assistant", "answer"))
            ],
            tokenize=False,
        )
        for row in rows
    ]
    read = tokenizer(texts, return_tensors="pt", padding=True)
    tokens, mask = (read[name][:, -options.tokens :] for name in ("input_ids", "attention_mask"))
    found = measure(model, tokens, mask)
    claims = {
        f"{name}_mean_abs": found[way]["mean_abs"]
        for name, way in (
            ("kv_e4m3", "keys and values e4m3"), ("kv_int8", "keys and values int8"),
            ("products_e4m3", "products e4m3"), ("products_int8_rotated", "products int8, rotated"),
            ("all_e4m3", "all e4m3"), ("all_int8_rotated", "all int8, rotated"),
        )
    }  # fmt: skip
    setup = dict(
        model=options.model.name, questions=options.questions.name, rows=len(rows), tokens=options.tokens
    )
    record = {**origin(), "ways": found}
    print(write_result("precision-ablations", options.hardware, claims, [record], commit, **setup))


if __name__ == "__main__":
    main()
