#!/usr/bin/env bash
# Prints the path of `libonefold_cuda.so`, for `ONEFOLD_CUDA`, which ranks on GPUs and CUDA graphs need; builds it first
# if it does not exist. If ONEFOLD_CUDA is already set, prints its value.
#
#   export ONEFOLD_CUDA=$(trainer/cuda.sh [SITE_PACKAGES])
#
# The library consists of src/distributed/nccl.cpp and src/device/graph.cpp, compiled against an installed torch 2.11.0 and
# the headers of NCCL and CUDA that pip installs with it. SITE_PACKAGES is the folder with `torch` and `nvidia`; the default
# is that of `python3`. It lacks some headers of CUDA's compiler, which pip fetches (3 MB) and checks against their hashes.
# Building needs a C++ compiler and takes 30 seconds, but needs no GPU.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

here=$(cd "$(dirname "$0")" && pwd)/src
sources=("$here/distributed/nccl.cpp" "$here/device/graph.cpp")
compiler=${CXX:-c++}
if [ -n "${ONEFOLD_CUDA:-}" ]; then
    [ -e "$ONEFOLD_CUDA" ] || die "ONEFOLD_CUDA=$ONEFOLD_CUDA is not there" "unset it to have it built"
    printf '%s\n' "$ONEFOLD_CUDA"
    exit 0
fi
if [ $# -ge 1 ]; then site=$1
else
    find_torch='import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])'
    site=$(python3 -c "$find_torch" 2>/dev/null) || die "python3 has no torch" "pip install torch==2.11.0"
    site=$(dirname "$site")
fi
for needed in torch/version.py torch/include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp nvidia/nccl/include/nccl.h \
    nvidia/cu13/include/cuda_runtime.h; do
    [ -f "$site/$needed" ] || die "there is no $site/$needed" "pip install torch==2.11.0, the wheel with CUDA"
done
version=$(sed -n "s/^__version__ = '\(.*\)'/\1/p" "$site/torch/version.py")
case $version in 2.11.0 | 2.11.0+cu13*) ;; *) die "$site has torch $version" "pip install torch==2.11.0" ;; esac
command -v "$compiler" >/dev/null || die "there is no C++ compiler $compiler" "install one (Debian: apt-get install g++), or set CXX"

cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
# The library depends on the sources, and on the headers that define the layout of NCCL's structures.
made_of=$(cat "${sources[@]}" "$site/nvidia/nccl/include/nccl.h" "$site/torch/version.py" | sha256sum | cut -c1-16)
home=$cache/cuda-$made_of
library=$home/libonefold_cuda.so
if [ ! -d "$home" ]; then
    mkdir -p "$cache"
    # One build at a time; a second process waits and finds the result. The kernel releases the lock of a killed process.
    exec 9>"$cache/cuda.lock"
    flock 9
fi
if [ -d "$home" ]; then
    printf '%s\n' "$library"
    exit 0
fi
rm -rf "$cache"/cuda.partial.*
work=$(mktemp -d "$cache/cuda.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT

cat >"$work/wheels.txt" <<'WHEELS'
nvidia-cuda-crt==13.0.88 --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
nvidia-cuda-cccl==13.0.85 --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649
WHEELS
say "building $library (once)"
python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --only-binary=:all: --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$work/wheels" --requirement "$work/wheels.txt" 1>&2 ||
    die "pip could not fetch the headers of CUDA's compiler (its message is above)" "check the network and pip's index"
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/more"; done

mkdir "$work/cuda"
# Symbols of libtorch, NCCL and CUDA are resolved in the process that loads the library.
"$compiler" -std=c++17 -O2 -fPIC -shared -Wall -Wextra -Werror -DUSE_C10D_NCCL \
    -isystem "$site/torch/include" -isystem "$site/torch/include/torch/csrc/api/include" \
    -isystem "$site/nvidia/cu13/include" -isystem "$site/nvidia/nccl/include" \
    -isystem "$work/more/nvidia/cu13/include" -isystem "$work/more/nvidia/cu13/include/cccl" "${sources[@]}" -o "$work/cuda/libonefold_cuda.so" 1>&2 ||
    die "$compiler could not compile ${sources[*]} (its messages are above)" "report this with the compiler's version"
sync "$work/cuda"
mv "$work/cuda" "$home"
printf '%s\n' "$library"
