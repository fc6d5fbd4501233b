//! Builds lists with `[[timelines]]`.

use onefold_tests::Dir;
use serde_json::Value;

use crate::fleet::Fleet;
use crate::vocabularies::{are_equal, logs};

/// A source of the events that samples see, with an integer id and a text id.
const SEEN: &str = "[sources.seen]\nquery = \"SELECT request_id, session_id, user_id, timestamp AS at, item_00[1] AS item, \
                    CAST(item_01[1] % 50 AS VARCHAR) AS word, CAST(item_02[1] AS BIGINT UNSIGNED) AS shop FROM features\"\n";

/// Timelines of a session, and longer ones of a user that take only some of the rows.
const TIMELINES: &str = r#"
[[timelines]]
source = "seen"
on = ["session_id"]
time = "at"
key = ["request_id"]
order = ["request_id"]
length = 12
columns = { seen_items = "item", seen_words = "word" }

[[timelines]]
source = "seen"
on = ["user_id"]
time = "at"
key = ["request_id"]
where = "item % 3 = 0"
length = 5
delay = "1s"
max_age = "10m"
columns = { seen_shops = "shop" }

"#;

const FEATURES: &str = "[features]\nseen_items = { kind = \"sequence\", group = \"seen\" }\n\
                        seen_words = { kind = \"sequence\", group = \"seen\", ids = \"hash\" }\n\
                        seen_shops = { kind = \"sequence\", group = \"shops\" }\n";

/// Writes logs with two timelines of three lists.
pub(crate) fn logs_with_timelines() -> Dir {
    let dir = logs("rm1");
    dir.edit("logs/dataset.toml", "[samples]\n", &format!("{SEEN}{TIMELINES}[samples]\n"));
    dir.edit("logs/dataset.toml", "[features]\n", FEATURES);
    dir
}

/// Adds vocabularies: one of integers and one of texts. A list of the log has each of them too.
pub(crate) fn logs_with_vocabularies() -> Dir {
    let dir = logs_with_timelines();
    let select = "SELECT f.*, CAST(f.item_01 AS VARCHAR[]) AS words,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", select);
    dir.edit("logs/dataset.toml", "item_00 = {", "item_00 = { vocabulary = \"items\",");
    dir.edit("logs/dataset.toml", "group = \"seen\" }", "group = \"seen\", vocabulary = \"items\" }");
    dir.edit("logs/dataset.toml", "ids = \"hash\"", "vocabulary = \"words\"");
    dir.edit(
        "logs/dataset.toml",
        "[features]\n",
        "[features]\nwords = { kind = \"sparse\", vocabulary = \"words\" }\n",
    );
    dir.append("logs/dataset.toml", "\n[vocabularies.items]\n[vocabularies.words]\nmin_count = 2\n");
    dir
}

/// Adds a partition column.
fn split(dir: &Dir) {
    let split = "SELECT CASE WHEN f.session_id % 3 = 0 THEN 'a' ELSE 'b' END AS split, f.*,";
    dir.edit("logs/dataset.toml", "SELECT f.*,", split);
    dir.edit("logs/dataset.toml", "[partition]\n", "[partition]\ncolumns = [\"split\"]\n");
}

/// Returns the statistics of the lists from timelines.
fn statistics(summary: &Value) -> Vec<Value> {
    let features = summary["statistics"]["features"].as_array().unwrap().iter();
    features.filter(|feature| feature["name"].as_str().unwrap().starts_with("seen_")).cloned().collect()
}

#[test]
fn lists_are_those_of_one_process() {
    let dir = logs_with_timelines();
    let fleet = Fleet::new(&dir, 2);
    for (number, options) in ["--buckets 5", "--buckets 1 --order arrival"].iter().enumerate() {
        let build = format!("build logs/dataset.toml {options} --out");
        let (here, there) = (format!("here{number}"), format!("there{number}"));
        let ours = dir.command(&format!("onefold-ingest {build} {here} --threads 2")).json();
        // The client's memory limit sets the size of slices: here the smallest one.
        let theirs = fleet.command(&format!("{build} {there} --memory-limit 1MiB")).json();
        assert_eq!(theirs["samples"], ours["samples"]);
        assert_eq!(statistics(&theirs), statistics(&ours));
        assert!(
            statistics(&ours).len() == 3 && statistics(&ours).iter().all(|list| list["mean_length"] != 0.0)
        );
        are_equal(&dir, &here, &there);
    }
    // Sessions that end with a pause, partitioned by a column and by hour.
    split(&dir);
    dir.edit("logs/dataset.toml", "key = [\"session_id\"]\ntime", "user = \"user_id\"\ngap = \"2m\"\ntime");
    let build = "build logs/dataset.toml --buckets 3 --order session-hash --out";
    dir.command(&format!("onefold-ingest {build} here")).works();
    fleet.command(&format!("{build} there")).json();
    are_equal(&dir, "here", "there");
}

#[test]
fn vocabularies_count_all_rows_of_timelines() {
    let dir = logs_with_vocabularies();
    let build = "build logs/dataset.toml --buckets 5 --groups auto --out";
    let here = dir.command(&format!("onefold-ingest {build} here --threads 2")).json();
    let fleet = Fleet::new(&dir, 2);
    let there = fleet.command(&format!("{build} there")).json();
    assert_eq!(there["vocabularies"], here["vocabularies"]);
    let entries = |name: &str| there["vocabularies"][name].as_u64().unwrap();
    assert!(entries("items") > 100 && entries("words") > 100, "{there}");
    assert_eq!(statistics(&there), statistics(&here));
    are_equal(&dir, "here", "there");
}

#[test]
fn appends_have_lists_of_timelines() {
    let dir = logs_with_vocabularies();
    split(&dir);
    dir.edit("logs/dataset.toml", "format_version = 1\n", "format_version = 1\n\n[dataset]\nbuckets = 5\n");
    let fleet = Fleet::new(&dir, 2);
    for part in ["split=a", "split=b"] {
        let append = format!("append logs/dataset.toml --partition {part} --out");
        let here = dir.command(&format!("onefold-ingest {append} here")).json();
        let there = fleet.command(&format!("{append} there")).json();
        assert_eq!(there["samples_written"], here["samples_written"]);
        assert_eq!(there["vocabularies"], here["vocabularies"]);
        are_equal(&dir, "here", "there");
    }
    let again = fleet.command("append logs/dataset.toml --out there").json();
    assert_eq!((&again["changed"], &again["snapshot"]), (&false.into(), &2.into()));
}
