"""The native engine on weights that are gathered while it is awake, where training splits them further.

Ranks that decode together need two sums a layer, and all turns of a batch at the same time. With memory for
more of the weights than training keeps on a rank, fewer ranks decode together, or each alone: when the engine
wakes up, ranks gather their parts into an arena, and when it goes to sleep the memory is free. With P bf16
parameters in t parts for training and t' for decoding the arena takes 2 P / t' bytes, of which a rank
receives 2 P (1 / t' - 1 / t) in each rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from colocate.engines.native.engine import NativeEngine
from colocate.engines.native.options import NativeOptions
from colocate.memory.arena import Arena, ArenaExhausted
from colocate.parallel.collectives import all_gather
from colocate.parallel.mesh import DecodeMesh, Mesh
from colocate.weights.adapters import base_linear
from colocate.weights.layouts import WHOLE, WeightPart, causal_lm, layout_for
from colocate.weights.weight_parts import Split, split_weights, splits_of, storage_of

if TYPE_CHECKING:
    from colocate.engines.registry import EngineParts

ALIGNMENT_BYTES = 512


class GatheredWeights:
    """A model whose weights have values from `fill` until `free`.

    Args:
        source: a model without adapters that holds this rank's part of its weights.
        mesh: the ranks whose parts are gathered.
    """

    def __init__(self, source: nn.Module, mesh: DecodeMesh) -> None:
        self._source: Any = causal_lm(source)
        self._mesh = mesh
        self._device = next(source.parameters()).device
        self._arena: Arena | None = None
        self.model = self._shapes(WeightPart(mesh.part, mesh.num_parts))
        """The model with this rank's part of the gathered weights."""
        offsets, self._num_bytes = self._offsets()
        self._storage, splits = self._reserved(), splits_of(self.model)
        self._places = {name: self._put(name, offset, splits[name]) for name, offset in offsets.items()}
        """Where each parameter lies, contiguous, by its name."""
        self.model.tie_weights()
        self.model.model.rotary_emb = self._source.model.rotary_emb

    @property
    def num_bytes(self) -> int:
        """Bytes taken; on a GPU the arena takes whole handles."""
        return self._storage.untyped_storage().nbytes() if self._arena is None else self._arena.mapped_bytes

    @torch.no_grad()
    def fill(self) -> None:
        """Take the memory and gather the weights as they are now. All ranks that share them must call this.

        Raises:
            torch.OutOfMemoryError: one of these ranks has too little memory; every one of them raises.
        """
        self._take()
        parameters, splits = dict(self._source.named_parameters()), splits_of(self._source)
        for name, place in self._places.items():
            own, group = storage_of(parameters[name]), self._mesh.gather_group
            if splits[name].dim is None:
                place.copy_(own)
            elif splits[name].dim == 0 or self._mesh.num_parts > 1:
                all_gather(place, own, group)
            else:  # parts of o and down lie transposed, and a whole matrix does not
                transposed = own.new_empty(place.shape[::-1])
                all_gather(transposed, own, group)
                place.copy_(transposed.t())

    def free(self) -> None:
        """Give the memory back. On a GPU the addresses stay, so captured graphs find the next weights."""
        if self._arena is None:
            self._storage.untyped_storage().resize_(0)
        else:
            self._arena.resize(0)

    def close(self) -> None:
        """Give the memory back and, on a GPU, the reserved addresses."""
        self.free()
        if self._arena is not None:
            self._arena.close()

    def _take(self) -> None:
        shortage = ""
        try:
            if self._arena is None:
                self._storage.untyped_storage().resize_(self._num_bytes)
            else:
                self._arena.resize(self._num_bytes)
        except (torch.OutOfMemoryError, ArenaExhausted) as error:
            shortage = str(error)
        is_enough = torch.tensor(not shortage, dtype=torch.int32, device=self._device)
        dist.all_reduce(is_enough, dist.ReduceOp.MIN, group=self._mesh.weight_group)
        if not is_enough:
            self.free()
            raise torch.OutOfMemoryError(
                f"decode_shard={self._mesh.num_parts} gathers {self._num_bytes / 2**30:.2f} GiB of weights "
                f"for each rollout, and {shortage or 'another process has too little memory for them'}. "
                "Raise decode_shard, up to shard, at which nothing is gathered, or set "
                "offload_optimizer=True."
            )

    def _shapes(self, part: WeightPart) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self._source.config, dtype=self._source.dtype)
        if part != WHOLE:
            split_weights(model, part)  # on the meta device only shapes change
        return model.eval()

    def _offsets(self) -> tuple[dict[str, int], int]:
        """Each parameter's first byte, and the end; weights read together are adjacent (`fused_view`)."""
        parameters = dict(self.model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        offset, offsets = 0, {}
        for together in self._read_together(parameters):
            for name in [names[id(parameter)] for parameter in together]:
                offsets[name] = offset
                offset += parameters[name].numel() * self._source.get_parameter(name).dtype.itemsize
            offset = -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offsets, offset

    def _read_together(self, parameters: dict[str, nn.Parameter]) -> Iterator[Sequence[Tensor]]:
        alone = {id(parameter): parameter for parameter in parameters.values()}
        for layer in layout_for(self.model).layers:
            for modules in layer.projection_groups():
                linears = [base_linear(module) for module in modules]
                for together in ([x.weight for x in linears], [x.bias for x in linears]):
                    if together[0] is not None:
                        for parameter in together:
                            del alone[id(parameter)]
                        yield together
        yield from ([parameter] for parameter in alone.values())

    def _reserved(self) -> Tensor:
        """The bytes of all parameters; on a GPU addresses, which need not have memory."""
        if self._device.type != "cuda":
            return torch.empty(self._num_bytes, dtype=torch.uint8)
        capacity_bytes = torch.cuda.get_device_properties(self._device).total_memory
        self._arena = Arena(self._device, capacity_bytes, purpose="gathered weights")
        self._arena.resize(1)
        return self._arena.tensor((self._num_bytes,), torch.uint8)

    def _put(self, name: str, offset: int, split: Split) -> Tensor:
        """Move a parameter of the model to an offset; returns its view there."""
        shape, like = self.model.get_parameter(name), self._source.get_parameter(name)
        size = shape.numel() * like.dtype.itemsize
        flat = self._storage[offset : offset + size].view(like.dtype)
        is_transposed = split.dim == 1
        place = flat.view(shape.shape[::-1] if is_transposed else shape.shape)
        module, _, leaf = name.rpartition(".")
        value = nn.Parameter(place.t() if is_transposed else place, requires_grad=False)
        setattr(self.model.get_submodule(module), leaf, value)
        return place


class GatheredEngine(NativeEngine):
    """`NativeEngine` on weights that are gathered when it wakes up.

    All ranks that share one copy of the weights must wake it up together.

    Args:
        model: a model without adapters that holds this rank's part of its weights.
        mesh: which ranks decode together.
        options: those of `NativeEngine`.
    """

    def __init__(self, model: nn.Module, mesh: DecodeMesh, **options: Any) -> None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"decode_shard={mesh.num_parts} gathers the weights of each matrix for decoding, which is "
                "not possible beside adapters. Set decode_shard=None, or use_peft=False."
            )
        self._gathered = GatheredWeights(model, mesh)
        super().__init__(self._gathered.model, group=mesh.group, **options)
        self._gathered.free()

    @property
    def rollout_weight_bytes(self) -> int:
        return super().rollout_weight_bytes + self._gathered.num_bytes

    def wake_up(self) -> None:
        """Gather the weights. See `NativeEngine.wake_up`.

        Raises:
            torch.OutOfMemoryError: a rank has too little memory for them; all ranks that share them raise.
        """
        self._check_open()
        if not self._is_awake:
            self._gathered.fill()
        super().wake_up()

    def sleep(self, keep_bytes: int = 0) -> None:
        super().sleep(keep_bytes)
        self._gathered.free()

    def close(self) -> None:
        super().close()
        self._gathered.close()


def build(parts: EngineParts) -> NativeEngine:
    """The native engine, which gathers weights for each rollout if fewer ranks decode together than share
    them."""
    options: NativeOptions = parts.options
    mesh, decode_shard = parts.mesh or Mesh(None), options.decode_shard
    arguments: dict[str, Any] = dict(
        max_num_seqs=options.max_num_seqs,
        page_size=options.page_size,
        kv_cache_tokens=options.kv_cache_tokens,
        max_model_len=options.vllm_max_model_length,
        rollout_precision=options.rollout_precision,
    )
    if decode_shard in (None, mesh.num_weight_parts):
        return NativeEngine(parts.model, group=mesh.weight_group, **arguments)
    return GatheredEngine(parts.model, DecodeMesh.of(mesh, decode_shard), **arguments)
