#!/usr/bin/env python3
"""Compares training steps of Onefold and TorchRec on the same data, in float32 and in bfloat16.

Runs `onefold-train-tools bench` once per precision and `against_torchrec.py` once for all precisions, workload after
workload, then everything again in the opposite order, and so on. Prints a Markdown table: per workload and precision the
samples per second of Onefold (`off`, `exact`, `window`) and of TorchRec (plain, and with user rows deduplicated by hand),
Onefold's best divided by TorchRec's best, and the mean losses: Onefold's of `off`, TorchRec's of plain. The losses only
show that both learn: the initial weights differ, and one model takes the steps of all variants, on few batches. All values
are medians over the repetitions, and `±` is half the difference between the smallest and the largest value.

Run it on an idle machine. With other programs, threads that wait for each other lose far more than their share of the
processors, most of all TorchRec's, so ratios from a busy machine are meaningless. The line below the table shows the
maximum number of processors that other programs used during one command.

    trainer/benches/dense.py --data DIR [--repeat 3] [--threads 2] [--workloads rm1,rm2,rm3]
        [--precision fp32,bf16] [--bin target/release] [--rounds 10] [--json]

DIR has for every workload W the datasets `W-dataset` and, in the `rows` layout, `W-rows`:

    onefold-data generate --workload rm1 --samples 60000 --seed 1 --out DIR/rm1-logs
    onefold-ingest build DIR/rm1-logs/dataset.toml --out DIR/rm1-dataset
    onefold-ingest build DIR/rm1-logs/dataset.toml --out DIR/rm1-rows --layout rows

TorchRec and pyarrow are found through PYTHONPATH (see `against_torchrec.py`). TorchRec uses jemalloc, if Debian's
`libjemalloc2` is installed, and retains pages as `onefold-train` does, which has its own jemalloc.
"""

import argparse
import ctypes.util
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

OURS, THEIRS = ("off", "exact", "window"), ("plain", "deduplicated")
PRECISIONS = {"fp32": "", "bf16": "_bf16"}  # and the suffixes of TorchRec's variants
OTHERS = []  # the number of processors that other programs used during each command
MALLOC = "narenas:2,thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1"


def arguments():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of the datasets")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"),
                        help="of the binaries")
    parser.add_argument("--workloads", default="rm1,rm2,rm3", help="separated by commas")
    parser.add_argument("--precision", default="fp32,bf16", help="separated by commas")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of everything")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="steps of a variant that count, each time")
    parser.add_argument("--json", action="store_true", help="print one object too, on the last line")
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    options.precision = options.precision.split(",")
    unknown = [name for name in options.precision if name not in PRECISIONS]
    if unknown:
        parser.error(f"--precision: `{unknown[0]}` is not one of {', '.join(PRECISIONS)}")
    return options


def busy():
    """Returns the busy and stolen processor seconds since the start of the machine, without those of finished commands."""
    user, nice, system, _, _, irq, soft, steal = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return total - own.ru_utime - own.ru_stime


