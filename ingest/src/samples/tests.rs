//! Tests the declared steps on small logs against results that were written by hand.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlan, Partitioning, displayable};
use datafusion::prelude::SessionContext;
use onefold_sql::Query as _;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::engine::physical_rules;
use crate::timeline::tests::{register, rows};

/// A feature log. Request 2 was delivered twice, the second time with another list; request 6 was delivered three
/// times.
const FEATURES: &str = "SELECT column1 AS request, column2 AS user, column3 * 1000000 AS time, column4 AS item, \
     column5 AS history, 2.0 AS weight FROM (VALUES (1, 'a', 100, 7, [1, 2]), (2, 'a', 110, 8, [2, 3]), \
     (2, 'a', 110, 8, [1, 9]), (3, 'b', 120, 7, [4]), (4, 'b', 130, 9, []), (5, 'c', 140, 9, [5]), \
     (6, 'c', 151, 7, [6]), (6, 'c', 150, 7, [7]), (6, 'c', 150, 7, [7]))";

/// The events of the log. Events 10 and 11 are delivered twice; the others include late, early and orphaned events.
const EVENTS: &str = "SELECT column1 AS event, column2 AS req, column3 * 1000000 AS at, column4 AS kind, \
     column5 AS seconds FROM (VALUES (10, 1, 100, 'click', 5), (10, 1, 100, 'click', 5), (11, 1, 105, 'view', 30), \
     (12, 2, 115, 'view', 3), (13, 3, 119, 'click', 1), (14, 4, 191, 'click', 1), (15, 99, 100, 'click', 1), \
     (16, 6, 210, 'click', 2), (11, 1, 105, 'view', 30))";

/// Attributes of users, each with the time from which it is valid.
const USERS: &str = "SELECT column1 AS id, column2 * 1000000 AS valid_from, column3 AS age, column4 AS country \
     FROM (VALUES ('a', 90, 30, 'DK'), ('a', 110, 31, 'SE'), ('a', 111, 32, 'NO'), ('b', 121, 50, NULL), \
     ('a', 90, 30, 'DK'))";

const START: &str = "format_version = 1\n[sources]\nfeatures = \"x\"\nevents = \"x\"\nusers = \"x\"\n\
     [session]\nuser = \"user\"\ngap = \"30m\"\ntime = { column = \"time\", unit = \"us\", not_before = 1970-01-01 }\n";
const SAMPLES: &str = "[samples]\nsource = \"features\"\nkey = [\"request\"]\n";
const JOIN: &str = "[join]\nsource = \"events\"\non = { request = \"req\" }\n\
     time = { column = \"at\", unit = \"us\", not_before = 1970-01-01 }\nwindow = \"60s\"\nkey = [\"event\"]\n\
     [join.labels]\nclicked = { when = \"kind = 'click' -- or more\" }\nseconds = { value = \"max(seconds)\", missing = -1 }\n";
const USER: &str = "[[attributes]]\nsource = \"users\"\non = { user = \"id\" }\n\
     time = { column = \"valid_from\", unit = \"us\", not_before = 1970-01-01 }\n\
     columns = { user_age = \"age\", country = \"country\" }\n";
const FEATURE_KINDS: &str = "[features]\nitem = { kind = \"sparse\" }\nhistory = { kind = \"sequence\" }\n";

/// A context with the three logs as tables.
async fn logs() -> SessionContext {
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_physical_optimizer_rules(physical_rules(None));
    let context = SessionContext::new_with_state(state.build());
    for (name, rows) in [("features", FEATURES), ("events", EVENTS), ("users", USERS)] {
        context.query(&format!("CREATE TABLE {name} AS {rows}")).await.unwrap();
    }
    context
}

fn block<T>(future: impl std::future::Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

fn config(sections: &str) -> Result<Config> {
    let label = if sections.contains("[join]") { "clicked" } else { "item" };
    let features = FEATURE_KINDS.replace("item = { kind = \"sparse\" }", "");
    let label = format!("{label} = {{ kind = \"label\" }}\n");
    let weight = if sections.contains("[sampling]") { "weight = { kind = \"weight\" }\n" } else { "" };
    Config::parse(Path::new("dataset.toml"), &format!("{START}{sections}{features}{label}{weight}"))
}

/// Returns the columns `shown` of the samples in the order of their requests as a text table, and the counts.
#[track_caller]
fn samples(sections: &str, shown: &str) -> (String, SkipCounts) {
    let config = config(sections).unwrap();
    block(async {
        let context = logs().await;
        let samples = plan(&context, &config, &Problems::default()).await.unwrap();
        let order = |query: &str, table: &str| format!("SELECT {query} FROM {table} ORDER BY request, time");
        context.register_table("wide", samples.wide.clone().into_view()).unwrap();
        context.register_table("narrow", samples.narrow.clone().into_view()).unwrap();
        let text = async |sql: String| {
            let batches = context.query(&sql).await.unwrap().collect().await.unwrap();
            pretty_format_batches(&batches).unwrap().to_string()
        };
        let narrow = text(order("request, user, time", "narrow")).await;
        assert_eq!(text(order("request, user, time", "wide")).await, narrow, "the narrow samples are others");
        assert_eq!(samples.expected, Some(narrow.lines().count() as u64 - 4));
        (text(order(shown, "wide")).await, samples.skipped)
    })
}

#[track_caller]
fn refused(sections: &str, parts: &[&str]) {
    let error = match config(sections) {
        Err(error) => error,
        Ok(config) => block(async { plan(&logs().await, &config, &Problems::default()).await.err() })
            .expect("it was planned"),
    };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{text}\nlacks {part}");
    }
    assert!(text.contains("\n  hint: "), "{text}");
}

