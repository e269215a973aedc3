#!/bin/bash
# What waits for a GPU, by call:  jobs/next.sh pool | eight_bits | handover | few_rows   (from the repository's root)
#   pool        two GPUs, 110 s: 50 publications to two native servers (issue 23's last figure); needs starlette, uvicorn,
#               httptools, sse-starlette and datasets on PYTHONPATH, no vLLM
#   eight_bits  one GPU, 30 + 150 s: fp8_check.py, then fp8_job.sh tests; if they pass, fp8_job.sh speed | log_ratios
#   handover    one H100, 80 + 140 s: the recipe as it is now, its record, and the picture for the README
#   few_rows    one GPU, 90 + 100 s: decode_job.sh measure, and profiles of steps of 8, 64 and 128 rows
# A site with vLLM fits two calls of 64 MiB: unpack the packed wheels, `rm -rf flashinfer/data/cutlass mistral_common/data`,
# `strip --strip-debug` of all .so, then vllm/_C_stable_libtorch.abi3.so alone (51 MiB as .xz) and the rest (43 MiB).
set -u
export OUT=${OUT:-/tmp/out} PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
HW=h100; nvidia-smi -L | grep -q H200 && HW=h200
mkdir -p "$OUT"
case ${1:?which} in
pool) python3 -m benchmarks.pool.publish_suite --parts native --hardware ${HW}x2 --records /tmp/records/pool ;;
eight_bits) timeout 60 python3 jobs/fp8_check.py; OUT=$OUT/fp8 bash jobs/fp8_job.sh tests ;;
handover)
    python3 -m benchmarks.recipes.suite --hardware $HW --parts handover --seeds 1 --option output_dir=/tmp/handover-run --records /tmp/recipes
    python3 -c "from colocate.reporting.picture import write_picture; print(write_picture('/tmp/handover-run'))"
    cp /tmp/handover-run/*.json* /tmp/handover-run/*.svg /tmp/handover-run/*.yaml "$OUT/" ;;
few_rows)
    bash jobs/decode_job.sh measure
    for rows in 8 64 128; do  # where a step's time goes: not known yet
        python3 -c "
import sys
from benchmarks.rollout.cases import CASES, Case
CASES['few'] = Case('1.5b', $rows, 1, 256, 512)
from benchmarks.rollout import profile
sys.argv = ['profile', 'few', '--hardware', '$HW']
profile.main()" && mv "$OUT/decode-profile-$HW.json" "$OUT/decode-profile-$rows-$HW.json"
    done ;;
esac
