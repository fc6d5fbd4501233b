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
    # Whatever Spark is needed for: joins, filters, labels. A writer reads the whole samples of its users, so they are
    # divided by user; which user is in which range is Onefold's own hash, so every writer looks for its range's
    # users in all files, and reads lists of others only where they share a row group.
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
