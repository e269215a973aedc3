#!/bin/bash
# Rollouts in 8 bits on one H100 or H200, from the repository's root:  bash fp8_job.sh PART
#
#   tests       kernels' tests (-n 4), then the engine's and the arena's in one process
#   variants    only if tests of 64 queries fail: errors of the prefix kernel, compiled in several ways
#   attention   microseconds of decode attention, bf16 beside 8 bits, and the bandwidth that they reach
#   speed       the three speed-ups of issue 24, all in one process
#   log_ratios  trains a small model (40 s) and measures log-ratios of the three precisions
#   merge       claims of what lies in $OUT/records (no GPU)
#
# Takes: CUDA_VISIBLE_DEVICES, OUT, COLOCATE_COMMIT (the commit, where there is no repository), PYTHON, N (pytest
# processes), REPS (repetitions of a rollout, 2), TINY=1 (to try it on a CPU), T (the part's limit in seconds).
set -u
part=${1:?which part}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/fp8-out}
N=${N:-4} REPS=${REPS:-2} TINY=${TINY:-}
mkdir -p "$OUT/records"
export OUT TINY REPS PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export COLOCATE_COMMIT="${COLOCATE_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-fp8}"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
limit() { timeout --signal=INT --kill-after=20 "${T:-$1}" "${@:2}"; echo "[$part] status $? after ${SECONDS} s"; }

tests() {
  # bitsandbytes is only imported by the contract's tests of 4 bits, which are not among these.
  cat > "$work/without_4bit.py" <<'PY'
import importlib.util, sys, types
if importlib.util.find_spec("bitsandbytes") is None:
    stub = types.ModuleType("quantized_models")
    stub.make_4bit_model = None
    sys.modules["quantized_models"] = stub
PY
  export PYTHONPATH="$work:$PYTHONPATH"
  local xdist=(); "$PYTHON" -c "import xdist" 2>/dev/null && xdist=(-n "$N" --dist load)
  local mark=gpu; [ -n "$TINY" ] && mark="not gpu and not slow"
  # Kernels: rounding, storing, decode attention; of the shapes those in bfloat16 and in 8 bits.
  limit 150 "$PYTHON" -m pytest -q -p without_4bit "${xdist[@]}" -m "$mark" --durations=5 ${COLLECT:-} \
    tests/kernel_tests/test_quantize.py tests/kernel_tests/test_attention.py tests/kernel_tests/test_interpreter.py \
    -k "not (model_shapes and (float16 or float32) and not bfloat16)" 2>&1 | tee "$OUT/tests-kernels.log" | tail -60
  # The engine in 8 bits by the contract, turns found in the cache, pages in the arena.
  limit 120 "$PYTHON" -m pytest -q -p without_4bit "${xdist[@]}" -m "$mark and not vllm and not trtllm" \
    --durations=5 ${COLLECT:-} tests/unit/test_engine_contract.py tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_arena.py \
    -k "fp8 or conversation_finds or copies_pages or 8_bits" 2>&1 | tee "$OUT/tests-engine.log" | tail -60
}

