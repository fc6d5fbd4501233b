#!/usr/bin/env bash
# Installs the packages of `make dist` in a root directory without a compiler and without Rust. Then trains a model from
# a CSV file, first with the tarball, then with the wheels.
#
#   LIBTORCH=$(trainer/libtorch.sh) dist/try.sh target/packages        (`make try-dist`)
#
# The root directory is in memory (3 GB) and contains the system's libraries and Python, as Debian and Ubuntu arrange them.
# The script runs in a user namespace, so it needs no privileges if the kernel allows user namespaces. All mounts end with
# the namespace.
set -euo pipefail
die() { printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2; exit 1; }

if [ "$1" != --inside ]; then
    packages=$(realpath "$1")
    ls "$packages"/onefold-*.tar.gz "$packages"/onefold-*.whl "$packages"/onefold_train-*.whl >/dev/null ||
        die "$packages has no packages" "run \`make dist\`"
    [ -d /lib/x86_64-linux-gnu ] || die "this machine has no /lib/x86_64-linux-gnu" "run this on Debian or Ubuntu"
    unshare --user --map-root-user --mount true ||
        die "this machine allows no user namespaces" "run this as root, or see sysctl kernel.unprivileged_userns_clone"
    python=$("$(dirname "$0")/../python/environment.sh")
    root=$(mktemp -d)
    trap 'rmdir "$root"' EXIT
    unshare --user --map-root-user --mount "$0" --inside "$root" "$packages" "$python" "${LIBTORCH:?}"
    exit
fi

root=$2 packages=$3 python=$4 libtorch=$5
mount -t tmpfs -o size=3g,mode=755 none "$root"
# `show FROM TO`: makes a file or folder of this machine visible in the new root.
show() {
    if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root$(dirname "$2")"; : >"$root$2"; fi
    mount --rbind "$1" "$root$2"
}
base=$(python3 -c 'import sys; print(sys.base_prefix)')
for path in /proc /dev/null /dev/urandom /bin/sh /lib/x86_64-linux-gnu /lib64; do show "$path" "$path"; done
[ /usr/lib -ef /lib ] && show /usr/lib/x86_64-linux-gnu /usr/lib/x86_64-linux-gnu
if [ "$base" = /usr ]; then
    for path in /usr/lib/python3*; do show "$path" "$path"; done
    show "$(realpath /usr/bin/python3)" /usr/bin/python3
else
    show "$base" "$base"
fi
show "$packages" /packages
show "$python" /numpy
show "$libtorch/lib" /libtorch
mkdir -p "$root"/{opt/onefold,tmp,site/torch}
tar -xzf "$packages"/onefold-*.tar.gz -C "$root/opt/onefold" --strip-components 1
ln -s /libtorch "$root/opt/onefold/lib"
# Imitates the parts of an installed torch that the wheel `onefold-train` looks for.
: >"$root/site/torch/__init__.py"
echo '__version__ = "2.11.0"' >"$root/site/torch/version.py"
ln -s /libtorch "$root/site/torch/lib"
python3 - >"$root/tmp/log.csv" <<'LOG'
print("user,time,item,price,clicked")
for row in range(5000):
    print(f"{row * 7 % 300},{1_700_000_000 + 10 * row},{row * row % 997},{row % 13 / 13:.3f},{row % 3 // 2}")
LOG
cat >"$root/tmp/train.toml" <<'CONFIG'
format_version = 1
[data]
label = "clicked"
[train]
batch_size = 256
[model]
bottom_mlp = [8]
top_mlp = [8, 1]
CONFIG
cat >"$root/tmp/use.sh" <<'USE'
set -eu
cd /tmp
for compiler in cc gcc c++ clang rustc cargo; do
    if command -v "$compiler"; then echo "error: the root has a compiler"; exit 1; fi
done
export PATH=/opt/onefold/bin:$PATH
onefold
onefold data generate --workload rm3 --samples 100 --seed 1 --out generated
onefold ingest init log.csv --out dataset.toml
onefold ingest build dataset.toml --out dataset
onefold read head dataset --samples 1 --batch-size 256
onefold shard tables train.toml --data dataset --out tables.json
onefold train run train.toml --data dataset --out run
onefold serve --version
onefold cluster --version
export PATH=/opt/python/bin:${PATH#*:} PYTHONDONTWRITEBYTECODE=1
python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target /opt/python \
    /packages/onefold-*.whl /packages/onefold_train-*.whl
export PYTHONPATH=/opt/python:/numpy:/site
onefold
onefold train run train.toml --data dataset --out run-of-wheel
python3 -c 'import onefold; print(sum(len(batch) for batch in onefold.Dataset("dataset", global_batch_size=256)), "samples")'
USE
exec chroot "$root" /bin/sh -c 'PATH=$1/bin:/usr/bin:/bin HOME=/tmp exec /bin/sh /tmp/use.sh' sh "$base"
