#!/usr/bin/env bash
# Checks a GPU against the CPU and measures it, on a host that has one. It builds no binaries; copy them to the host.
#
#   trainer/benches/device.sh TARGET/release OUT [DEVICE]
#
# TARGET/release is the folder with onefold-data, onefold-ingest, onefold-shard, onefold-train and onefold-train-tools (`make
# build tools`); OUT is the folder for the results, as JSON; DEVICE is cuda:0 by default. The host needs `python3` with torch
# 2.11.0+cu130, whose libraries the binaries use. It also needs a C++ compiler, with which ../cuda.sh builds the library for
# ranks and graphs, or that library in ONEFOLD_CUDA.
# SAMPLES (60000), STEPS (50), ROUNDS (30) and SETS (500) change the duration, which is a few minutes, mostly on the CPU.
# Ranks are tested on one GPU, and on all GPUs of the host.
set -euo pipefail

say() { printf '== %s\n' "$*" >&2; }
[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2; exit 1; }
trainer=$(cd "$(dirname "$0")/.." && pwd)
bin=$(cd "$1" && pwd); mkdir -p "$2"; out=$(cd "$2" && pwd); device=${3:-cuda:0}
samples=${SAMPLES:-60000} steps=${STEPS:-50} rounds=${ROUNDS:-30} sets=${SETS:-500}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

# All parts of libtorch must come from one installation.
torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])') ||
    { echo "error: python3 has no torch" >&2; echo "  hint: pip install torch==2.11.0" >&2; exit 1; }
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export ONEFOLD_LIBTORCH_CUDA="$torch/lib"

{ nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || true; nproc; } >"$out/host.txt" 2>&1

# Stores the JSON object on the last line of stdout. Continues after a failure, so that one broken part does not hide others.
failed=0
measure() {
    local name=$1; shift
    say "$name: $*"
    if "$@" --json >"$work/stdout" 2> >(tee "$out/$name.log" >&2); then tail -1 "$work/stdout" >"$out/$name.json"
    else tail -1 "$work/stdout" >"$out/$name.failed.json"; failed=1; fi
}

# Rewrites a plan of one rank so that all data is exchanged, from the rank to itself: divides tables alternately by rows and columns.
divide() {
    python3 - "$1" <<'PYTHON'
import json, sys

path = sys.argv[1]
plan = json.load(open(path))
for number, table in enumerate(plan["tables"]):
    table["sharding_type"], axis = ("column_wise", "columns") if number % 2 else ("row_wise", "rows")
    whole, = table["shards"]
    middle = whole[axis]["end"] // 2
    table["shards"] = [{**whole, axis: {**whole[axis], end: middle}} for end in ("end", "start")]
# The plan states the memory of the shards: 32-bit weights, and row-wise Adagrad's accumulator for every row of a shard.
length = lambda range: range["end"] - range["start"]
size = lambda shard: 4 * length(shard["rows"]) * (length(shard["columns"]) + 1)
plan["ranks"][0]["memory_bytes"] = sum(size(shard) for table in plan["tables"] for shard in table["shards"])
json.dump(plan, open(path, "w"))
PYTHON
}

# NCCL on one GPU, then on all GPUs.
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
jobs=1; [ "$gpus" -gt 1 ] && jobs="1 $gpus"
# With ONEFOLD_CUDA, a job of one rank uses NCCL too.
if ONEFOLD_CUDA=$("$trainer/cuda.sh" "$(dirname "$torch")"); then export ONEFOLD_CUDA; else failed=1; jobs=; fi
for ranks in $jobs; do
    measure "check-nccl-$ranks" "$bin/onefold-train-tools" launch --ranks "$ranks" -- check-device --device cuda --seeds 5
done

measure check-kernels "$bin/onefold-train-tools" check-device --device "$device" --seeds 200
# The input from which `onefold-shard pretrain` makes a cost model of this GPU.
measure profile "$bin/onefold-train-tools" profile --device "$device" --sets "$sets" --out "$out/costs.parquet" --overwrite
for workload in rm1 rm2 rm3; do
    say "$workload: $samples samples"
    "$bin/onefold-data" generate --workload "$workload" --samples "$samples" --seed 1 --out "$work/$workload" >/dev/null
    "$bin/onefold-ingest" build "$work/$workload/dataset.toml" --out "$work/$workload-dataset" \
        --buckets "$((gpus > 1 ? gpus : 1))" >/dev/null
    data=$work/$workload-dataset
    # B = 2,048: at most as many steps as there are batches.
    most=$((samples / 2048)); most=$((most < steps ? most : steps))
    measure "check-$workload" "$bin/onefold-train-tools" check-device --device "$device" --seeds 1 \
        --workload "$workload" --data "$data" --steps "$most"
    measure "bench-$workload-device" "$bin/onefold-train-tools" bench --workload "$workload" --data "$data" \
        --device "$device" --rounds "$rounds"
    for precision in tf32 bf16; do
        measure "bench-$workload-device-$precision" "$bin/onefold-train-tools" bench --workload "$workload" --data "$data" \
            --device "$device" --rounds "$rounds" --precision "$precision"
    done
    measure "bench-$workload-cpu" "$bin/onefold-train-tools" bench --workload "$workload" --data "$data" --rounds 5
    for dedupe in off exact window; do
        measure "run-$workload-$dedupe" "$bin/onefold-train" run "$work/$workload/train.toml" --data "$data" \
            --device "$device" --dedupe "$dedupe" --out "$work/run-$workload-$dedupe"
        rm -rf "$work/run-$workload-$dedupe"
    done
    if [ "$workload" = rm1 ]; then
        # The other blocks, 16-bit tables and clipped gradients: the losses on both devices should be similar.
        sed -e '/sequence_0[01]/,+1s/attention/din/' -e '/sequence_0[23]/,+1s/attention/encoder/' \
            -e 's/^ids = .*/&\ntarget = "item_00"\ndtype = "bf16"/' -e 's/^learning_rate = 0.005/&\nmax_row_grad_norm = 0.01/' \
            "$work/rm1/train.toml" >"$work/rm1/blocks.toml"
        for where in "$device" cpu; do
            measure "run-rm1-blocks-${where%%:*}" "$bin/onefold-train" run "$work/rm1/blocks.toml" --data "$data" \
                --device "$where" --dedupe window --max-steps 10 --out "$work/run-blocks"
            rm -rf "$work/run-blocks"
        done
    fi
    # The losses of ranks, to compare with those of `run-…`.
    "$bin/onefold-shard" tables "$work/$workload/train.toml" --data "$data" --out "$work/tables.json" --overwrite >/dev/null
    for ranks in $jobs; do
        "$bin/onefold-shard" topology --ranks "$ranks" --memory 60GiB --out "$work/topology.json" >/dev/null
        "$bin/onefold-shard" plan --tables "$work/tables.json" --topology "$work/topology.json" --out "$work/plan.json" >/dev/null
        [ "$ranks" -gt 1 ] || divide "$work/plan.json"
        for dedupe in exact window; do
            measure "ranks-$workload-$ranks-$dedupe" "$bin/onefold-train" launch --ranks "$ranks" -- \
                run "$work/$workload/train.toml" --data "$data" --device cuda --plan "$work/plan.json" \
                --dedupe "$dedupe" --out "$work/run-ranks"
            rm -rf "$work/run-ranks"
        done
        rm -f "$work/plan.json" "$work/topology.json"
    done
    rm -rf "$work/$workload" "$data"
done
[ "$failed" = 0 ] || { say "something failed: see $out/*.log"; exit 1; }
say "evidence in $out"
