"""A folded dataset in Polars and DuckDB: its files are plain Parquet, and a null list means "as in the row above".

    pip install polars duckdb pyarrow
    python python/examples/dataframes.py dataset --feature user_00 --window history_00

`onefold.files` says which files are those of the newest snapshot: a dataset's folder also has those of older ones. The
example refuses a dataset whose columns are in several files, whose rows would have to be joined by their position first.

Both read the lists of a sparse feature of a deduplicated group, and restore every sample's list with a forward
fill. A sequence stores the items that were appended, and its column `NAME.length` the length of the list: the list
is the last `length` items that the row group has appended so far.
"""

import argparse
from collections.abc import Iterator

import duckdb
import polars
import pyarrow.parquet as parquet

import onefold


def with_polars(files: list[str], feature: str) -> polars.Series:
    """Returns the lists of a feature, one per sample, with Polars."""
    # The first row of a row group is never null, so files can be filled one after the other.
    lists = polars.scan_parquet(files).select(polars.col(feature).forward_fill())
    return lists.collect()[feature]


def with_duckdb(files: list[str], feature: str) -> polars.Series:
    """Returns the lists of a feature, one per sample, with DuckDB, which does not keep the order of the files."""
    database = duckdb.connect()
    database.register("places", polars.DataFrame({"filename": files, "place": range(len(files))}))
    return database.sql(
        f"""
        SELECT last_value("{feature}" IGNORE NULLS) OVER (ORDER BY place, file_row_number) AS list
        FROM read_parquet({files}, filename = true, file_row_number = true) JOIN places USING (filename)
        ORDER BY place, file_row_number
        """
    ).pl()["list"]


def windows(files: list[str], feature: str) -> Iterator[list[int]]:
    """Yields the lists of a sequence, which are sliding windows, one per sample, row group by row group."""
    for file in files:
        opened = parquet.ParquetFile(file)
        for number in range(opened.num_row_groups):
            table = opened.read_row_group(number, columns=[feature, f"{feature}.length"])
            frame = polars.DataFrame(table)
            appended = frame[feature].explode(empty_as_null=False, keep_nulls=False)
            ends = frame[feature].list.len().fill_null(0).cum_sum()
            lengths = frame[f"{feature}.length"].forward_fill()
            for end, length in zip(ends, lengths):
                yield appended[end - length : end].to_list()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--feature", required=True, help="a sparse feature of a deduplicated group")
    parser.add_argument("--window", help="a sequence feature")
    parser.add_argument("--partitions", help="which partitions, as `split=train`; by default all")
    arguments = parser.parse_args()
    # `path` raises an error if the columns of samples are in several files.
    files = [samples.path for samples in onefold.files(arguments.dataset, partitions=arguments.partitions)]
    polars_lists, duckdb_lists = with_polars(files, arguments.feature), with_duckdb(files, arguments.feature)
    assert polars_lists.to_list() == duckdb_lists.to_list()
    print(f"{arguments.feature}: {len(polars_lists)} lists, the first one {polars_lists[0].to_list()}")
    if arguments.window:
        lists = list(windows(files, arguments.window))
        print(f"{arguments.window}: {len(lists)} lists, the last one {lists[-1]}")


if __name__ == "__main__":
    main()
