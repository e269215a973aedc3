#!/usr/bin/env bash
# The first minute on one GPU:  start_job.sh tests | measure | before
# Run from the root of a checkout of gpu-start, gpu-decode or gpu-all.
#   OUT               where records go: $OUT/records-start, of main's: $OUT/records-start-before (default: /tmp/start-out)
#   BEFORE            folder with src and benchmarks of main, for `before` (default: before/ beside this script)
#   COLOCATE_COMMIT   what is measured, where there is no repository
#   MODEL_DIR         where the 1.5B model of random weights is or is made (3 GB)
#   JOB_PACK=1        one file for each folder of records
#   JOB_TINY=1        the suites' --tiny, to try this on a CPU
#   PYTHON            the interpreter
set -u
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VERB=${1:-tests}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/start-out}
BEFORE=${BEFORE:-$HERE/before}
MODEL_DIR=${MODEL_DIR:-/tmp/colocate-models}
RECORDS=$OUT/records-start
TINY=${JOB_TINY:+--tiny}
mkdir -p "$RECORDS" "$MODEL_DIR"
export OUT COLOCATE_COMMIT=${COLOCATE_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
FOUND=${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$PWD/src:$PWD$FOUND PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
HARDWARE=$(nvidia-smi --query-gpu=name --format=csv,noheader --id=0 2>/dev/null | grep -oiE 'h[12]00' | head -1 | tr A-Z a-z)
STATUS=0

part() {  # part SECONDS NAME COMMAND...: runs it, says how long it took, and goes on whatever came of it
    local limit=$1 name=$2 start=$SECONDS code; shift 2
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" > "$RECORDS/$name.txt" 2>&1; code=$?
    [ $code -eq 0 ] && tail -n 14 "$RECORDS/$name.txt" | cut -c1-300 || tail -n 60 "$RECORDS/$name.txt" | cut -c1-300
    echo "== $name: status $code, $((SECONDS - start)) s"
    [ $code -eq 0 ] || { STATUS=1; FAILED="${FAILED:-} $name($code)"; }
}
model() {
    part 90 model "$PYTHON" -c "
from pathlib import Path
from benchmarks.rollout.cases import model_directory
print(model_directory(Path('$MODEL_DIR'), '${JOB_TINY:+tiny}' or '1.5b'))"
}
finish() {
    for folder in "$OUT"/records-start*/; do
        find "$folder" \( -name '*.log' -size 0 -o -type d -empty \) -delete
        [ -d "$folder" ] || continue
        if [ "${JOB_PACK:-0}" = 1 ]; then
            tar -czf "${folder%/}.tar.gz" -C "$OUT" "$(basename "$folder")" && rm -rf "$folder"
        fi
    done
    echo "== start_job $VERB: ${SECONDS} s, failed:${FAILED:- none}"; exit $STATUS
}
EXTRA=${JOB_PYTEST:-}  # --collect-only, for a dry run

case $VERB in
tests)
    # Two processes after one another, each with an empty cache of its own.
    part 200 compile-ahead "$PYTHON" -m pytest -v -rfE --tb=short --durations=6 $EXTRA -p no:xdist -m gpu -p no:cacheprovider \
        tests/gpu/test_gpu_compile_ahead.py
    ;;
measure)
    # Each process of the suite has empty caches (TRITON_CACHE_DIR and the others) of its own.
    model
    SUITE=(-m benchmarks.start.suite --records "$RECORDS" --model-dir "$MODEL_DIR" --hardware "${HARDWARE:-h200}" $TINY)
    part 90 cold-start "$PYTHON" "${SUITE[@]}" --parts cold_start
    part 150 first-step "$PYTHON" "${SUITE[@]}" --parts step
    ;;
before)
    # What main takes on this card: two cold starts, and one run's first steps.
    RECORDS=$RECORDS-before
    mkdir -p "$RECORDS"
    model
    export COLOCATE_COMMIT=$(cat "$BEFORE/COMMIT" 2>/dev/null || echo main) PYTHONPATH=$BEFORE/src:$BEFORE$FOUND
    cd "$BEFORE" || exit 2
    SIZE=${JOB_TINY:+tiny}; SIZE=${SIZE:-1.5b}
    for number in 1 2; do
        EMPTY=$(mktemp -d)
        CACHES=(TRITON_CACHE_DIR="$EMPTY" TORCHINDUCTOR_CACHE_DIR="$EMPTY" CUDA_CACHE_PATH="$EMPTY" XDG_CACHE_HOME="$EMPTY")
        BEGIN=$("$PYTHON" -c "import time; print(time.time())")
        part 60 "cold-start-before-$number" env "${CACHES[@]}" "$PYTHON" -m benchmarks.rollout.cold_start \
            "$MODEL_DIR/qwen2.5-$SIZE-random"
        END=$(grep -E '^[0-9.]+$' "$RECORDS/cold-start-before-$number.txt" | tail -1)
        "$PYTHON" -c "print('start_cold_s before:', round(float('${END:-nan}') - float('$BEGIN'), 2))" |
            tee -a "$RECORDS/cold-starts.txt"
        rm -rf "$EMPTY"
    done
    EMPTY=$(mktemp -d)
    CACHES=(TRITON_CACHE_DIR="$EMPTY" TORCHINDUCTOR_CACHE_DIR="$EMPTY" CUDA_CACHE_PATH="$EMPTY" XDG_CACHE_HOME="$EMPTY")
    part 90 first-step-before env "${CACHES[@]}" "$PYTHON" -m benchmarks.step.run --framework colocate --shape 1.5b \
        --prompts 32 --generations 8 --prompt-tokens 256 --new-tokens 512 --micro-batch 16 --warm-up 2 --steps 3 \
        --label start --model-dir "$MODEL_DIR" --out "$RECORDS/first-step.json" $TINY
    rm -rf "$EMPTY"
    ;;
*) echo "start_job.sh tests | measure | before"; exit 2 ;;
esac
finish
