"""Softmax and its gradient on the GPU against float64, alone and within `token_logprobs`."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rounding import examples, strided
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colocate.kernels.train.softmax import softmax_gradient, softmax_statistics
from colocate.policy.head import logprobs as module
from colocate.policy.head.logprobs import logprob_bytes, token_logprobs
from colocate.policy.head.output_head import OutputHead

pytestmark = pytest.mark.usefixtures("poisoned_memory")
few = examples(25)
# Triton's interpreter cuts bfloat16 off instead of rounding it; there float16 shows where values are rounded.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
CAPS = st.sampled_from([(1.0, None), (0.37, None), (0.05, 12.0)])
"""inner, outer"""


def statistics(products, targets, bias=None, inner=1.0, outer=None):
    log_z, logprobs, entropies = torch.empty(3, len(products), device=products.device)
    softmax_statistics(
        products, targets, bias, inner, outer, log_z=log_z, logprobs=logprobs, entropies=entropies
    )
    return log_z, logprobs, entropies


def exact(products, targets, bias, inner, outer):
    """log_z, log-probabilities and entropies by autograd in float64, and the leaf."""
    leaf = products.double().requires_grad_()
    z = inner * (leaf if bias is None else leaf + bias.double())
    if outer is not None:
        z = outer * torch.tanh(z)
    log_p = z.log_softmax(-1)
    return z.logsumexp(-1), log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), leaf


@few
@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 29, 512, 4097, 33_000]),
    has_bias=st.booleans(),
    cap=CAPS,
    first_share=st.sampled_from([0.0, 0.4]),
    uses=st.sampled_from(["logprobs", "entropies", "both"]),
    dtype=st.sampled_from([torch.float32, HALF]),
    spread=st.sampled_from([0.5, 8.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_float64(device, num_rows, vocab_size, has_bias, cap, first_share, uses, dtype, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    products = strided((torch.randn(num_rows, vocab_size, generator=generator) * spread).to(device))
    bias = torch.randn(vocab_size, generator=generator).to(device) if has_bias else None
    targets = torch.randint(vocab_size, (num_rows,), generator=generator).to(device)
    log_z, logprobs, entropies = statistics(products, targets, bias, *cap)
    *expected, leaf = exact(products, targets, bias, *cap)
    for mine, theirs in zip((log_z, logprobs, entropies), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=4e-6)
    assert (entropies >= 0).all()

    grads = torch.randn(2, num_rows, generator=generator).to(device)
    grad_logprobs = None if uses == "entropies" else grads[0]
    grad_entropies = None if uses == "logprobs" else grads[1]
    loss = sum(
        (grad.double() * value).sum()
        for grad, value in ((grad_logprobs, expected[1]), (grad_entropies, expected[2]))
        if grad is not None
    )
    loss.backward()
    first = int(first_share * vocab_size)
    out = strided(torch.empty(num_rows, vocab_size - first, dtype=dtype, device=device))
    softmax_gradient(
        products[:, first:],
        targets,
        None if bias is None else bias[first:],
        *cap,
        log_z=log_z,
        entropies=entropies,
        grad_logprobs=grad_logprobs,
        grad_entropies=grad_entropies,
        first_column=first,
        out=out,
    )
    want = leaf.grad[:, first:]
    rounding = {torch.float32: 1e-5, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    # Half of float16's smallest number is what its rounding loses of any other.
    torch.testing.assert_close(out.double(), want, rtol=rounding, atol=4e-6)


@pytest.mark.parametrize("gap", [0.0, 5.0, 20.0, 60.0])
def test_entropy_is_as_exact_where_the_model_is_sure(device, gap):
    products = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).to(device)
    products[:, 17] += gap
    targets = torch.full((3,), 17, device=device)
    _, logprobs, entropies = statistics(products, targets)
    _, want_logprobs, want_entropies, _ = exact(products, targets, None, 1.0, None)
    # Beyond 2^-24 the rest is lost in 1 + rest, and with it at most 16 times as much entropy.
    torch.testing.assert_close(entropies.double(), want_entropies.detach(), rtol=2e-6, atol=3e-7)
    torch.testing.assert_close(logprobs.double(), want_logprobs.detach(), rtol=2e-6, atol=3e-7)


def test_masked_tokens_and_wrong_ones(device):
    """-inf is a probability of zero; NaN shows, and so does a target outside of the vocabulary."""
    products = torch.randn(4, 5000, generator=torch.Generator().manual_seed(2)).to(device)
    products[0, 100:] = -torch.inf
    products[1, 4100] = torch.nan
    targets = torch.tensor([3, 3, -100, 5000], device=device)
    log_z, logprobs, entropies = statistics(products, targets)
    row = products[0, :100].double()
    torch.testing.assert_close(log_z[0].double(), row.logsumexp(0), rtol=2e-6, atol=0)
    torch.testing.assert_close(logprobs[0].double(), row.log_softmax(0)[3], rtol=2e-6, atol=0)
    log_p = row.log_softmax(0)
    torch.testing.assert_close(entropies[0].double(), -(log_p.exp() * log_p).sum(), rtol=2e-6, atol=0)
    assert log_z[1].isnan() and logprobs[1].isnan() and entropies[1].isnan()
    assert logprobs[2:].isnan().all() and not entropies[2:].isnan().any()
    out = torch.empty_like(products)
    ones = torch.ones(4, device=device)
    softmax_gradient(
        products,
        targets,
        None,
        1.0,
        None,
        log_z=log_z,
        entropies=entropies,
        grad_logprobs=ones,
        grad_entropies=ones,
        first_column=0,
        out=out,
    )
    assert (out[0, 100:] == 0).all() and not out[0].isnan().any()


@pytest.fixture
def kernels_everywhere(monkeypatch):
    monkeypatch.setattr(module, "_runs_kernels", lambda products: products.dtype == torch.float32)


@few
@given(
    num_tokens=st.integers(1, 11),
    chunk_size=st.integers(1, 12),
    has_bias=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    trains_head=st.booleans(),
    entropy_gradient=st.booleans(),
    keep_softmax=st.booleans(),
)
def test_token_logprobs_by_kernels(
    device,
    kernels_everywhere,
    num_tokens,
    chunk_size,
    has_bias,
    softcap,
    trains_head,
    entropy_gradient,
    keep_softmax,
):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 8, generator=generator).to(device).requires_grad_()
    weight = torch.randn(37, 8, generator=generator).to(device).requires_grad_(trains_head)
    bias = torch.randn(37, generator=generator).to(device).requires_grad_(trains_head) if has_bias else None
    targets = torch.randint(37, (num_tokens,), generator=generator).to(device)
    got = token_logprobs(
        hidden,
        targets,
        OutputHead(weight, bias, 0.5, softcap),
        temperature=0.8,
        chunk_size=chunk_size,
        entropy_gradient=entropy_gradient,
        keep_softmax=keep_softmax,
    )
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    inner, outer = (0.5 / 0.8, None) if softcap is None else (0.5 / softcap, softcap / 0.8)
    z = inner * (doubles[0] @ doubles[1].T + (doubles[2] if has_bias else 0.0))
    log_p = (z if outer is None else outer * torch.tanh(z)).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert got[1].requires_grad == entropy_gradient
    factors = torch.linspace(-1, 2, num_tokens, device=device)
    for values in (got, want):
        loss = (values[0] * factors).sum() + (values[1].sum() if entropy_gradient else 0.0)
        loss.backward()
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves, doubles, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=2e-5)


class LiveBytes(TorchDispatchMode):
    """Most bytes that tensors made within hold at a time, after any operation; those on "meta" hold none."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for tensor in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and tensor.device.type != "meta":
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.alive_bytes() > self.peak:
            gc.collect()  # the interpreter's cycles hold on to what kernels were given
            self.peak = max(self.peak, self.alive_bytes())
        return out

    def alive_bytes(self) -> int:
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        return sum(num_bytes for _, num_bytes in self.alive.values())