#[test]
fn the_first_row_of_a_key_by_time_is_a_sample() {
    let (table, skipped) = samples(SAMPLES, "request, time / 1000000 AS t, history");
    let expected = "\
+---------+-----+---------+
| request | t   | history |
+---------+-----+---------+
| 1       | 100 | [1, 2]  |
| 2       | 110 | [1, 9]  |
| 3       | 120 | [4]     |
| 4       | 130 | []      |
| 5       | 140 | [5]     |
| 6       | 150 | [7]     |
+---------+-----+---------+";
    assert_eq!(table, expected);
    assert_eq!(skipped, SkipCounts { duplicate_samples: 3, ..SkipCounts::default() });
    refused(
        &format!("{SAMPLES}duplicates = \"error\"\n"),
        &["`[samples].duplicates`: 3 rows", "request = 2", "duplicates = \"skip\""],
    );
}

#[test]
fn events_within_the_window_make_labels() {
    let (table, skipped) = samples(&format!("{SAMPLES}{JOIN}"), "request, clicked, seconds");
    let expected = "\
+---------+---------+---------+
| request | clicked | seconds |
+---------+---------+---------+
| 1       | 1       | 30.0    |
| 2       | 0       | 3.0     |
| 3       | 0       | -1.0    |
| 4       | 0       | -1.0    |
| 5       | 0       | -1.0    |
| 6       | 1       | 2.0     |
+---------+---------+---------+";
    assert_eq!(table, expected);
    let counts = SkipCounts {
        duplicate_samples: 3,
        duplicate_events: 2,
        late_events: 1,
        early_events: 1,
        orphan_events: 1,
        samples_without_events: 3,
        ..SkipCounts::default()
    };
    assert_eq!(skipped, counts);
    // Without a key, rows that are equal in every column are one event, too.
    assert_eq!(
        samples(
            &format!("{SAMPLES}{}", JOIN.replace("key = [\"event\"]\n", "")),
            "request, clicked, seconds"
        ),
        (table, counts)
    );
}

#[test]
fn delays_are_the_seconds_until_labels_are_final() {
    let join = JOIN
        .replace("-- or more\" }", "-- or more\", delay = true }")
        .replace("missing = -1", "delay = true");
    let (table, _) =
        samples(&format!("{SAMPLES}{join}"), "request, clicked, clicked_delay, seconds, seconds_delay");
    let expected = "\
+---------+---------+---------------+---------+---------------+
| request | clicked | clicked_delay | seconds | seconds_delay |
+---------+---------+---------------+---------+---------------+
| 1       | 1       | 0.0           | 30.0    | 5.0           |
| 2       | 0       | -1.0          | 3.0     | 5.0           |
| 3       | 0       | -1.0          | 0.0     | -1.0          |
| 4       | 0       | -1.0          | 0.0     | -1.0          |
| 5       | 0       | -1.0          | 0.0     | -1.0          |
| 6       | 1       | 60.0          | 2.0     | 60.0          |
+---------+---------+---------------+---------+---------------+";
    assert_eq!(table, expected);
    refused(
        &format!("{SAMPLES}{}", JOIN.replace("missing = -1", "missing = -1, delay = true")),
        &["`[join.labels].seconds`", "a label with a `delay` is 0 until it is final"],
    );
}

