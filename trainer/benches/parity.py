#!/usr/bin/env python3
"""Compares the losses of training with deduplication off, exact, and with windows.

Trains the same model on the same batches with every kind of deduplication, and prints the largest relative difference of a
step's loss to `off` over the first steps, and the step at which the difference exceeds 1e-4. `rounding` repeats `off` with
libtorch's plain kernels instead of vectorized ones, and so shows the effect of rounding alone.

    trainer/benches/parity.py --config rm1/train.toml --data rm1-dataset --work parity [--steps 500] [--bin target/release]
        [--set batch_size=2048] [--set tables.eps=1e-4] [--set dense.learning_rate=0.001]

`--set` changes a line of the configuration, or with `tables.` or `dense.` a key of that optimizer.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess

from quality import with_key

BOUND = 1e-4
FORMS = {"off": {}, "exact": {}, "window": {}, "rounding": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}}


def parser_of(description, data, work="folder for runs"):
    """Returns a parser with the common arguments of the scripts that train one model in several ways."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, required=True, help="the model's train.toml")
    parser.add_argument("--data", type=pathlib.Path, required=True, help=data)
    parser.add_argument("--work", type=pathlib.Path, required=True, help=work)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a line of the configuration")
    return parser


def configured(options, streams=None):
    """Returns the configuration with its changed lines, and with `streams` streams unless it sets a number."""
    text = options.config.read_text()
    for setting in options.set:
        text = changed(text, setting)
    if streams and not re.search(r"(?m)^streams = ", text):
        text = text.replace("[data]\n", f"[data]\nstreams = {streams}\n", 1)
    return text


def arguments():
    parser = parser_of(__doc__, data="its dataset")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--forms", default=",".join(FORMS), help="what to train, separated by commas")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def changed(text, setting):
    """Returns the configuration with one key of an optimizer, or one existing line, changed."""
    key, value = setting.split("=", 1)
    section, _, name = key.rpartition(".")
    if section:
        return with_key(text, f"optimizer.{section}.{name}", value)
    text, count = re.subn(rf"(?m)^{re.escape(name)} = .*$", f"{name} = {value}", text, count=1)
    if count == 0:
        raise SystemExit(f"error: there is no `{key}` in the configuration")
    return text


def losses(options, config, form):
    command = [options.bin / "onefold-train", "run", config, "--data", options.data, "--out", options.work / form, "--overwrite",
               "--dedupe", "off" if form == "rounding" else form, "--max-steps", options.steps, "--json"]
    result = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True,
                            env={**os.environ, **FORMS[form]})
    return json.loads(result.stdout.splitlines()[-1])["losses"]


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    config = options.work / "train.toml"
    config.write_text(configured(options))
    plain = losses(options, config, "off")
    ends = [end for end in (20, 50, 100, 200, 300, 500, 1000, 2000) if end < len(plain)] + [len(plain)]
    print(f"{len(plain)} steps, loss {plain[0]:.4f} at the first, {sum(plain[-20:]) / len(plain[-20:]):.4f} over the last 20")
    print(f"{'to step':10}" + "".join(f"{end:>10}" for end in ends) + f"{'beyond 1e-4 at':>18}")
    found = {}
    for form in options.forms.split(","):
        if form == "off":
            continue
        other = losses(options, config, form)
        assert len(other) == len(plain), f"{form} took {len(other)} steps"
        apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in zip(plain, other)]
        beyond = next((step + 1 for step, difference in enumerate(apart) if difference > BOUND), None)
        found[form] = {"largest_by_step": {end: max(apart[:end]) for end in ends}, "beyond_at": beyond}
        print(f"{form:10}" + "".join(f"{max(apart[:end]):10.1e}" for end in ends) + f"{beyond or 'never':>18}", flush=True)
    if options.json:
        print(json.dumps({"steps": len(plain), "losses": plain, "forms": found}))


if __name__ == "__main__":
    main()
