"""The log of a small shop: users who see several items before their history changes."""

import numpy
import parquet_log
import pyarrow

USERS, VISITS = 30, 6
FEATURES = """\
clicked = { kind = "label" }
bought = { kind = "label" }
price = { kind = "dense" }
user_id = { kind = "sparse", group = "user" }
city = { kind = "sparse", group = "user" }
items = { kind = "sequence", group = "timeline" }
actions = { kind = "sequence", group = "timeline" }
item_id = { kind = "sparse" }
color = { kind = "sparse" }
tags = { kind = "sparse" }
"""


def samples():
    """Returns the samples of the log: in each visit, a user sees one to five items, and has the history before it."""
    random = numpy.random.default_rng(11)
    log = []
    for user in range(1, USERS + 1):
        items = random.integers(1, 300, 20).tolist()
        actions = random.integers(0, 4, 20).tolist()
        for visit in range(VISITS):
            # The histories of a visit are a window of at most eight elements. The first user has none at first.
            window = slice(max(0, 2 * visit - 4), 2 * visit + 4) if user > 1 or visit else slice(0, 0)
            for _ in range(int(random.integers(1, 6))):
                impression = len(log)
                log.append(
                    {
                        "impression": impression,
                        "country": None if impression % 9 == 0 else f"c{user % 4}",
                        "time": 1_700_000_000 + 1000 * user + impression,
                        "visit": visit,
                        "clicked": float(random.integers(0, 2)),
                        "bought": float(random.integers(0, 2)),
                        "price": impression / 4,
                        "user_id": user,
                        "city": user % 7,
                        "items": items[window],
                        "actions": actions[window],
                        "item_id": int(random.integers(1, 300)),
                        "color": [] if impression % 5 == 0 else [int(random.integers(1, 9))],
                        "tags": random.integers(0, 50, impression % 4).tolist(),
                    }
                )
    return log


def build(folder):
    """Builds the dataset of the log, and returns its location."""
    table = pyarrow.Table.from_pylist(samples()).drop_columns(["visit"])
    return parquet_log.build(folder, table, FEATURES, ["impression", "country"])