def run_both_passes(hidden, weight, targets, entropy_gradient, **options):
    logprobs, entropies = token_logprobs(
        hidden, targets, OutputHead(weight), entropy_gradient=entropy_gradient, **options
    )
    grads = [torch.ones_like(logprobs)] * (1 + entropy_gradient)
    torch.autograd.backward([logprobs, entropies][: 1 + entropy_gradient], grads)


CASES = pytest.mark.parametrize(
    "trains_head, entropy_gradient, keep_softmax, chunk_size",
    [
        (True, False, False, 16),
        (True, True, False, 512),
        (False, True, False, 16),
        (False, False, False, 32),
        (True, False, True, 16),
    ],
)


@CASES
@pytest.mark.share(2)
def test_bytes_are_those_of_all_tensors(
    device, kernels_everywhere, trains_head, entropy_gradient, keep_softmax, chunk_size
):
    """Within what a few numbers per token are; in float32, of which a CPU's products make no copies."""
    n, d, v = 64, 32, 4096
    hidden = torch.randn(n, d, device=device, requires_grad=True)
    weight = torch.randn(v, d, device=device, requires_grad=trains_head)
    targets = torch.randint(v, (n,), device=device)
    gc.freeze()  # what there is need not be looked through
    with LiveBytes() as seen:
        run_both_passes(
            hidden, weight, targets, entropy_gradient, chunk_size=chunk_size, keep_softmax=keep_softmax
        )
    gc.unfreeze()
    outputs = hidden.nbytes + trains_head * weight.nbytes
    told = dict(trains_head=trains_head, entropy_gradient=entropy_gradient, keep_softmax=keep_softmax)
    expected = logprob_bytes(n, d, v, torch.float32, chunk_size=chunk_size, **told)
    assert abs(seen.peak - outputs - expected) <= n * 4 * 16