def run(command, environment=None):
    """Runs a command; returns the JSON object on the last line of its output."""
    command = [str(part) for part in command]
    print("$ " + " ".join(command), file=sys.stderr, flush=True)
    before, started = busy(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    OTHERS.append((busy() - before) / (time.monotonic() - started))
    print(f"other programs used {OTHERS[-1]:.2f} processors", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def shared(options, workload):
    return ["--workload", workload, "--threads", options.threads, "--rounds", options.rounds]


def ours(options, workload, precision):
    """Returns Onefold's samples per second and loss by (precision, variant)."""
    # Older binaries without bfloat16 lack this option, and can still be measured in float32.
    chosen = [] if precision == "fp32" else ["--precision", precision]
    report = run([options.bin / "onefold-train-tools", "bench", *shared(options, workload), *chosen,
                  "--data", options.data / f"{workload}-dataset", "--dedupe", ",".join(OURS), "--json"])
    variants = zip(OURS, report["variants"], strict=True)
    return {(precision, name): (found["samples_per_second"], found["loss"]) for name, found in variants}


def theirs(options, workload):
    """Returns TorchRec's samples per second and loss by (precision, variant), for all precisions."""
    environment = dict(os.environ)
    jemalloc = ctypes.util.find_library("jemalloc")
    if jemalloc:
        environment |= {"LD_PRELOAD": jemalloc, "MALLOC_CONF": MALLOC}
    script = pathlib.Path(__file__).with_name("against_torchrec.py")
    data = options.data / f"{workload}-rows"
    report = run([sys.executable, script, *shared(options, workload), "--data", data,
                  "--precision", ",".join(options.precision)], environment)
    found = {}
    for precision in options.precision:
        for name in THEIRS:
            variant = report[name + PRECISIONS[precision]]
            found[precision, name] = variant["samples_per_second"], variant["loss"]
    return found


def measure(options):
    """Returns the results of all repetitions by (workload, precision, variant)."""
    jobs = []
    for workload in options.workloads:
        jobs += [(workload, ours, (precision,)) for precision in options.precision]
        jobs.insert(len(jobs) - len(options.precision) + 1, (workload, theirs, ()))
    results = {}
    for turn in range(options.repeat):
        for workload, system, rest in jobs if turn % 2 == 0 else reversed(jobs):
            for (precision, name), found in system(options, workload, *rest).items():
                results.setdefault((workload, precision, name), []).append(found)
    return results


def row_of(results, workload, precision):
    """Returns the medians of one workload in one precision."""
    row = {"workload": workload, "precision": precision}
    for name in OURS + THEIRS:
        speeds, losses = zip(*results[workload, precision, name])
        row[name] = {"samples_per_second": statistics.median(speeds), "by_repetition": speeds,
                     "loss": statistics.median(losses)}
    best = [max(row[name]["samples_per_second"] for name in names) for names in (OURS, THEIRS)]
    # On processors without fast bfloat16 products, bfloat16 is slower, and a user of TorchRec would stay with float32.
    speeds = {key: statistics.median(speed for speed, _ in found) for key, found in results.items()}
    of_any = max(speed for (other, _, name), speed in speeds.items() if other == workload and name in THEIRS)
    return row | {"ratio": best[0] / best[1], "ratio_to_any": best[0] / of_any}


def cell(figures):
    speeds = figures["by_repetition"]
    spread = f" ± {(max(speeds) - min(speeds)) / 2:,.0f}" if len(speeds) > 1 else ""
    return f"{figures['samples_per_second']:,.0f}{spread}"


def processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else 'unknown processor'} ({', '.join(known)})"


def show(options, host, rows):
    steps = f"medians of {options.repeat} × {options.rounds} steps"
    print(f"{host}, {options.threads} threads; samples per second, {steps}\n")
    print("| | precision | `off` | `exact` | `window` | TorchRec, plain | TorchRec, by hand "
          "| our best ÷ TorchRec's | ÷ its best of any precision | loss, ours | loss, TorchRec |")
    print("|---" * 11 + "|")
    for row in rows:
        speeds = " | ".join(cell(row[name]) for name in OURS + THEIRS)
        print(f"| {row['workload']} | {row['precision']} | {speeds} | {row['ratio']:.2f} | {row['ratio_to_any']:.2f} "
              f"| {row['off']['loss']:.4f} | {row['plain']['loss']:.4f} |")
    print(f"\nOther programs used at most {max(OTHERS):.2f} processors during a command.")


def main():
    options = arguments()
    results = measure(options)
    places = [(workload, precision) for workload in options.workloads for precision in options.precision]
    rows = [row_of(results, *place) for place in places]
    host = processor()
    show(options, host, rows)
    if options.json:
        settings = {"threads": options.threads, "repeat": options.repeat, "rounds": options.rounds,
                    "others": max(OTHERS)}
        print(json.dumps({"processor": host, **settings, "rows": rows}))


if __name__ == "__main__":
    main()