#[test]
fn what_the_join_leaves_out_is_counted_or_refused() {
    let with =
        |line: &str| format!("{SAMPLES}{}", JOIN.replace("[join.labels]", &format!("{line}\n[join.labels]")));
    let (table, skipped) = samples(&with("missing = \"skip\""), "request, clicked");
    assert!(
        ["| 1       | 1 ", "| 2       | 0 ", "| 6       | 1 "].iter().all(|row| table.contains(row)),
        "{table}"
    );
    assert_eq!(table.lines().count(), 4 + 3);
    assert_eq!(skipped.samples_without_events, 3);
    refused(&with("late = \"error\""), &["`[join].late`: 1 events", "req = 4", "write late = \"skip\""]);
    refused(&with("early = \"error\""), &["`[join].early`: 1 events", "req = 3"]);
    refused(&with("orphans = \"error\""), &["`[join].orphans`: 1 events", "req = 99"]);
    // Events of rows that `where` leaves out are not orphans.
    let (_, skipped) = samples(&format!("{SAMPLES}where = \"user <> 'c'\"\n{JOIN}"), "request");
    assert_eq!((skipped.orphan_events, skipped.late_events), (1, 1));
}

#[test]
fn attributes_are_those_of_the_samples_time() {
    let (table, skipped) = samples(&format!("{SAMPLES}{USER}"), "request, user_age, country");
    let expected = "\
+---------+----------+---------+
| request | user_age | country |
+---------+----------+---------+
| 1       | 30       | DK      |
| 2       | 31       | SE      |
| 3       |          |         |
| 4       | 50       |         |
| 5       |          |         |
| 6       |          |         |
+---------+----------+---------+";
    assert_eq!(table, expected);
    assert_eq!(skipped.samples_without_attributes, 3);
    let (table, _) = samples(
        &format!("{SAMPLES}{USER}default = {{ country = \"it's none\", user_age = 0 }}\n"),
        "request, user_age, country",
    );
    assert!(table.contains("| 3       | 0        | it's none |"), "{table}");
    let (table, skipped) = samples(&format!("{SAMPLES}{USER}missing = \"skip\"\n"), "request");
    assert_eq!((table.lines().count(), skipped.samples_without_attributes), (4 + 3, 3));
    refused(
        &format!("{SAMPLES}{USER}missing = \"error\"\n"),
        &["`[[attributes]]` 1: 3 samples have no row of `users`", "request = 3"],
    );
    let time = "time = { column = \"valid_from\", unit = \"us\", not_before = 1970-01-01 }\n";
    assert!(USER.contains(time));
    let without_time = USER.replace(time, "");
    refused(
        &format!("{SAMPLES}{without_time}"),
        &["`[[attributes]]` 1: `users` has several rows of one key", "id = a"],
    );
}

#[test]
fn sampling_keeps_the_same_samples_and_makes_up_for_the_rest() {
    let sampling = "[sampling]\nlabel = \"clicked\"\nkeep = { \"0\" = 0.5 }\nseed = 3\nweight = \"weight\"\n";
    let (all, _) = samples(&format!("{SAMPLES}{JOIN}"), "request, clicked");
    let (kept, skipped) = samples(&format!("{SAMPLES}{JOIN}{sampling}"), "request, clicked, weight");
    let negatives = kept.lines().filter(|line| line.contains("| 0 ")).count();
    assert!(kept.contains("| 1       | 1       | 2.0    |"), "{kept}");
    assert!(
        kept.lines().filter(|line| line.contains("| 0 ")).all(|line| line.ends_with("| 4.0    |")),
        "{kept}"
    );
    assert_eq!(negatives as u64 + skipped.sampled_out, 4);
    assert_eq!(all.lines().count() as u64, kept.lines().count() as u64 + skipped.sampled_out);
    assert_eq!(samples(&format!("{SAMPLES}{JOIN}{sampling}"), "request, clicked, weight").0, kept);
    let seeds = (0..8).map(|seed| {
        let sampling = sampling.replace("seed = 3", &format!("seed = {seed}"));
        samples(&format!("{SAMPLES}{JOIN}{sampling}"), "request").1.sampled_out
    });
    let dropped: Vec<u64> = seeds.collect();
    assert!(
        (8..24).contains(&dropped.iter().sum::<u64>()) && dropped.iter().any(|n| *n != dropped[0]),
        "{dropped:?}"
    );
    let without = sampling.replace("weight = \"weight\"", "weight = \"w\"");
    refused(&format!("{SAMPLES}{JOIN}{without}"), &["`[sampling].weight`", "biased"]);
    refused(&format!("{SAMPLES}{JOIN}{}", sampling.replace("0.5", "1.5")), &["`[sampling].keep`", "1.5"]);
    refused(
        &format!("{SAMPLES}{JOIN}{}", sampling.replace("clicked", "clickd")),
        &["`[sampling].label`", "did you mean `clicked`?"],
    );
    refused(
        &format!("{SAMPLES}{JOIN}{}", sampling.replace("\"0\"", "\"no\"")),
        &["`[sampling].keep`", "`no`"],
    );
}

