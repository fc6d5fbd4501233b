"""A dataset of one Parquet file with the columns `user_id` and `time`, in seconds."""

import json

import pyarrow.parquet

import onefold

DATASET = """\
format_version = 1
keep = {keep}

[sources]
log = "log.parquet"

[samples]
query = "SELECT * FROM log"

[session]
key = ["user_id"]
time = {{ column = "time", unit = "s" }}

[features]
{features}
"""


def build(folder, table, features, keep):
    """Builds the dataset of a table in a folder, and returns its location. `features` are lines of TOML."""
    pyarrow.parquet.write_table(table, folder / "log.parquet")
    (folder / "dataset.toml").write_text(DATASET.format(keep=json.dumps(keep), features=features))
    onefold.build(folder / "dataset.toml", out=folder / "data")
    return folder / "data"
