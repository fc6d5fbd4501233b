#!/usr/bin/env python3
"""Is the plan of `onefold-shard` faster than one that spreads whole tables evenly?

Draws tasks of uneven tables (rows, dimensions and lookups of NeuroShard's pool, smaller by `--memory` and `--samples`), plans them
with every search, and measures whole steps of the plans on real ranks: processes that exchange rows through Gloo.

    trainer/benches/plans_on_ranks.py --work plans-on-ranks [--bin target/release] [--tasks 10] [--share 0.5] [--model costs.json]

The ranks share this machine, so that a rank would take the processors that another one leaves idle. Therefore every rank is held to
`--share` processors by a control group (version 1 or 2, which needs root): four ranks of half a processor on a machine of two are
like four machines, each half as fast. Predicted times are divided by the share, as the cost model is of a whole processor.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess

PERIOD_US = 20_000


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for tasks and plans")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5, help="processors of a rank")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--tables", default="10-30")
    parser.add_argument("--max-dim", default="64")
    parser.add_argument("--samples", default="4096", help="samples of a step, over all ranks")
    parser.add_argument("--memory", default="512MiB", help="a rank's memory for tables")
    parser.add_argument("--seed", default="5")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes per second that a rank sends")
    parser.add_argument("--model", default="cpu", help="the planner's cost model, of one thread")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--even", default="greedy_by_size", help="the search whose plan of whole tables is compared with")
    return parser.parse_args()


def run(options, program, *parts):
    command = [str(part) for part in (options.bin / program, *parts)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


class Quota:
    """A control group for each rank."""

    def __init__(self, ranks, share):
        old = pathlib.Path("/sys/fs/cgroup/cpu")
        root = old if old.is_dir() else pathlib.Path("/sys/fs/cgroup")
        self.groups = [root / f"onefold-rank-{rank}" for rank in range(ranks)]
        quota = int(share * PERIOD_US)
        for group in self.groups:
            group.mkdir(exist_ok=True)
            if root == old:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def enter(self, rank):
        (self.groups[rank] / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        for group in self.groups:
            group.rmdir()


def measure(options, quota, tasks, plans):
    """`measure-plans` on ranks, started as `torchrun` would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(options.bin / "onefold-train"), "measure-plans", "--tasks", str(tasks), "--plans", str(plans),
               "--count", str(options.tasks), "--threads", "1", "--steps", str(options.steps), "--timeout", "300", "--json"]
    ranks = []
    for rank in range(options.ranks):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks),
                       "LOCAL_WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True,
                                      preexec_fn=lambda rank=rank: quota.enter(rank)))
    output = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return json.loads(output[0].splitlines()[-1])


def set_bandwidth(tasks, bandwidth):
    """The tasks' topology is of GPUs; the exchange of these ranks is slower."""
    for path in tasks.glob("*/topology.json"):
        topology = json.loads(path.read_text())
        for link in ("intra", "inter"):
            topology[f"{link}_node_bandwidth_bytes_per_second"] = bandwidth
        path.write_text(json.dumps(topology))


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    tasks, plans = options.work / "tasks", options.work / "plans"
    if not plans.exists():
        run(options, "onefold-shard", "tasks", "--tables", options.tables, "--ranks", options.ranks, "--max-dim", options.max_dim,
            "--count", options.tasks, "--seed", options.seed, "--samples", options.samples, "--memory", options.memory,
            "--out", tasks, "--json")
        set_bandwidth(tasks, options.bandwidth)
        run(options, "onefold-shard", "compare", "--tasks", tasks, "--model", options.model, "--any-hardware", "--plans", plans, "--json")
    quota = Quota(options.ranks, options.share)
    try:
        measured = measure(options, quota, tasks, plans)
    finally:
        quota.remove()
    cost = lambda plan: max(rank["predicted_ms"] / options.share + rank["communication_ms"] for rank in plan["ranks"])
    by_task = {}
    for plan in measured["plans"]:
        by_task.setdefault(plan["task"], {})[plan["plan"]] = plan
    print(f"{measured['machine']}, {options.ranks} ranks of {options.share} processors; ms of a step")
    print("| task | even: predicted | measured | beam: predicted | measured | even ÷ beam |\n|---|---|---|---|---|---|")
    ratios = []
    for task, of_task in sorted(by_task.items()):
        even, beam = of_task.get(options.even), of_task["beam"]
        if even is None:
            print(f"| {task} | no valid plan | | {cost(beam):.0f} | {beam['step_ms']:.0f} | |")
            continue
        ratios.append(even["step_ms"] / beam["step_ms"])
        print(f"| {task} | {cost(even):.0f} | {even['step_ms']:.0f} | {cost(beam):.0f} | {beam['step_ms']:.0f} | {ratios[-1]:.2f} |")
    print(f"mean of the ratios {statistics.mean(ratios):.2f}, least {min(ratios):.2f}")
    print(json.dumps({"machine": measured["machine"], "agreement": measured["agreement"], "ratios": ratios}))


if __name__ == "__main__":
    main()