#[test]
fn nulls_and_the_future_are_refused_or_counted() {
    let query = "[samples]\nquery = \"SELECT nullif(request, 3) AS request, nullif(user, 'b') AS user, time, item, history FROM features\"\nkey = [\"request\"]\n";
    refused(
        &format!("{query}[checks]\n"),
        &["`[checks].null_keys`: 2 rows", "request = 4", "null_keys = \"skip\""],
    );
    let (table, skipped) = samples(&format!("{query}[checks]\nnull_keys = \"skip\"\n"), "request");
    assert_eq!((table.lines().count(), skipped.null_key_samples, skipped.duplicate_samples), (4 + 4, 2, 3));
    let checks = "[checks]\nnot_after = \"1970-01-01T00:02:05Z\"\n";
    refused(&format!("{SAMPLES}{checks}"), &["`[checks].future`: 5 rows", "request = 4"]);
    let (table, skipped) = samples(&format!("{SAMPLES}{checks}future = \"skip\"\n"), "request");
    assert_eq!((table.lines().count(), skipped.future_samples, skipped.duplicate_samples), (4 + 3, 5, 1));
    refused(&format!("{SAMPLES}[checks]\nnot_after = \"soon\"\n"), &["`[checks].not_after`", "soon"]);
    let users = USER.replace("\"users\"", "\"events\"").replace("id", "kind").replace("valid_from", "at");
    refused(
        &format!("{SAMPLES}{}", users.replace("kind", "event")),
        &["`[[attributes]]` 1: `on`", "`user` of the samples", "`event` of `events` is Int64"],
    );
}

#[test]
fn lists_of_different_lengths_are_refused_or_counted() {
    let rows = "[samples]\nquery = \"SELECT *, CASE request WHEN 1 THEN NULL WHEN 4 THEN NULL WHEN 3 THEN make_array(0.5, 0.5) \
                ELSE history END AS weights FROM features\"\nkey = [\"request\"]\n";
    let checks = "[checks]\nparallel = [[\"history\", \"weights\"]]\n";
    refused(
        &format!("{rows}{checks}"),
        &["`[checks].ragged`: 2 rows", "different lengths", "request = 1", "ragged = \"skip\""],
    );
    let (table, skipped) = samples(&format!("{rows}{checks}ragged = \"skip\"\n"), "request");
    assert_eq!(table.lines().count(), 4 + 4, "{table}");
    assert_eq!(skipped, SkipCounts { ragged_samples: 2, duplicate_samples: 3, ..SkipCounts::default() });
    let wrong = |parallel: &str, parts: &[&str]| refused(&format!("{rows}[checks]\n{parallel}\n"), parts);
    wrong(
        "parallel = [[\"history\", \"weight\"]]",
        &["`[checks].parallel` names `weight`", "Float64", "lists"],
    );
    wrong("parallel = [[\"history\", \"wights\"]]", &["`[checks].parallel`", "did you mean `weights`?"]);
    wrong("parallel = [[\"history\"]]", &["compares [\"history\"] with nothing"]);
    wrong("ragged = \"skip\"", &["needs `[checks].parallel`"]);
}

#[test]
fn mistakes_are_found_before_anything_is_read() {
    let join = |from: &str, to: &str| format!("{SAMPLES}{}", JOIN.replace(from, to));
    refused(&SAMPLES.replace("features", "feature"), &["`[samples].source`", "did you mean `features`?"]);
    refused(
        &SAMPLES.replace("\"request\"", "\"requests\""),
        &["`[samples].key` names the column `requests`", "did you mean `request`?"],
    );
    refused(&SAMPLES.replace("\"request\"", "\"history\""), &["`[samples].key`", "`history`", "List"]);
    refused(&format!("{SAMPLES}where = \"usr = 1\"\n"), &["`[samples].where`", "usr"]);
    refused(&format!("{SAMPLES}where = \"request\"\n"), &["`[samples].where`", "is not a condition"]);
    refused(&format!("{SAMPLES}where = \"request > 1) OR (1 = 1\"\n"), &["`[samples].where`"]);
    refused("[samples]\nsource = \"features\"\nquery = \"SELECT 1\"\n", &["both `source` and `query`"]);
    refused("[samples]\n", &["neither `source` nor `query`"]);
    refused("[samples]\nsource = \"features\"\nduplicates = \"skip\"\n", &["needs `[samples].key`"]);
    refused(
        &join("\"req\"", "\"request\""),
        &["`[join].on`", "`request`, which `events` does not have", "known names: `event`, `req`"],
    );
    refused(&join("\"req\"", "\"kind\""), &["`[join].on`", "`kind` of `events` is Utf8"]);
    refused(&join("\"at\"", "\"kind\""), &["column `kind`", "`[join].time`", "`click` is not a time"]);
    refused(&join("\"60s\"", "\"60 parsecs\""), &["`[join].window`"]);
    refused(&join("kind = 'click'", "knd = 'click'"), &["`[join.labels].clicked`", "knd", "`kind`"]);
    refused(&join("max(seconds)", "seconds"), &["`[join.labels].seconds`", "is not an aggregate"]);
    refused(&join("max(seconds)", "max(seconds) + event"), &["`[join.labels].seconds`"]);
    refused(&join("max(seconds)", "max(kind)"), &["`[join.labels].seconds`", "not a number"]);
    refused(&join("seconds = {", "item = {"), &["two steps", "`item`"]);
    refused(
        &format!("{SAMPLES}{}", USER.replace("\"age\"", "\"agee\"")),
        &["`[[attributes]]` 1: `columns`", "did you mean `age`?"],
    );
    refused(
        &format!("{SAMPLES}{USER}default = {{ age = 0 }}\n"),
        &["`default` names `age`", "known names: `user_age`"],
    );
}

