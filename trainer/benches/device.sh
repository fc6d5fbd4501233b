#!/usr/bin/env bash
# Checks a GPU against the CPU and measures it, on a host that has one. Nothing is built: the binary is carried there.
#
#   trainer/benches/device.sh TARGET/release OUT [DEVICE]
#
# TARGET/release holds onefold-data, onefold-ingest and onefold-train; OUT is where the evidence goes, as JSON; DEVICE is cuda:0
# unless given. The host needs `python3` with torch 2.11.0+cu130, whose libraries the binary runs with. SAMPLES (60000),
# STEPS (50), ROUNDS (30) and SETS (500) make it longer or shorter: it takes a few minutes, most of them on the CPU.
set -euo pipefail

say() { printf '== %s\n' "$*" >&2; }
[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 1; }
bin=$(cd "$1" && pwd); mkdir -p "$2"; out=$(cd "$2" && pwd); device=${3:-cuda:0}
samples=${SAMPLES:-60000} steps=${STEPS:-50} rounds=${ROUNDS:-30} sets=${SETS:-500}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT

# All parts of libtorch must be of one installation.
torch=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])') ||
    { echo "error: python3 has no torch" >&2; echo "  hint: pip install torch==2.11.0" >&2; exit 1; }
export LD_LIBRARY_PATH="$torch/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export ONEFOLD_LIBTORCH_CUDA="$torch/lib"

{ nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv || true; nproc; } >"$out/host.txt" 2>&1

# Keeps the JSON object, the last line of stdout, and goes on after a failure: one broken part must not hide the others.
failed=0
measure() {
    local name=$1; shift
    say "$name: $*"
    if "$@" --json >"$work/stdout" 2> >(tee "$out/$name.log" >&2); then tail -1 "$work/stdout" >"$out/$name.json"
    else tail -1 "$work/stdout" >"$out/$name.failed.json"; failed=1; fi
}

measure check-kernels "$bin/onefold-train" check-device --device "$device" --seeds 200
# What `onefold-shard pretrain` makes a cost model of this GPU from.
measure profile "$bin/onefold-train" profile --device "$device" --sets "$sets" --out "$out/costs.parquet" --overwrite
for workload in rm1 rm2 rm3; do
    say "$workload: $samples samples"
    "$bin/onefold-data" generate --workload "$workload" --samples "$samples" --seed 1 --out "$work/$workload" >/dev/null
    "$bin/onefold-ingest" build "$work/$workload/dataset.toml" --out "$work/$workload-dataset" >/dev/null
    data=$work/$workload-dataset
    # B = 2,048: as many steps as there are batches, at most.
    most=$((samples / 2048)); most=$((most < steps ? most : steps))
    measure "check-$workload" "$bin/onefold-train" check-device --device "$device" --seeds 1 \
        --workload "$workload" --data "$data" --steps "$most"
    measure "bench-$workload-device" "$bin/onefold-train" bench --workload "$workload" --data "$data" \
        --device "$device" --rounds "$rounds"
    measure "bench-$workload-cpu" "$bin/onefold-train" bench --workload "$workload" --data "$data" --rounds 5
    for dedupe in off exact window; do
        measure "run-$workload-$dedupe" "$bin/onefold-train" run "$work/$workload/train.toml" --data "$data" \
            --device "$device" --dedupe "$dedupe" --out "$work/run-$workload-$dedupe"
        rm -rf "$work/run-$workload-$dedupe"
    done
    if [ "$workload" = rm1 ]; then
        # The other blocks, tables of 16 bits and clipped gradients: the losses on both should be alike.
        sed -e '/sequence_0[01]/,+1s/attention/din/' -e '/sequence_0[23]/,+1s/attention/encoder/' \
            -e 's/^ids = .*/&\ntarget = "item_00"\ndtype = "bf16"/' -e 's/^learning_rate = 0.005/&\nmax_row_grad_norm = 0.01/' \
            "$work/rm1/train.toml" >"$work/rm1/blocks.toml"
        for where in "$device" cpu; do
            measure "run-rm1-blocks-${where%%:*}" "$bin/onefold-train" run "$work/rm1/blocks.toml" --data "$data" \
                --device "$where" --dedupe window --max-steps 10 --out "$work/run-blocks"
            rm -rf "$work/run-blocks"
        done
    fi
    rm -rf "$work/$workload" "$data"
done
[ "$failed" = 0 ] || { say "something failed: see $out/*.log"; exit 1; }
say "evidence in $out"
