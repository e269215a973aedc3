#!/usr/bin/env bash
# Few-row products on one GPU:  decode_job.sh tests | measure | before
# Run from the root of a checkout of gpu-decode or gpu-all.
#   OUT               where records go: $OUT/records-decode (default: /tmp/decode-out)
#   BEFORE            folder with the src of main, for `measure` and `before` (default: before/ beside this script)
#   COLOCATE_COMMIT   what is measured, where there is no repository
#   MODEL_DIR         where the 1.5B model of random weights is or is made (3 GB)
#   JOB_PACK=1        one file, $OUT/records-decode.tar.gz, in place of the folder
#   JOB_N             processes of the kernels' tests (default: 4)
#   PYTHON            the interpreter
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERB=${1:-tests}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/decode-out}
BEFORE=${BEFORE:-$HERE/before}
MODEL_DIR=${MODEL_DIR:-/tmp/colocate-models}
RECORDS=$OUT/records-decode
mkdir -p "$RECORDS" "$MODEL_DIR"
export OUT COLOCATE_COMMIT=${COLOCATE_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
HARDWARE=$(nvidia-smi --query-gpu=name --format=csv,noheader --id=0 2>/dev/null | grep -oiE 'h[12]00' | head -1 | tr A-Z a-z)
STATUS=0
EXTRA=${JOB_PYTEST:-}  # --collect-only, for a dry run

part() {  # part SECONDS NAME COMMAND...: runs it, says how long it took, and goes on whatever came of it
    local limit=$1 name=$2 start=$SECONDS code; shift 2
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" > "$RECORDS/$name.txt" 2>&1; code=$?
    [ $code -eq 0 ] && tail -n 14 "$RECORDS/$name.txt" | cut -c1-300 || tail -n 60 "$RECORDS/$name.txt" | cut -c1-300
    echo "== $name: status $code, $((SECONDS - start)) s"
    [ $code -eq 0 ] || { STATUS=1; FAILED="${FAILED:-} $name($code)"; }
}
have() { "$PYTHON" -c "import $1" 2>/dev/null; }
spread() { [ -z "$EXTRA" ] && have xdist && echo "-n ${JOB_N:-4}"; }
finish() {
    find "$RECORDS" \( -name '*.log' -size 0 -o -type d -empty \) -delete
    if [ -d "$RECORDS" ] && [ "${JOB_PACK:-0}" = 1 ]; then
        tar -czf "$RECORDS.tar.gz" -C "$OUT" records-decode && rm -rf "$RECORDS"
    fi
    echo "== decode_job $VERB: ${SECONDS} s, failed:${FAILED:- none}"; exit $STATUS
}

case $VERB in
tests)
    # Kernels: streamed products, norms, decode attention; swiglu for few rows overlaps, too.
    part 170 kernels "$PYTHON" -m pytest -v -rfE --tb=short --durations=6 $EXTRA $(spread) -m "gpu and not multi_gpu" -p no:cacheprovider \
        tests/kernel_tests/test_streamed.py tests/kernel_tests/test_layers.py tests/kernel_tests/test_norm_offset.py \
        tests/kernel_tests/test_attention.py tests/kernel_tests/test_swiglu.py tests/kernel_tests/test_triton_backend.py
    # The engine in one process, since its tests count the device's memory: first what is in 16 bits or captured.
    CORE="bfloat16 or read_ahead or optimizer_steps or captured_draws or another_precision or 200_turns"
    part 120 engine "$PYTHON" -m pytest -v -rfE --tb=short --durations=6 $EXTRA -p no:xdist -m "gpu and not multi_gpu" -p no:cacheprovider \
        tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_engine_lora.py -k "$CORE"
    part 150 engine-rest "$PYTHON" -m pytest -v -rfE --tb=short --durations=6 $EXTRA -p no:xdist -m "gpu and not multi_gpu" -p no:cacheprovider \
        tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_engine_lora.py -k "not ($CORE)"
    have bitsandbytes && part 60 engine-4bit "$PYTHON" -m pytest -v -rfE --tb=short --durations=6 $EXTRA -p no:xdist -m "gpu and not multi_gpu" \
        -p no:cacheprovider tests/gpu/test_gpu_engine_4bit.py
    ;;
measure | before)
    part 90 model "$PYTHON" -c "
from pathlib import Path
from benchmarks.rollout.cases import model_directory
print(model_directory(Path('$MODEL_DIR'), '1.5b'))"
    SUITE=(-m benchmarks.rollout.decode_suite --records "$RECORDS" --model-dir "$MODEL_DIR" --hardware "${HARDWARE:-h200}")
    [ "$VERB" = measure ] && part 150 after "$PYTHON" "${SUITE[@]}"
    if [ -d "$BEFORE/src/colocate" ]; then
        # Its name sorts before those of the suite, whose claims are those of the last commit.
        (
            export PYTHONPATH=$BEFORE/src:$PYTHONPATH COLOCATE_COMMIT=$(cat "$BEFORE/COMMIT" 2>/dev/null || echo main)
            part 120 before "$PYTHON" -m benchmarks.rollout.decode --model-dir "$MODEL_DIR" --out "$RECORDS/0-before.json"
            exit $STATUS
        ) || { STATUS=1; FAILED="${FAILED:-} before"; }
        part 30 merge "$PYTHON" "${SUITE[@]}" --merge
    fi
    ;;
*) echo "decode_job.sh tests | measure | before"; exit 2 ;;
esac
finish