/// A context with the engine settings of a build that affect joins.
fn two_threads() -> SessionContext {
    let mut config =
        datafusion::prelude::SessionConfig::new().with_target_partitions(2).with_collect_statistics(false);
    config.options_mut().optimizer.hash_join_single_partition_threshold = 0;
    config.options_mut().optimizer.hash_join_single_partition_threshold_rows = 0;
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(config)
        .with_physical_optimizer_rules(physical_rules(None));
    SessionContext::new_with_state(state.build())
}

#[test]
fn lists_are_streamed_past_all_declared_steps() {
    let sampling = "[sampling]\nlabel = \"clicked\"\nkeep = { \"0\" = 0.5 }\nweight = \"weight\"\n";
    let timeline = "[[timelines]]\nsource = \"events\"\non = { user = \"kind\" }\n\
                    time = { column = \"at\", unit = \"us\", not_before = 1970-01-01 }\nlength = 3\ncolumns = { past = \"event\" }\n";
    let past = "past = { kind = \"sequence\" }\nweight = { kind = \"weight\" }\nhistory = { kind = \"sequence\" }\nclicked = { kind = \"label\" }\n";
    let text = format!("{START}{SAMPLES}{JOIN}{USER}{sampling}{timeline}[features]\n{past}");
    let config = Config::parse(Path::new("dataset.toml"), &text).unwrap();
    let plan = block(async {
        let context = two_threads();
        let once = FEATURES
            .replace(", (2, 'a', 110, 8, [1, 9])", "")
            .replace(", (6, 'c', 151, 7, [6]), (6, 'c', 150, 7, [7])", "");
        for (name, rows) in [("features", once.as_str()), ("events", EVENTS), ("users", USERS)] {
            context.query(&format!("CREATE TABLE {name} AS {rows}")).await.unwrap();
        }
        let samples = plan(&context, &config, &Problems::default()).await.unwrap();
        assert_eq!(samples.skipped.duplicate_samples, 0);
        samples.wide.clone().create_physical_plan().await.unwrap()
    });
    let mut joins = 0;
    plan.apply(|node| {
        let lists = |node: &Arc<dyn ExecutionPlan>| {
            node.schema().fields().iter().any(|field| field.data_type().is_nested())
        };
        let with_lists = node.children().into_iter().filter(|child| lists(child)).count();
        joins += usize::from(node.name() == "SpillingJoin" && with_lists == 1);
        let streams =
            ["SpillingJoin", "ProjectionExec", "FilterExec", "CoalescePartitionsExec", "CooperativeExec"];
        let passes = streams.contains(&node.name())
            || node
                .downcast_ref::<RepartitionExec>()
                .is_some_and(|split| matches!(split.partitioning(), Partitioning::RoundRobinBatch(_)));
        assert!(with_lists == 0 || passes, "lists go through {}", displayable(node.as_ref()).one_line());
        Ok(TreeNodeRecursion::Continue)
    })
    .unwrap();
    assert_eq!(joins, 4, "labels, the attributes' time, attributes and positions");
}

/// Computes the attributes of each sample (user, item, time) by definition: those of the last row (user, item,
/// from, age) at or before its time. The inner `None` is a null age, the outer one a missing row.
fn ages_in_time(samples: &[[i64; 3]], attributes: &[[i64; 4]]) -> Vec<Option<Option<i64>>> {
    let age = |[user, item, time]: &[i64; 3]| {
        let known = attributes.iter().filter(|row| row[..2] == [*user, *item] && row[2] <= *time);
        known.max_by_key(|row| row[2]).map(|row| (row[3] >= 0).then_some(row[3]))
    };
    samples.iter().map(age).collect()
}

