"""What 8 bits do on this GPU: PYTHONPATH=src:. python3 fp8_check.py, from the repository's root, within 30 s."""

import sys, time

sys.path[:0] = ["tests/kernel_tests", "tests/unit"]
import test_attention as T, torch, triton

T0, DEV = time.time(), torch.device("cuda")
print(torch.__version__, triton.__version__, torch.cuda.get_device_name(), "cuBLASLt via", torch.version.cuda)


def kernel(name, case, with_prefixes):
    case.make(DEV)
    case._storage.copy_(case._pristine)
    out = case.run(case.prefixes() if with_prefixes else None).cpu().double()
    off, loose = (out - case.reference()).abs(), 2 * T.TOLERANCES[case.dtype]
    want = case._expected_caches
    got = case._storage.cpu().as_strided(want.shape, want.stride(), want.storage_offset())
    places = (got != want).nonzero().tolist()  # keys or values, page, head, byte of the head's part
    print(
        f"(a) {name}: output off by {off.max():.3g}, {int((off > loose).sum())} of {off.numel()} by more than {loose:.2g}; "
        f"{len(places)} stored bytes differ [{time.time() - T0:.0f} s]"
    )
    qkv, H, K, D = case.inputs["qkv"].cpu(), case.num_heads, case.num_kv_heads, case.head_dim
    at = torch.tensor(case.contexts).sub(1).clamp(min=0)
    keys = T.rotate(
        qkv[:, H : H + K], *(t.cpu()[at][:, None] for t in (case.rotation.cos, case.rotation.sin))
    )
    for which, page, head, byte in places[:5]:
        a, e = int(got[which, page, head, byte]), int(want[which, page, head, byte])
        token, dim = divmod(byte, D) if byte < case.page_size * D else (byte - case.page_size * D, None)
        slots = case.inputs["slots"].tolist()
        row = slots.index(page * case.page_size + token) if page * case.page_size + token in slots else None
        exponent = int(want[which, page, head, case.page_size * D + token])
        x = (
            None
            if row is None or dim is None
            else float((qkv[row, H + K + head] if which else keys[row, head])[dim])
        )
        print(
            f"    {'kv'[which]} page {page} head {head} token {token} dim {dim} row {row}: {a:#04x}, expected {e:#04x}; "
            f"scale 2^{exponent - 127}, exact quotient {None if x is None else x * 2.0 ** (127 - exponent)}"
        )
    for place in (off > loose).nonzero().tolist()[:5]:
        print(
            f"    out {place}: {float(out[tuple(place)])}, expected {float(case.reference()[tuple(place)])}"
        )


def products():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for scales in ("own", "+4 bytes", "by row"):
            for bias in (None, torch.bfloat16, torch.float16):
                said = []
                for rows in (1, 7, 16, 64):
                    a, b = (torch.randn(n, 64, device=DEV).to(torch.float8_e4m3fn) for n in (rows, 128))
                    sb, sa = torch.tensor([0.5, 0.25], device=DEV)  # one behind the other
                    if scales != "+4 bytes":
                        sa = torch.full((rows, 1) if scales == "by row" else (), 0.25, device=DEV)
                    sb = torch.full((1, 128), 0.5, device=DEV) if scales == "by row" else sb
                    c = None if bias is None else torch.randn(128, device=DEV).to(bias)
                    exact = a.double() @ b.double().t() / 8 + (0 if c is None else c.double())
                    try:
                        out = torch._scaled_mm(
                            a, b.t(), sa, sb, bias=c, out_dtype=dtype, use_fast_accum=False
                        )
                        said.append(f"{rows}: {float((out.double() - exact).abs().max()):.1e}")
                    except Exception as error:
                        said.append(f"{rows}: {str(error).splitlines()[0][:70]}")
                print(f"(b) {dtype} scales {scales} bias {bias}:", "; ".join(said))


products()
T.prefixes_module.MIN_SHARED_TOKENS = T.prefixes_module.MIN_PIECE_TOKENS = 1
common, groups = dict(is_8bit=True, num_splits=1), [(4, [1, 100, 0, 9, 64, 65]), (0, [1, 257])]
kernel(
    "24 values, a dead row",
    T.Case([(0, [0])], num_heads=1, num_kv_heads=1, head_dim=24, is_page_major=False, **common),
    True,
)
kernel(
    "14-2-200-32",
    T.Case(groups, num_heads=14, num_kv_heads=2, head_dim=200, page_size=32, dtype=torch.bfloat16, **common),
    False,
)
kernel(
    "64-1-128-16",
    T.Case(groups, num_heads=64, num_kv_heads=1, head_dim=128, page_size=16, dtype=torch.bfloat16, **common),
    False,
)
