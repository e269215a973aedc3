"""Attention over runs of different lengths by cuDNN, on Hopper GPUs where its Python interface is installed.

The tensors stay packed: cuDNN is told where each run begins. A graph of its operations is compiled for the
*largest* number of runs, of their tokens and of all tokens, and serves every pack below. These are rounded
up, so that a training run needs few graphs, each of which takes far longer to make than to run; a block of
threads that finds itself beyond its run's end leaves at once.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from colocate.policy.attention.pack import Runs

_OLDEST_VERSION = 91300
"""The oldest version of cuDNN, in cuDNN's own counting, whose backward of packed grouped-query attention
needs bounded workspaces."""

_TILE_TOKENS = 128


def has_cudnn(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether `forward` and `backward` can run tensors of this type and head size on this device."""
    return device.type == "cuda" and why_not_cudnn(device, dtype, head_size) is None


def why_not_cudnn(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """The reason why `forward` and `backward` cannot run such tensors on this GPU; None: they can."""
    return why_not_cudnn_on(_capability(device), dtype, head_size)


def why_not_cudnn_on(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> str | None:
    """The answer of `why_not_cudnn` for any GPU of this compute capability, whether it is here or not."""
    if capability[0] != 9:
        return "cuDNN's is for H100 and H200"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN's takes bfloat16 and float16, and the model is in {dtype}"
    if head_size not in (64, 128):
        return f"cuDNN's takes heads of 64 or 128 values, and these have {head_size}"
    if not _is_installed():
        version = f"{_OLDEST_VERSION // 10000}.{_OLDEST_VERSION // 100 % 100}"
        return (
            f"cuDNN's, from version {version} on, is faster on this GPU and not installed: "
            "pip install 'nvidia-cudnn-frontend~=1.18.0'"
        )
    return None


@functools.cache
def _is_installed() -> bool:
    if importlib.util.find_spec("cudnn") is None:
        return False
    version = torch.backends.cudnn.version()
    return version is None or version >= _OLDEST_VERSION  # a PyTorch for CPUs has no version


def workspace_bytes(
    num_heads: int, num_kv_heads: int, head_size: int, num_queries: int, num_keys: int
) -> int:
    """Bytes of workspace that `backward` needs for `num_queries` and `num_keys` tokens over all runs.

    The workspace holds the gradient of q in float32, one number per query and head and, with grouped queries,
    the gradients of k and v for each query head.
    """
    values = _bound(num_queries) + (2 * _bound(num_keys) if num_kv_heads < num_heads else 0)
    return 4 * num_heads * (head_size * values + _bound(num_queries))


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [T, H, D] of each run of queries [T, H, D] over its run of keys [S, K, D], K dividing H, and
    the log-sum-exp of the scores, [H, T] float32."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    case = _AttentionCase.of(q, k, runs, scale, has_workspace=False)
    tensors = {_Uid.Q: q, _Uid.K: k, _Uid.V: v, _Uid.OUT: out, _Uid.LSE: lse}
    _execute(_forward_graph(case), case, runs, tensors)
    return out, lse.T


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Runs, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in `forward`.

    `out` and `lse` may come from attention over more keys than `k` holds: then the gradients are what the
    keys in `k` contribute.

    Args:
        grad, q, out: [T, H, D]; k, v: [S, K, D]; lse: [H, T] float32.
    """
    grad, q, k, v, out = (tensor.contiguous() for tensor in (grad, q, k, v, out))
    lse = lse.T.contiguous()
    # cuDNN writes no gradients for keys that no query sees, so these must be 0 before.
    new = torch.zeros_like if 0 in runs.query_lengths else torch.empty_like
    grad_q, grad_k, grad_v = torch.empty_like(q), new(k), new(v)
    case = _AttentionCase.of(q, k, runs, scale, has_workspace=True)
    tensors = {_Uid.Q: q, _Uid.K: k, _Uid.V: v, _Uid.OUT: out, _Uid.LSE: lse, _Uid.GRAD: grad}
    tensors |= {_Uid.GRAD_Q: grad_q, _Uid.GRAD_K: grad_k, _Uid.GRAD_V: grad_v}
    _execute(_backward_graph(case), case, runs, tensors)
    return grad_q, grad_k, grad_v


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# ── Graphs ───────────────────────────────────────────────────────────────────────────────────────────────


class _Uid(IntEnum):
    """The numbers by which a graph names its tensors."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    LSE = 5
    GRAD = 6
    GRAD_Q = 7
    GRAD_K = 8
    GRAD_V = 9
    QUERY_LENGTHS = 10
    KEY_LENGTHS = 11
    QUERY_STARTS = 12
    """Where each run begins in q, out and their gradients, counted in values. `KEY_STARTS` says where it
    begins in k and v, `LSE_STARTS` in the log-sum-exps."""
    KEY_STARTS = 13
    LSE_STARTS = 14


@dataclass(frozen=True)
class _AttentionCase:
    """The tensors and the bounds on their sizes that a graph is compiled for."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    is_causal: bool
    max_runs: int
    max_queries: int  # the longest run of queries
    max_keys: int
    max_total_queries: int  # 0: the graph needs no workspace
    max_total_keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, runs: Runs, scale: float, *, has_workspace: bool) -> _AttentionCase:
        return cls(
            q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], scale, runs.is_causal,
            max_runs=_rounded_up(len(runs.query_lengths), 1),
            max_queries=_rounded_up(max(runs.query_lengths), 2, _TILE_TOKENS),
            max_keys=_rounded_up(max(runs.key_lengths), 2, _TILE_TOKENS),
            max_total_queries=_bound(len(q)) if has_workspace else 0,
            max_total_keys=_bound(len(k)) if has_workspace else 0,
        )  # fmt: skip


def _bound(num_tokens: int) -> int:
    """Round the tokens that a graph is made for up, in fine steps because workspaces have this size."""
    return _rounded_up(num_tokens, 16, _TILE_TOKENS)


def _rounded_up(number: int, parts: int, step: int = 1) -> int:
    """`number` rounded up to a multiple of `step`, and to one of `parts` steps between two powers of two."""
    step = max(step, (1 << number.bit_length() - 1) // parts)
    return -(-number // step) * step


@dataclass(frozen=True)
class _Graph:
    compiled: Any
    workspace_bytes: int


class _Nodes:
    """A graph in the making, with its input and output tensors."""

    def __init__(self, case: _AttentionCase) -> None:
        import cudnn

        self._cudnn, self._case = cudnn, case
        types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}
        self._dtype = types[case.dtype]
        self.graph = cudnn.pygraph(
            handle=_handle(case.device),
            io_data_type=self._dtype,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        starts = [case.max_runs + 1, 1, 1, 1], cudnn.data_type.INT64
        lengths = [case.max_runs, 1, 1, 1], cudnn.data_type.INT32
        self._integers = {
            uid: self.graph.tensor(dim=dim, stride=[1, 1, 1, 1], data_type=dtype, uid=uid, name=uid.name)
            for uid, (dim, dtype) in {
                _Uid.QUERY_STARTS: starts,
                _Uid.KEY_STARTS: starts,
                _Uid.LSE_STARTS: starts,
                _Uid.QUERY_LENGTHS: lengths,
                _Uid.KEY_LENGTHS: lengths,
            }.items()
        }

    def options(self) -> dict[str, Any]:
        """The options that the forward and the backward operation have in common."""
        bounds = {}
        if self._case.is_causal:
            alignment = self._cudnn.diagonal_alignment.TOP_LEFT
            bounds = {"diagonal_alignment": alignment, "diagonal_band_right_bound": 0}
        return {
            "attn_scale": self._case.scale,
            "use_padding_mask": True,
            "seq_len_q": self._integers[_Uid.QUERY_LENGTHS],
            "seq_len_kv": self._integers[_Uid.KEY_LENGTHS],
            **bounds,
        }

    def input(self, uid: _Uid) -> Any:
        dim, stride, starts, dtype = self._layout(uid)
        return self.graph.tensor(
            dim=dim, stride=stride, data_type=dtype, ragged_offset=starts, uid=uid, name=uid.name
        )

    def output(self, node: Any, uid: _Uid) -> None:
        dim, stride, starts, dtype = self._layout(uid)
        node.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
        node.set_ragged_offset(starts)

    def compiled(self) -> _Graph:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return _Graph(self.graph, self.graph.get_workspace_size())

    def _layout(self, uid: _Uid) -> tuple[list[int], list[int], Any, Any]:
        """Sizes and strides as [runs, heads, tokens, values], packed by token; where runs begin; the type."""
        case = self._case
        tokens, heads, width, starts = case.max_queries, case.num_heads, case.head_size, _Uid.QUERY_STARTS
        dtype = self._dtype
        if uid in (_Uid.K, _Uid.V, _Uid.GRAD_K, _Uid.GRAD_V):
            tokens, heads, starts = case.max_keys, case.num_kv_heads, _Uid.KEY_STARTS
        elif uid is _Uid.LSE:
            width, starts, dtype = 1, _Uid.LSE_STARTS, self._cudnn.data_type.FLOAT
        dim, stride = [case.max_runs, heads, tokens, width], [tokens * heads * width, width, heads * width, 1]
        return dim, stride, self._integers[starts], dtype


@functools.lru_cache(maxsize=256)
def _forward_graph(case: _AttentionCase) -> _Graph:
    nodes = _Nodes(case)
    out, lse = nodes.graph.sdpa(
        q=nodes.input(_Uid.Q), k=nodes.input(_Uid.K), v=nodes.input(_Uid.V), generate_stats=True,
        **nodes.options(),
    )  # fmt: skip
    nodes.output(out, _Uid.OUT)
    nodes.output(lse, _Uid.LSE)
    return nodes.compiled()


@functools.lru_cache(maxsize=256)
def _backward_graph(case: _AttentionCase) -> _Graph:
    nodes = _Nodes(case)
    gradients = nodes.graph.sdpa_backward(
        q=nodes.input(_Uid.Q), k=nodes.input(_Uid.K), v=nodes.input(_Uid.V), o=nodes.input(_Uid.OUT),
        dO=nodes.input(_Uid.GRAD), stats=nodes.input(_Uid.LSE), max_total_seq_len_q=case.max_total_queries,
        max_total_seq_len_kv=case.max_total_keys, **nodes.options(),
    )  # fmt: skip
    for node, uid in zip(gradients, (_Uid.GRAD_Q, _Uid.GRAD_K, _Uid.GRAD_V), strict=True):
        nodes.output(node, uid)
    return nodes.compiled()


# ── Running ──────────────────────────────────────────────────────────────────────────────────────────────


def _execute(graph: _Graph, case: _AttentionCase, runs: Runs, tensors: dict[_Uid, Tensor]) -> None:
    import cudnn

    handle = _handle(case.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(case.device).cuda_stream)
    workspace = torch.empty(max(graph.workspace_bytes, 1), dtype=torch.uint8, device=case.device)
    pointers = {int(uid): tensor.data_ptr() for uid, tensor in (tensors | _integers(runs, case)).items()}
    graph.compiled.execute(pointers, workspace.data_ptr(), handle=handle)


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


_integers_of: WeakKeyDictionary[Runs, dict[_AttentionCase, dict[_Uid, Tensor]]] = WeakKeyDictionary()
"""The starts and lengths of a pack's runs, made once: every layer asks for the same ones."""


def _integers(runs: Runs, case: _AttentionCase) -> dict[_Uid, Tensor]:
    """Where the runs begin and how long they are. Runs of the graph beyond those of the pack are empty."""
    of_case = _integers_of.setdefault(runs, {})
    if case not in of_case:
        num_empty = case.max_runs - len(runs.query_lengths)
        queries = F.pad(runs.cu_queries.long(), (0, num_empty), value=sum(runs.query_lengths))
        keys = F.pad(runs.cu_keys.long(), (0, num_empty), value=sum(runs.key_lengths))
        of_case[case] = {
            _Uid.QUERY_LENGTHS: queries.diff().int(),
            _Uid.KEY_LENGTHS: keys.diff().int(),
            _Uid.QUERY_STARTS: queries * (case.num_heads * case.head_size),
            _Uid.KEY_STARTS: keys * (case.num_kv_heads * case.head_size),
            _Uid.LSE_STARTS: queries * case.num_heads,
        }
    return of_case[case]