variants() {
  cat > "$work/variants.py" <<'PY'
"""Largest errors of decode attention in 8 bits with shared prefixes, the prefix kernel compiled in several ways."""
import sys, itertools, pathlib
sys.path[:0] = ["tests/kernel_tests", "tests/unit", "tests"]
import torch
import test_attention as t
from colocate.kernels import decode_attention as a

kernel, launches = a.prefix_kernel, dict(a.PREFIX_LAUNCH)
class Compiled:
    def __init__(self, **changed): self.changed = changed
    def __getitem__(self, grid): return lambda *args, **kw: kernel[grid](*args, **{**kw, **self.changed})

shapes = [(12, 2, 128, 64), (28, 4, 128, 64), (32, 8, 64, 64), (8, 4, 256, 64)]
device = torch.device("cuda")
for heads, kv, dim, page in shapes:
    pages = 2048 // page
    groups = [(pages, [1, 100, 700, 0, 350, 9, 64, 65]), (pages // 4, [5, 300]), (0, [1, 257])]
    case = t.Case(groups, num_heads=heads, num_kv_heads=kv, head_dim=dim, page_size=page, dtype=torch.bfloat16, is_8bit=True).make(device)
    expected = case.reference()
    def error(prefixes):
        case._storage.copy_(case._pristine)
        return float((case.run(prefixes).cpu().double() - expected).abs().max())
    print((heads, kv, dim, page), "no prefixes", f"{error(None):.4f}", flush=True)
    for asm, stages, warps in itertools.product((True, False), (1, 2, 3), (4, 8)):
        a.prefix_kernel = Compiled(IN_ASM=asm, num_stages=stages, num_warps=warps)
        try: found = [f"{error(case.prefixes()):.4f}" for _ in range(3)]
        except Exception as e: found = type(e).__name__ + ": " + str(e)[:80]
        print("   prefixes, asm", asm, "stages", stages, "warps", warps, found, flush=True)
    a.prefix_kernel = kernel
PY
  limit 150 "$PYTHON" "$work/variants.py" 2>&1 | tee "$OUT/variants.log"
}

attention() {
  cat > "$work/attention.py" <<'PY'
"""Microseconds of a layer's decode attention in bf16 and in 8 bits, median of 30 behind one another in a graph."""
import json, os, pathlib
import torch
from colocate.kernels import decode_attention as a, e4m3
from colocate.kernels.definitions import Rotation

def timed(rows, heads, kv, dim, context, dtype, page=64):
    device = torch.device("cuda")
    per_row = -(-context // page)
    block = e4m3.head_block_size(page, dim, dtype)
    size = dtype.itemsize
    data = torch.zeros(rows * per_row, 2, kv, block * size, dtype=torch.uint8, device=device)
    if size == 1:
        data.random_(0, 120)
        data[..., page * dim :] = 127
    else:
        data.view(dtype).normal_()
    caches = [data[:, i, :, : page * dim * size].view(dtype).unflatten(-1, (page, dim)) for i in (0, 1)]
    table = torch.randperm(rows * per_row, device=device).int().view(rows, per_row)
    lens = torch.full((rows,), context, dtype=torch.int32, device=device)
    slots = (table[:, (context - 1) // page] * page + (context - 1) % page).int()
    qkv = torch.randn(rows, heads + 2 * kv, dim, dtype=torch.bfloat16, device=device)
    cos, sin = torch.randn(2, context, dim, dtype=torch.bfloat16, device=device)
    sizes = dict(max_num_seqs=rows, num_heads=heads, num_kv_heads=kv, head_dim=dim)
    scratch = a.DecodeScratch(torch.empty(a.DecodeScratch.num_bytes(**sizes), dtype=torch.uint8, device=device), **sizes)
    out = torch.empty(rows, heads, dim, dtype=torch.bfloat16, device=device)
    def once():
        a.decode_attention(qkv, Rotation(cos, sin, None, None, 1e-6), slots, *caches, table, lens, None, scratch,
                           scale=dim**-0.5, sliding_window=None, num_splits=a.num_splits_for(rows, kv), out=out)
    once(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5): once()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); graph.replay(); end.record(); torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 5 * 1e3)
    us = sorted(times)[len(times) // 2]
    read = rows * context * kv * 2 * (dim + 1 if size == 1 else 2 * dim)
    return {"us": us, "tb_per_s": read / us / 1e6}

record = {"kind": "attention", "gpu": torch.cuda.get_device_name(), "cases": []}
for rows, heads, kv, dim, context in [(256, 12, 2, 128, 4200), (512, 12, 2, 128, 768), (256, 28, 4, 128, 1024), (64, 12, 2, 128, 1024), (8, 12, 2, 128, 4096), (256, 32, 8, 64, 1024)]:
    found = {str(d): timed(rows, heads, kv, dim, context, d) for d in (torch.bfloat16, e4m3.DTYPE)}
    record["cases"].append({"rows": rows, "heads": heads, "kv": kv, "dim": dim, "context": context, **found})
    print(rows, heads, kv, dim, context, {k: (round(v["us"], 1), round(v["tb_per_s"], 2)) for k, v in found.items()}, flush=True)
pathlib.Path(os.environ["OUT"], "attention.json").write_text(json.dumps(record, indent=1))
PY
  limit 90 "$PYTHON" "$work/attention.py" 2>&1 | tee "$OUT/attention.log"
}

speed() {
  cat > "$work/speed.py" <<'PY'
"""The cases one after the other in one process; a record is written after each precision."""
import gc, os, pathlib, sys, time, traceback
import torch
from benchmarks.precision import speed
# The claims' precisions first; CASES chooses.
cases = {"7b_256seq": ["bf16", "fp8"], "1p5b_4k_256seq": ["bf16", "fp8_kv"], "1p5b_512seq": ["bf16", "fp8"]}
chosen = os.environ.get("CASES", " ".join(cases)).split()
for case in chosen:
    out = pathlib.Path(os.environ["OUT"], "records", f"{time.time_ns()}-{case}.json")
    sys.argv = ["speed", case, "--precisions", *cases[case], "--repetitions", os.environ["REPS"], "--out", str(out)]
    sys.argv += ["--tiny"] if os.environ["TINY"] else []
    begin = time.perf_counter()
    try:
        speed.main()
    except Exception:
        traceback.print_exc()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"{case}: {time.perf_counter() - begin:.0f} s", flush=True)
PY
  limit 240 "$PYTHON" "$work/speed.py" 2>&1 | tee "$OUT/speed.log"
  merge
}

log_ratios() {
  limit 200 "$PYTHON" -m benchmarks.precision.log_ratios ${TINY:+--tiny} --seconds "${SECONDS_OF_TRAINING:-40}" \
    --out "$OUT/records/$(date +%s%N)-log_ratios.json" 2>&1 | tee "$OUT/log_ratios.log"
  merge
}

merge() {
  "$PYTHON" - <<'PY'
import json, os, pathlib
from benchmarks.precision.suite import compute_claims
records = [json.loads(path.read_text()) for path in sorted(pathlib.Path(os.environ["OUT"], "records").glob("*.json"))]
print(json.dumps({name: value for name, value in compute_claims(records).items() if value is not None}, indent=1))
PY
}

nvidia-smi --query-gpu=name,uuid --format=csv,noheader 2>/dev/null
case "$part" in
  tests|variants|attention|speed|log_ratios|merge) "$part" ;;
  *) echo "no part $part"; exit 2 ;;
esac
