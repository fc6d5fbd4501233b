#!/bin/bash
# Builds a dataset as a Slurm job array: each task writes one range of buckets, and the last job commits all ranges.
#
#   jid=$(sbatch --parsable --array=0-15 slurm.sh)
#   sbatch --dependency=afterok:$jid --wrap 'onefold-ingest commit "$DATASET" "$PARTS"'
#
# CONFIG is the dataset.toml, DATASET the dataset, and PARTS a folder for parts: paths that all nodes share, or URLs of an
# object store. SEGMENTS is the folder in which `onefold-ingest shard --segments 16` has split the log. A task reads one
# segment.
#SBATCH --job-name=onefold
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
set -euo pipefail
: "${CONFIG:?}" "${DATASET:?}" "${PARTS:?}" "${SEGMENTS:?}"

bucket=$SLURM_ARRAY_TASK_ID buckets=$SLURM_ARRAY_TASK_COUNT
onefold-ingest write "$CONFIG" "$SEGMENTS/$(printf 'segment-%05d-of-%05d.parquet' "$bucket" "$buckets")" \
    --bucket "$bucket/$buckets" --dataset "$DATASET" --out "$PARTS/$bucket.json" \
    --threads "${SLURM_CPUS_PER_TASK:-1}" --memory-limit "${MEMORY_LIMIT:-16GiB}"