@pytest.mark.gpu
@CASES
def test_bytes_are_those_of_the_allocator(trains_head, entropy_gradient, keep_softmax, chunk_size):
    n, d, v, chunk_size = 8192, 512, 100_000, 16 * chunk_size
    hidden = torch.randn(n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, d, device="cuda", dtype=torch.bfloat16, requires_grad=trains_head)
    targets = torch.randint(v, (n,), device="cuda")
    options = dict(chunk_size=chunk_size, keep_softmax=keep_softmax)
    run_both_passes(hidden, weight, targets, entropy_gradient, **options)  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_both_passes(hidden, weight, targets, entropy_gradient, **options)
    peak = torch.cuda.max_memory_allocated() - before
    outputs = hidden.nbytes + trains_head * weight.nbytes
    told = dict(options, trains_head=trains_head, entropy_gradient=entropy_gradient)
    expected = logprob_bytes(n, d, v, torch.bfloat16, **told)
    unused = n * 4 * 16 + 6 * 2**20  # the allocator leaves up to 1 MiB unused
    # PyTorch 2.11 keeps cuBLAS's workspace, and 2.15 takes it anew for each product.
    workspace = 0 if torch.__version__.startswith("2.11.") else 32 * 2**20
    assert -unused <= peak - outputs - expected <= unused + workspace


@pytest.mark.gpu
def test_two_to_the_31_products(device):
    num_rows, vocab_size = 14_200, 151_936
    products = torch.zeros(num_rows, vocab_size, device=device)
    assert products.numel() > 2**31
    products[:, -1] = 12.0
    targets = torch.full((num_rows,), vocab_size - 1, device=device)
    log_z, logprobs, _ = statistics(products, targets)
    total = torch.tensor(12.0, dtype=torch.float64).exp() + vocab_size - 1
    torch.testing.assert_close(log_z.double().cpu(), total.log().expand(num_rows), rtol=2e-6, atol=0)
    out = torch.empty(num_rows, vocab_size, dtype=torch.bfloat16, device=device)
    softmax_gradient(
        products,
        targets,
        None,
        1.0,
        None,
        log_z=log_z,
        entropies=None,
        grad_logprobs=torch.ones(num_rows, device=device),
        grad_entropies=None,
        first_column=0,
        out=out,
    )
    torch.testing.assert_close(out[:, -1].float(), 1 - logprobs.exp(), rtol=2.0**-8, atol=0)
    torch.testing.assert_close(out[:, 0].float(), -(-log_z).exp(), rtol=2.0**-8, atol=0)
    assert (out[:, :-1] == out[0, 0]).all()
