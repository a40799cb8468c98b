#!/usr/bin/env bash
# The gpu tests and every GPU benchmark, in under nine minutes; all they print and record goes to the folder given.
#
#     benchmarks/run_gpu.sh FOLDER
#
# Needs the installed requirements of `ds-adacc[cuda13]` (or cuda12) and pytest; ds_adacc itself is taken from here.
set -uo pipefail
out=$(realpath -m "${1:?usage: benchmarks/run_gpu.sh FOLDER}")
cd "$(dirname "$0")/.."
mkdir -p "$out"
python -m pip install --no-deps --no-build-isolation --quiet --editable .

status=0
part() {
    local name=$1 seconds=$2
    shift 2
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || { status=1; echo "$name failed; see $out/$name.log"; }
    tail -n 25 "$out/$name.log"
}

nvidia-smi >"$out/nvidia-smi.log" 2>&1
part tests 180 python -m pytest -m gpu -o timeout=120
part codecs 150 python benchmarks/codecs.py --out "$out"
part strategies 200 python benchmarks/strategies.py --out "$out"
exit $status