proptest! {
    #![proptest_config(onefold_property::cases(16))]

    /// Covers many rows of one key, keys of two columns, null attributes, and samples and attributes with equal
    /// times.
    #[test]
    fn attributes_hold_from_their_time_to_the_next(
        samples in vec([0i64..3, 0..2, 0..60], 1..80),
        starts in vec([0i64..3, 0..2, 0..60], 0..150),
        skip in any::<bool>(),
    ) {
        // One row for each key and time; every third age is null.
        let starts: std::collections::BTreeSet<[i64; 3]> = starts.into_iter().collect();
        let age = |[user, item, from]: [i64; 3]| if from % 3 == 0 { -1 } else { 10_000 * user + 100 * item + from };
        let attributes: Vec<[i64; 4]> =
            starts.into_iter().map(|row| [row[0], row[1], row[2], age(row)]).collect();
        let missing = if skip { "skip" } else { "null" };
        let text = format!(
            "format_version = 1\n[sources]\nfeatures = \"x\"\nusers = \"x\"\n[samples]\n\
             query = \"SELECT request, CAST(user AS VARCHAR) AS user, item, time FROM features\"\nkey = [\"request\"]\n\
             [session]\nkey = [\"user\"]\ntime = {{ column = \"time\", unit = \"us\", not_before = 1970-01-01 }}\n\
             [[attributes]]\nsource = \"users\"\non = {{ user = \"name\", item = \"product\" }}\n\
             time = {{ column = \"since\", unit = \"us\", not_before = 1970-01-01 }}\ncolumns = [\"age\"]\n\
             missing = \"{missing}\"\n[features]\nrequest = {{ kind = \"label\" }}\nage = {{ kind = \"dense\" }}\n"
        );
        let config = Config::parse(Path::new("dataset.toml"), &text).unwrap();
        let numbered = samples.iter().enumerate().map(|(i, row)| [i as i64, row[0], row[1], row[2]]);
        let numbered: Vec<[i64; 4]> = numbered.collect();
        let (built, skipped) = block(async {
            let context = two_threads();
            register(&context, "features", ["request", "user", "item", "time"], &numbered);
            register(&context, "numbers", ["user", "product", "since", "age"], &attributes);
            let users = "CREATE TABLE users AS SELECT CAST(user AS VARCHAR) AS name, product, since, \
                         nullif(age, -1) AS age FROM numbers";
            context.query(users).await.unwrap();
            let samples = plan(&context, &config, &Problems::default()).await.unwrap();
            context.register_table("wide", samples.wide.clone().into_view()).unwrap();
            (rows(&context, "SELECT request, coalesce(age, -1) FROM wide ORDER BY request").await, samples.skipped)
        });
        let ages = ages_in_time(&samples, &attributes);
        let expected = ages.iter().enumerate().filter(|(_, age)| age.is_some() || !skip);
        let expected: Vec<Vec<i64>> =
            expected.map(|(i, age)| vec![i as i64, age.flatten().unwrap_or(-1)]).collect();
        prop_assert_eq!(built, expected);
        let without = ages.iter().filter(|age| age.is_none()).count();
        prop_assert_eq!(skipped.samples_without_attributes, without as u64);
    }
}

/// Rows of a feature log (request, user, time, item), of events (id, request, time, kind, seconds) and of
/// attributes (user, from, age), some of them repeated.
type Logs = (Vec<[i64; 4]>, Vec<[i64; 5]>, Vec<[i64; 3]>);

fn random_logs() -> impl Strategy<Value = Logs> {
    let copies = 1usize..3;
    let feature = ([0i64..12, 0..3, 0..40, 0..2], copies.clone());
    let event = ([0i64..14, 0..60, 0..2, 0..9], copies.clone());
    let attribute = ([0i64..3, 0..40], copies);
    let twice = |(row, copies)| std::iter::repeat_n(row, copies);
    let features = vec(feature, 1..30).prop_map(move |rows| rows.into_iter().flat_map(twice).collect());
    let events = vec(event, 0..30).prop_map(|rows| {
        let numbered = rows.into_iter().enumerate();
        let row = |(i, ([request, time, kind, seconds], copies)): (usize, ([i64; 4], usize))| {
            std::iter::repeat_n([i as i64, request, time, kind, seconds], copies)
        };
        numbered.flat_map(row).collect()
    });
    let attributes = vec(attribute, 0..12).prop_map(|rows| {
        let row = |([user, from], copies): ([i64; 2], usize)| {
            std::iter::repeat_n([user, from, 100 * user + from], copies)
        };
        rows.into_iter().flat_map(row).collect()
    });
    (features, events, attributes)
}

