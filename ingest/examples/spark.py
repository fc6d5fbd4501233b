"""Builds a dataset with Spark: Spark prepares the samples and starts one writer for each range of buckets.

    spark-submit spark.py LOGS CONFIG DATASET SCRATCH

LOGS are Parquet files with a column `user`, CONFIG is a dataset.toml of one source, which reads such samples, DATASET
the dataset, and SCRATCH a folder for the samples and parts: paths that all executors share, or URLs. The executors have
`onefold-ingest` in their PATH.
"""

import subprocess
import sys

from pyspark.sql import SparkSession

BUCKETS = 16


def main(logs: str, config: str, dataset: str, scratch: str) -> None:
    spark = SparkSession.builder.appName("onefold").getOrCreate()
    # Do the work that needs Spark here: joins, filters, labels. A writer must read all samples of its users, so the
    # samples are divided by user. Onefold assigns users to ranges with its own hash, so each writer looks for the
    # users of its range in all files. It reads lists of other users only if they share a row group with its users.
    samples = spark.read.parquet(logs)
    samples.repartition(BUCKETS, "user").sortWithinPartitions("user").write.parquet(f"{scratch}/samples")

    def write(bucket: int) -> None:
        subprocess.run(
            ["onefold-ingest", "write", config, f"{scratch}/samples", "--bucket", f"{bucket}/{BUCKETS}",
             "--dataset", dataset, "--out", f"{scratch}/parts/{bucket}.json"],
            check=True,
        )

    spark.sparkContext.parallelize(range(BUCKETS), BUCKETS).foreach(write)
    subprocess.run(["onefold-ingest", "commit", dataset, f"{scratch}/parts"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
