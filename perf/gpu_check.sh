#!/usr/bin/env bash
# What only a GPU can prove, in one command under 10 minutes: GPU tests on random data against the definition, the kernel
# benchmarks beside their peers, and two NIXL processes on the one GPU. Everything is left below $OUT (default: out).
# PYTHON names an interpreter with torch, triton and pytest where there is no .venv; KVMOVER_PEERS a folder with sglang/.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

step() { # name, seconds, command...
    local name=$1 seconds=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" > "$OUT/$name.log" 2>&1
    local code=$?
    tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log"
    [ $code -eq 0 ] || { echo "== $name failed with status $code"; status=1; }
}

nvidia-smi > "$OUT/nvidia-smi.log" 2>&1
step tests 240 "$PYTHON" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider -m gpu tests/gpu tests/cache/tiers/test_tiers_on_a_gpu.py
LINES_SHOWN=200 step kernels 240 "$PYTHON" -W ignore -m perf.bench_kernels --rounds 20 --out "$OUT"
LINES_SHOWN=60 step host 90 "$PYTHON" -W ignore -m perf.bench_host --out "$OUT"
LINES_SHOWN=60 step roofline 90 "$PYTHON" -W ignore -m perf.roofline --out "$OUT"
for bench in quant digest; do
    LINES_SHOWN=30 step "$bench" 60 "$PYTHON" -W ignore -m "perf.bench_$bench" --out "$OUT"
done
exit $status