/// Computes the samples by definition (request, user, time, item, clicked, seconds, age, which is -1 if missing),
/// and the counts.
fn expected_samples((features, events, attributes): &Logs, window: i64) -> (Vec<Vec<i64>>, SkipCounts) {
    let mut firsts: BTreeMap<i64, [i64; 3]> = BTreeMap::new();
    for [request, user, time, item] in features {
        let row = [*time, *user, *item];
        firsts.entry(*request).and_modify(|first| *first = row.min(*first)).or_insert(row);
    }
    let mut distinct = events.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let mut skipped = SkipCounts {
        duplicate_samples: (features.len() - firsts.len()) as u64,
        duplicate_events: (events.len() - distinct.len()) as u64,
        ..SkipCounts::default()
    };
    for [_, request, at, ..] in &distinct {
        match firsts.get(request) {
            None => skipped.orphan_events += 1,
            Some([time, ..]) if at < time => skipped.early_events += 1,
            Some([time, ..]) if *at > time + window => skipped.late_events += 1,
            Some(_) => {}
        }
    }
    let mut samples = Vec::new();
    for (request, [time, user, item]) in firsts {
        let inside =
            distinct.iter().filter(|[_, of, at, ..]| *of == request && (time..=time + window).contains(at));
        let inside: Vec<_> = inside.collect();
        let clicked = i64::from(inside.iter().any(|event| event[3] == 1));
        let seconds = inside.iter().map(|event| event[4]).max().unwrap_or(-7);
        let known = attributes.iter().filter(|[of, from, _]| *of == user && *from <= time);
        let age = known.max_by_key(|row| row[1]).map(|row| row[2]);
        skipped.samples_without_events += u64::from(inside.is_empty());
        skipped.samples_without_attributes += u64::from(age.is_none());
        samples.push(vec![request, user, time, item, clicked, seconds, age.unwrap_or(-1)]);
    }
    (samples, skipped)
}

proptest! {
    #![proptest_config(onefold_property::cases(16))]

    #[test]
    fn declared_steps_equal_their_definition(
        logs in random_logs(),
        window in 1i64..30,
        with_event_key in any::<bool>(),
        keep in prop_oneof![Just(None), (1u32..10).prop_map(Some)],
    ) {
        let key = if with_event_key { "key = [\"id\"]\n" } else { "" };
        let mut text = format!(
            "format_version = 1\n[sources]\nfeatures = \"x\"\nevents = \"x\"\nusers = \"x\"\n[samples]\nsource = \"features\"\n\
             key = [\"request\"]\n[session]\nkey = [\"user\"]\n\
             time = {{ column = \"time\", unit = \"us\", not_before = 1970-01-01 }}\n[join]\nsource = \"events\"\non = {{ request = \"of\" }}\n\
             time = {{ column = \"at\", unit = \"us\", not_before = 1970-01-01 }}\nwindow = \"{window}us\"\n{key}[join.labels]\nclicked = {{ when = \"kind = 1\" }}\n\
             seconds = {{ value = \"max(seconds)\", missing = -7 }}\n[[attributes]]\nsource = \"users\"\non = [\"user\"]\n\
             time = {{ column = \"since\", unit = \"us\", not_before = 1970-01-01 }}\ncolumns = [\"age\"]\ndefault = {{ age = -1 }}\n"
        );
        if let Some(tenths) = keep {
            let probability = f64::from(tenths) / 10.0;
            text += &format!("[sampling]\nlabel = \"clicked\"\nkeep = {{ \"0\" = {probability} }}\nseed = 5\nweight = \"weight\"\n");
        }
        text += "[features]\nclicked = { kind = \"label\" }\nseconds = { kind = \"dense\" }\nage = { kind = \"dense\" }\n";
        text += if keep.is_some() { "weight = { kind = \"weight\" }\n" } else { "" };
        let config = Config::parse(Path::new("dataset.toml"), &(text + "item = { kind = \"sparse\" }\n")).unwrap();
        let (built, skipped) = block(async {
            let context = two_threads();
            register(&context, "features", ["request", "user", "time", "item"], &logs.0);
            register(&context, "events", ["id", "of", "at", "kind", "seconds"], &logs.1);
            register(&context, "users", ["user", "since", "age"], &logs.2);
            let samples = plan(&context, &config, &Problems::default()).await.unwrap();
            context.register_table("wide", samples.wide.clone().into_view()).unwrap();
            context.register_table("narrow", samples.narrow.clone().into_view()).unwrap();
            let sql = "SELECT request, user, time, item, CAST(clicked AS BIGINT), CAST(seconds AS BIGINT), CAST(age AS BIGINT) FROM wide ORDER BY request";
            let wide = rows(&context, sql).await;
            let narrow = rows(&context, "SELECT request, user, time FROM narrow ORDER BY request").await;
            assert_eq!(narrow, wide.iter().map(|row| row[..3].to_vec()).collect::<Vec<_>>());
            assert_eq!(samples.expected, Some(wide.len() as u64));
            (wide, samples.skipped)
        });
        let (expected, mut counts) = expected_samples(&logs, window);
        counts.sampled_out = skipped.sampled_out;
        prop_assert_eq!(&skipped, &counts);
        prop_assert_eq!(built.len() as u64 + skipped.sampled_out, expected.len() as u64);
        let left: Vec<_> = expected.into_iter().filter(|row| row[4] == 1 || built.contains(row)).collect();
        prop_assert_eq!(built, left);
        prop_assert!(keep.is_some() || skipped.sampled_out == 0);
    }
}

