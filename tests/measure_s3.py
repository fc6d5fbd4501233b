#!/usr/bin/env python3
"""Reads a dataset alternately from a local disk and from an S3 server, and prints both rates.

    target/release/examples/s3-server --latency-ms 20 -- \\
        tests/measure_s3.py --binaries target/release --logs LOGS --work DIR

LOGS is the output of `onefold-data generate`. The environment names the server."""

import argparse
import json
import pathlib
import statistics
import subprocess


def run(*command):
    output = subprocess.run([*map(str, command), "--json"], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--logs", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    places = {"local disk": options.work / "dataset", "S3": "s3://data/dataset"}
    for location in places.values():
        built = run(options.binaries / "onefold-ingest", "build", options.logs / "dataset.toml", "--out", location, "--overwrite")
        print(f"built {location}: {built['samples']:,} samples in {built['wall_seconds']:.1f} s", flush=True)
    print("| read | " + " | ".join(places) + " | ratio |\n|---|---|---|---|")
    for dedupe, more in [(dedupe, more) for dedupe in ("exact", "window") for more in ([], ["--no-verify"])]:
        rates = {place: [] for place in places}
        for _ in range(options.runs):
            for place, location in places.items():
                read = run(
                    options.binaries / "onefold-read", "bench", location,
                    "--dedupe", dedupe, "--threads", options.threads, *more,
                )
                rates[place].append(read["samples_per_second"])
        local, remote = (statistics.median(rates[place]) for place in places)
        what = " ".join([dedupe, *more])
        print(f"| {what} | {local:,.0f} | {remote:,.0f} | {remote / local:.2f} |", flush=True)


if __name__ == "__main__":
    main()
