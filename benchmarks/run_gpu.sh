#!/usr/bin/env bash
# Everything that needs a GPU, in stages. Each stage writes its rows as they come, and ends by itself within its time.
#
#     benchmarks/run_gpu.sh [--seconds N] [--rows PATTERN] [--resume] [--rehearse] FOLDER [STAGE ...]
#
# Without a STAGE all of them run. FOLDER gets STAGE.jsonl, a line of JSON for each row, and run.log.
#
# --seconds   for all stages together; the last ones get what is left of it
# --rows      only rows whose whole names match this regular expression: 'LLaMA (none|full|compiled.*)'
# --resume    keep the rows that FOLDER has, and measure those that are missing
# --rehearse  small sizes, on the CPU: to see that all of it works
# WHEELS      a folder of wheels to install first, where there is no network
# COMMIT      that of this source tree, where it is no clone, or one with another history
# SCRATCH     a folder for these and for caches, which later runs find there (default: in TMPDIR)
#
# Exits with 1 if a row has an error, or if a stage had to be stopped.
set -uo pipefail

stages=(probe tests codecs training largest_batch zero3 trace)
declare -A minutes=([probe]=3 [tests]=5 [codecs]=4 [training]=9 [largest_batch]=5 [zero3]=3 [trace]=2)
usage="usage: benchmarks/run_gpu.sh [--seconds N] [--rows PATTERN] [--resume] [--rehearse] FOLDER [STAGE ...]; stages: ${stages[*]}"
seconds=86400 rehearses= options=() resume=()
while [[ ${1:-} == --* ]]; do
    case $1 in
        --seconds) seconds=${2:?$usage}; shift 2 ;;
        --rows) options+=(--rows "${2:?$usage}"); shift 2 ;;
        --resume) resume=(--resume); shift ;;
        --rehearse) rehearses=yes; options+=(--rehearse); shift ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
out=$(realpath -m "${1:?$usage}")
shift
[[ $# -gt 0 ]] && stages=("$@")
for stage in "${stages[@]}"; do
    [[ -v minutes[$stage] ]] || { echo "there is no stage $stage; $usage" >&2; exit 2; }
done
scratch=$(realpath -m "${SCRATCH:-${TMPDIR:-/tmp}/ds_adacc_gpu_$UID}")
wheels=${WHEELS:+$(realpath -m "$WHEELS")}
cd "$(dirname "$0")/.."
mkdir -p "$out" "$scratch" || exit 2
log=$out/run.log

# What is compiled or measured once is kept in SCRATCH, as other folders may be read-only.
export XDG_CACHE_HOME=$scratch/cache TRITON_CACHE_DIR=$scratch/triton TORCHINDUCTOR_CACHE_DIR=$scratch/inductor
[[ -w ${HOME:-/nowhere} ]] || export HOME=$scratch
[[ -w kernels/cpu ]] || export NUMBA_CACHE_DIR=$scratch/numba
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore::FutureWarning OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [[ -n $rehearses ]]; then
    # What is freed leaves the process, so that its resident memory is what it uses.
    export CUDA_VISIBLE_DEVICES= MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536
fi

if [[ -n $wheels ]]; then
    site=$scratch/site-packages  # by this name ds_adacc knows that what lies in it is no code of the user's
    if [[ ! -e $site/.complete ]]; then
        echo "installing the wheels in $wheels"
        python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl \
            >>"$log" 2>&1 && touch "$site/.complete" || { tail -n 25 "$log"; exit 1; }
    fi
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# ds_adacc asks for its own version, so these sources must be installed; that needs no network.
if ! (cd "$scratch" && python3 -c "import ds_adacc") >>"$log" 2>&1; then
    echo "installing ds_adacc from here"
    python3 -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . >>"$log" 2>&1 ||
        { tail -n 25 "$log"; exit 1; }
fi
export PYTHONPATH=$PWD/benchmarks:$PWD/examples:$PWD/tests/helpers${PYTHONPATH:+:$PYTHONPATH}

# Runs a stage. If its process dies, or loses the device to a kernel that failed, another goes on behind the row it died of.
run() {
    local stage=$1 ends=$2 resume=("${resume[@]}") settings=(env) code
    # Without this, gaps in the allocator's memory decide how large a batch fits.
    [[ $stage != largest_batch ]] || settings+=("PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}")
    for _ in 1 2 3 4; do
        local left=$((ends - SECONDS))
        [[ $left -gt 0 ]] || break
        # A stage that does not end by itself is stopped a little later.
        timeout --kill-after=10 $((left + 10)) "${settings[@]}" python3 "benchmarks/gpu/${stage}_stage.py" "$out" \
            --until $((EPOCHSECONDS + left)) "${resume[@]}" "${options[@]}" >>"$log" 2>&1
        code=$?
        [[ $code -eq 75 || $code -gt 128 || -e $out/$stage.running ]] || return $code
        resume=(--resume)
    done
    return 1
}

status=0
for stage in "${stages[@]}"; do
    ends=$((SECONDS + 60 * minutes[$stage]))
    [[ $ends -lt $seconds ]] || ends=$seconds
    echo "== $stage, at $SECONDS s" | tee -a "$log"
    [[ $SECONDS -lt $ends ]] || { status=1; echo "no time is left"; continue; }
    run "$stage" "$ends" || { status=1; echo "a row has an error, or the stage was stopped; the end of $log:"; tail -n 15 "$log"; }
    [[ -e $out/$stage.running ]] && echo "it was stopped in the row $(cat "$out/$stage.running")"
    rm -f "$out/$stage.running"
    if [[ -e $out/$stage.jsonl ]]; then
        echo "$(wc -l <"$out/$stage.jsonl") rows: $(grep -c '"error": ' "$out/$stage.jsonl") with an error," \
            "$(grep -c '"out_of_memory": ' "$out/$stage.jsonl") out of memory, $(grep -c '"skipped": ' "$out/$stage.jsonl") skipped"
    fi
done
exit $status