/// Samples (user, time) and events (user, time, kind) with few users and times.
fn random_credits() -> impl Strategy<Value = (Vec<[i64; 2]>, Vec<[i64; 3]>)> {
    (vec([0i64..3, 0..50], 1..40), vec([0i64..4, 0..60, 0..2], 0..60))
}

/// Computes by definition the clicks, the sum of the numbers of the events that belong to each sample, and the delays
/// of both in seconds.
fn credited(samples: &[[i64; 2]], events: &[[i64; 3]], window: i64, credit: &str) -> Vec<Vec<i64>> {
    let mut labels: Vec<Vec<i64>> =
        (0..samples.len()).map(|sample| vec![sample as i64, 0, 0, -1, -1]).collect();
    for (number, [user, at, kind]) in (1i64..).zip(events) {
        let falls = |[of, time]: &[i64; 2]| of == user && (*time..=time + window).contains(at);
        let times = samples.iter().copied().filter(falls).map(|sample| sample[1]);
        let chosen = match credit {
            "last" => times.max(),
            "first" => times.min(),
            _ => None,
        };
        for (sample, label) in samples.iter().zip(&mut labels) {
            if falls(sample) && (credit == "every" || chosen == Some(sample[1])) {
                // Times are microseconds, so all delays above 0 are rounded up to a second.
                let delay = i64::from(*at > sample[1]);
                if *kind == 1 {
                    label[3] = if label[1] == 1 { label[3].min(delay) } else { delay };
                }
                label[4] = label[4].max(delay);
                label[1] = label[1].max(*kind);
                label[2] += number;
            }
        }
    }
    labels
}

proptest! {
    #![proptest_config(onefold_property::cases(16))]

    #[test]
    fn events_belong_to_the_samples_that_credit_says(
        (samples, events) in random_credits(),
        window in 1i64..30,
        credit in prop_oneof![Just("every"), Just("last"), Just("first")],
        with_event_key in any::<bool>(),
    ) {
        let key = if with_event_key { "key = [\"id\"]\n" } else { "" };
        let text = format!(
            "format_version = 1\n[sources]\nfeatures = \"x\"\nevents = \"x\"\n[samples]\nsource = \"features\"\n\
             key = [\"request\"]\n[session]\nkey = [\"user\"]\n\
             time = {{ column = \"time\", unit = \"us\", not_before = 1970-01-01 }}\n\
             [join]\nsource = \"events\"\non = {{ user = \"of\" }}\nwindow = \"{window}us\"\ncredit = \"{credit}\"\n{key}\
             time = {{ column = \"at\", unit = \"us\", not_before = 1970-01-01 }}\n\
             [join.labels]\nclicked = {{ when = \"kind = 1\", delay = true }}\n\
             numbers = {{ value = \"sum(id)\", delay = true }}\n\
             [features]\nclicked = {{ kind = \"label\" }}\nnumbers = {{ kind = \"dense\" }}\n\
             request = {{ kind = \"sparse\" }}\n"
        );
        let config = Config::parse(Path::new("dataset.toml"), &text).unwrap();
        let (built, without) = block(async {
            let context = two_threads();
            let features = samples.iter().enumerate().map(|(request, row)| [request as i64, row[0], row[1]]);
            register(&context, "features", ["request", "user", "time"], &features.collect::<Vec<_>>());
            let numbered = (1i64..).zip(&events).map(|(id, row)| [id, row[0], row[1], row[2]]);
            register(&context, "events", ["id", "of", "at", "kind"], &numbered.collect::<Vec<_>>());
            let samples = plan(&context, &config, &Problems::default()).await.unwrap();
            context.register_table("wide", samples.wide.clone().into_view()).unwrap();
            let made = ["clicked", "numbers", "clicked_delay", "numbers_delay"];
            let made = made.map(|name| format!("CAST({name} AS BIGINT)")).join(", ");
            let sql = format!("SELECT request, {made} FROM wide ORDER BY request");
            (rows(&context, &sql).await, samples.skipped.samples_without_events)
        });
        let expected = credited(&samples, &events, window, credit);
        prop_assert_eq!(without, expected.iter().filter(|row| row[2] == 0).count() as u64);
        prop_assert_eq!(built, expected);
    }
}
