#!/usr/bin/env bash
# Profile one move: nsys for the timeline, ncu for what the kernel does with the memory system. Reports go below $OUT.
#   perf/nsight.sh 'Llama-3-70B, TP2 to TP8, NHD, page 64, scattered' [gather|scatter] [SMs]
# perf/README.md says how to read them.
set -euo pipefail
cd "$(dirname "$0")/.."
CASE=${1:?name a case of perf/cases.py, as its benchmark prints it}
WAY=${2:-gather}
SMS=${3:-}
OUT=${OUT:-out}/nsight
mkdir -p "$OUT"
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
RUN=("$PYTHON" -W ignore -m perf.one_move --case "$CASE" --way "$WAY" ${SMS:+--sms "$SMS"})

# A case that is not known, or a machine without a GPU, ends it here.
"${RUN[@]}" --runs 1

if command -v nsys > /dev/null; then
    nsys profile --force-overwrite true --trace cuda,nvtx --output "$OUT/timeline" "${RUN[@]}" --runs 20
    nsys stats --report cuda_gpu_kern_sum,nvtx_sum "$OUT/timeline.nsys-rep" | tee "$OUT/timeline.txt"
else
    echo "nsys is not on the PATH: no timeline"
fi

if command -v ncu > /dev/null; then
    # The clocks stay as they are: locking them needs rights, and the machine may be shared.
    ncu --clock-control none --kernel-name regex:move_kernel --launch-skip 3 --launch-count 1 --force-overwrite \
        --section SpeedOfLight --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables \
        --section Occupancy --section LaunchStats --section WarpStateStats --section SourceCounters \
        --export "$OUT/kernel" "${RUN[@]}" --runs 5
    ncu --import "$OUT/kernel.ncu-rep" --page details | tee "$OUT/kernel.txt"
else
    echo "ncu is not on the PATH: no kernel report"
fi
