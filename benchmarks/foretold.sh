#!/usr/bin/env bash
# Measures the steps that forecasts are held against (python -m benchmarks.predictions OUT/*.json).
# One H200 with 125 GiB of host memory: under 9 minutes.  Usage: benchmarks/foretold.sh OUT
set -u
out=${1:?folder for the results}
mkdir -p "$out"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# name, then options of `python -m benchmarks.step`
measure() {
    local name=$1
    shift
    echo "== $name"
    timeout 120 python -m benchmarks.step --warmup 2 --steps 3 --output "$out/step-$name.json" \
        "$@" >"$out/$name.log" 2>&1 || { echo "failed: $name"; tail -n 3 "$out/$name.log"; }
}
# All choices of a placement; what is not said is as it is by default.
place() { for choice in "$@"; do printf -- '--placement %s ' "$choice"; done; }

streamed=$(place slots=3 compile=true head_tokens=8192)
kept=$(place slots=3 compile=true head_tokens=8192 save_activations=6)
away=$(place slots=3 compile=true head_tokens=8192 layer_inputs=host)
frugal=$(place slots=2 compile=true head_tokens=2048 layer_inputs=host gradient_lanes=2 keep_rows=false)

# shellcheck disable=SC2086
{
    measure 0.5b-64x1024 --shape 0.5b --sequences 64 --micro-batch 32 $streamed
    measure 0.5b-64x1024-auto --shape 0.5b --sequences 64 --micro-batch auto
    measure 1.5b-32x1024 --shape 1.5b --sequences 32 --micro-batch 8 $streamed
    measure 1.5b-32x1024-noclip --shape 1.5b --sequences 32 --micro-batch 8 --max-grad-norm 0 $streamed
    measure 1.5b-4x8192 --shape 1.5b --sequences 4 --sequence-length 8192 --micro-batch 1 $streamed
    measure 1.5b-2x32768-away --shape 1.5b --sequences 2 --sequence-length 32768 --micro-batch 1 $away
    measure 3b-8x1024 --shape 3b --sequences 8 --micro-batch 8 $streamed
    measure 3b-8x1024-auto --shape 3b --sequences 8 --micro-batch auto
    measure 3b-32x1024-kept --shape 3b --sequences 32 --micro-batch 16 $kept
    measure 3b-32x1024-away --shape 3b --sequences 32 --micro-batch 16 $away
    measure 3b-32x1024-noclip-kept --shape 3b --sequences 32 --micro-batch 16 --max-grad-norm 0 $kept
    measure 3b-16x1024-frugal --shape 3b --sequences 16 --micro-batch 4 $frugal
    # Building 7B takes most of a minute: three of them.
    measure 7b-16x1024 --shape 7b --sequences 16 --micro-batch 8 $streamed
    measure 7b-96x1024-auto --shape 7b --sequences 96 --micro-batch auto --warmup 1
    measure 7b-4x8192-frugal --shape 7b --sequences 4 --sequence-length 8192 --micro-batch 1 $frugal
}
python -m benchmarks.predictions "$out"/step-*.json
