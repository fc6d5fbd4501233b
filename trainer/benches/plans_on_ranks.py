#!/usr/bin/env python3
"""Compares plans by measurements on ranks with the planner's predictions, and measures the effect of dedupe factors.

Draws tasks with tables like those of NeuroShard's pool (`onefold-evaluate-plans tasks`), varies the tables (types of
weights, pooled and unpooled, deduplicated lists), plans them with every search, and measures whole steps of the plans on
ranks. The ranks are processes that exchange rows through Gloo, and compute in turns, so that each is timed as if it had
the machine for itself.

    trainer/benches/plans_on_ranks.py --work plans-on-ranks [--bin target/release] [--tasks 20] [--model cpu]

`beam_without_dedupe` is the plan that `beam` makes if it assumes that no lists repeat, priced and measured with the true
dedupe factors.
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import subprocess


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for tasks and plans; plans that are there are kept")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--tables", default="10-30")
    parser.add_argument("--max-dim", default="64")
    parser.add_argument("--samples", default="16384", help="samples of a step, over all ranks")
    parser.add_argument("--memory", default="1GiB", help="a rank's memory")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--model", default="cpu", help="the planner's cost model")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def run(options, program, *parts):
    command = [str(part) for part in (options.bin / program, *parts)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def vary(tasks, seed):
    """Varies the tasks' tables at random: half are deduplicated, a quarter have 16 bits, a fifth are unpooled."""
    for path in sorted(tasks.glob("*/tables.json")):
        draw = random.Random(f"{seed} {path.parent.name}")
        file = json.loads(path.read_text())
        for table in file["tables"]:
            if draw.random() < 0.5:
                table["dedupe_factor"] = 16 ** draw.random()
            if draw.random() < 0.25:
                table["dtype"] = "bf16"
            if draw.random() < 0.2:
                table["pooling"] = "attention"
            # The access counts are from before the change of the dedupe factor.
            if "dedupe_factor" in table:
                table.pop("access_bins", None)
        path.write_text(json.dumps(file))


def without_dedupe(tasks, out):
    shutil.copytree(tasks, out)
    for path in out.glob("*/tables.json"):
        file = json.loads(path.read_text())
        for table in file["tables"]:
            table.pop("dedupe_factor", None)
            table.pop("list_dedupe_factor", None)
        path.write_text(json.dumps(file))


def make(options):
    tasks, plans = options.work / "tasks", options.work / "plans"
    if plans.exists():
        return tasks, plans
    run(options, "onefold-evaluate-plans", "tasks", "--tables", options.tables, "--ranks", options.ranks, "--max-dim", options.max_dim,
        "--count", options.tasks, "--seed", options.seed, "--global-batch-size", options.samples, "--memory", options.memory,
        "--out", tasks, "--json")
    vary(tasks, options.seed)
    plain, plain_plans = options.work / "tasks-without-dedupe", options.work / "plans-without-dedupe"
    without_dedupe(tasks, plain)
    for of_tasks, out in ((tasks, plans), (plain, plain_plans)):
        run(options, "onefold-evaluate-plans", "compare", "--tasks", of_tasks, "--model", options.model, "--any-hardware", "--plans", out, "--json")
    for plan in plain_plans.glob("*/beam.json"):
        # The same placement, with the predicted cost for the deduplicated tables.
        task = tasks / plan.parent.name
        run(options, "onefold-shard", "replan", "--plan", plan, "--tables", task / "tables.json", "--budget", "0",
            "--model", options.model, "--any-hardware", "--out", plans / plan.parent.name / "beam_without_dedupe.json", "--json")
    return tasks, plans


def main():
    options = arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    tasks, plans = make(options)
    measured = run(options, "onefold-train-tools", "launch", "--ranks", options.ranks, "--", "measure-plans", "--tasks", tasks, "--plans", plans,
                   "--count", options.tasks, "--steps", options.steps, "--timeout", 600, "--json")
    (options.work / "measured.json").write_text(json.dumps(measured))
    predicted = lambda plan: max(rank["predicted_ms"] + rank["communication_ms"] for rank in plan["ranks"])
    by_task = {}
    for plan in measured["plans"]:
        by_task.setdefault(plan["task"], {})[plan["plan"]] = plan
    searches = sorted({plan["plan"] for plan in measured["plans"]})
    print(f"{measured['machine']}, {options.ranks} ranks in turns; ms of a step, over {len(by_task)} tasks\n")
    print("| plans | tasks | predicted | measured | measured, relative to `beam` |\n|---|---|---|---|---|")
    for search in searches:
        both = [(of_task[search], of_task["beam"]) for of_task in by_task.values() if search in of_task]
        mean = lambda of: statistics.mean(of(plan) for plan, _ in both)
        ratio = statistics.mean(plan["step_ms"] / beam["step_ms"] for plan, beam in both)
        print(f"| `{search}` | {len(both)} | {mean(predicted):.1f} | {mean(lambda plan: plan['step_ms']):.1f} | {ratio:.3f} |")
    chosen = []
    for of_task in by_task.values():
        best = min(plan["step_ms"] for plan in of_task.values())
        chosen.append(min(of_task.values(), key=predicted)["step_ms"] / best - 1)
    found = measured["agreement"]
    print(f"\nKendall's tau of predicted and measured steps: {found['cost_tau']:.3f} over all plans, {found['plan_tau']:.3f} within a task")
    print(f"The plan predicted to be the cheapest is {100 * statistics.mean(chosen):.1f} % slower than the fastest one, on average")
    print(json.dumps({"machine": measured["machine"], "agreement": found, "regret": chosen}))


if __name__ == "__main__":
    main()
