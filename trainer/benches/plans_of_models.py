#!/usr/bin/env python3
"""Compares the plans that two cost models find: how many differ, and how they differ by the prices of each model.

Draws and varies tasks as `plans_on_ranks.py` does, and plans each with both models. With `--rounds`, plans whose prices
differ by more than `--above` are measured: the ranks are threads that work in turns, the plans alternate, and a step's
computation is the sum of the slowest rank's parts.

    trainer/benches/plans_of_models.py --work plans-of-models --models cpu network.json [--bin target/release] [--rounds 6]
"""

import argparse
import pathlib
import statistics

from plans_on_ranks import run, vary


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for tasks and plans; it must not exist")
    parser.add_argument("--models", nargs=2, required=True, help="two cost models, as `onefold-shard plan --model` takes them")
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("target/release"), help="folder of the binaries")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--tables", default="10-30")
    parser.add_argument("--max-dim", default="64")
    parser.add_argument("--samples", default="16384", help="samples of a step, over all ranks")
    parser.add_argument("--memory", default="1GiB", help="a rank's memory")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=0, help="measurements of each pair of plans")
    parser.add_argument("--above", type=float, default=0.02, help="least difference of prices of a measured pair")
    return parser.parse_args()


def price(options, task, plan, model):
    """Returns the predicted milliseconds of a step of a plan, by a cost model."""
    found = run(options, "onefold-shard", "replan", "--plan", plan, "--tables", task / "tables.json", "--budget", "0", "--model", model,
                "--any-hardware", "--out", options.work / "priced.json", "--overwrite", "--json")
    return found["kept_cost_ms"]


def differences(options, task):
    """Plans a task with both models. Returns the relative difference of the second plan's step, by each model's prices."""
    plans = [task / f"plan-{number}.json" for number in range(2)]
    for model, plan in zip(options.models, plans):
        run(options, "onefold-shard", "plan", "--tables", task / "tables.json", "--topology", task / "topology.json", "--model", model,
            "--any-hardware", "--out", plan, "--json")
    if not run(options, "onefold-shard", "diff", *plans, "--json")["changed"]:
        return None
    return [price(options, task, plans[1], model) / price(options, task, plans[0], model) - 1 for model in options.models]


def measured(options, task):
    """Measures both plans in alternating order. Returns the medians of the milliseconds that a step computes."""
    steps = {0: [], 1: []}
    for number in range(options.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        plans = [task / f"plan-{plan}.json" for plan in order]
        found = run(options, "onefold-train-tools", "measure-plans", *plans, "--tables", task / "tables.json",
                    "--seed", number // 2 + 1, "--json")
        for plan, of_plan in zip(order, found["plans"]):
            parts = zip(*(rank["parts_ms"] for rank in of_plan["ranks"]))
            steps[plan].append(sum(max(of_ranks) for of_ranks in parts))
    return [statistics.median(steps[plan]) for plan in (0, 1)]


def main():
    options = arguments()
    options.work.mkdir(parents=True)
    tasks = options.work / "tasks"
    run(options, "onefold-evaluate-plans", "tasks", "--tables", options.tables, "--ranks", options.ranks, "--max-dim", options.max_dim,
        "--count", options.tasks, "--seed", options.seed, "--global-batch-size", options.samples, "--memory", options.memory,
        "--out", tasks, "--json")
    vary(tasks, options.seed)
    found = {task: differences(options, task) for task in sorted(tasks.iterdir())}
    print(f"{sum(of is None for of in found.values())} of {len(found)} tasks have one plan by both models")
    for number, model in enumerate(options.models):
        of_model = [0.0 if of is None else of[number] for of in found.values()]
        mean, least, most = statistics.mean(of_model), min(of_model), max(of_model)
        print(f"by {model}, plans of {options.models[1]} take {mean:+.2%} on average, {least:+.1%} to {most:+.1%}")
    for task, of in found.items():
        if options.rounds and of and max(map(abs, of)) > options.above:
            first, second = measured(options, task)
            expected = ", ".join(f"{difference:+.1%}" for difference in of)
            print(f"{task.name}: predicted {expected}; measured {first:.1f} and {second:.1f} ms ({second / first - 1:+.1%})")


if __name__ == "__main__":
    main()
