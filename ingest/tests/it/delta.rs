//! Delta Lake tables as sources. The tests write the log and the files of a table by hand.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use arrow::array::Int64Array;
use deltalake_core::checkpoints::create_checkpoint_from_table_url_and_cleanup;
use onefold_datasets::{Snapshot, TableVersion};
use onefold_tests::{S3Server, SECRET_KEY};
use serde_json::{Value, json};
use url::Url;

use crate::logs::{Dir, ROWS, Row, SELECT, columns, expected, parquet, rows};
use crate::s3;

const ID: &str = "5fba94ed-9794-4965-ba6e-6ee3c0d22af9";
/// 2024-06-01T00:00Z in seconds since 1970.
const JUNE: u64 = 1_717_200_000;

/// The table in the folder `table`, whose partition column is `day`.
struct Table<'a> {
    dir: &'a Dir,
    versions: u64,
}

impl<'a> Table<'a> {
    /// Creates a table. Its version 0 has these actions beside the usual ones.
    fn create(dir: &'a Dir, actions: &[Value]) -> Self {
        let protocol = json!({ "protocol": { "minReaderVersion": 1, "minWriterVersion": 2 } });
        Self::create_as(dir, &[&[protocol, metadata(ID, &[])][..], actions].concat())
    }

    fn create_as(dir: &'a Dir, actions: &[Value]) -> Self {
        let mut table = Self { dir, versions: 0 };
        table.commit(actions);
        table
    }

    /// Commits the next version.
    fn commit(&mut self, actions: &[Value]) {
        let lines: String = actions.iter().map(|action| format!("{action}\n")).collect();
        self.dir.write(log(self.versions), lines);
        self.versions += 1;
    }
}

/// Returns the path of the log of a version.
fn log(version: u64) -> String {
    format!("table/_delta_log/{version:020}.json")
}

/// Returns the action that defines the columns: those of the log, `day`, and further columns of integers.
fn metadata(id: &str, further: &[&str]) -> Value {
    let list = json!({ "type": "array", "elementType": "long", "containsNull": true });
    let known = [
        ("request", json!("long")),
        ("user", json!("long")),
        ("time", json!("timestamp")),
        ("age", json!("double")),
        ("page", json!("string")),
        ("history", list),
        ("clicked", json!("boolean")),
        ("day", json!("integer")),
    ];
    let further = further.iter().map(|name| (*name, json!("long")));
    let field = |(name, kind): (&str, Value)| -> Value {
        json!({ "name": name, "type": kind, "nullable": true, "metadata": {} })
    };
    let fields: Vec<Value> = known.into_iter().chain(further).map(field).collect();
    let schema = json!({ "type": "struct", "fields": fields }).to_string();
    json!({ "metaData": {
        "id": id,
        "format": { "provider": "parquet", "options": {} },
        "schemaString": schema,
        "partitionColumns": ["day"],
        "configuration": {},
        "createdTime": 1_717_200_000_000_i64,
    } })
}

/// Returns the action that adds a file with `bytes`, which it writes.
fn added_file(dir: &Dir, path: &str, day: i64, bytes: &[u8]) -> Value {
    dir.write(format!("table/{path}"), bytes);
    json!({ "add": {
        "path": path,
        "partitionValues": { "day": day.to_string() },
        "size": bytes.len(),
        "modificationTime": 1_717_200_000_000_i64,
        "dataChange": true,
    } })
}

fn added(dir: &Dir, path: &str, day: i64, rows: &[Row]) -> Value {
    added_file(dir, path, day, &parquet(columns(rows)))
}

fn removed(path: &str) -> Value {
    json!({ "remove": { "path": path, "deletionTimestamp": 1_717_200_000_000_i64, "dataChange": true } })
}

/// Returns the section of the source, with these keys beside `delta`.
fn source(keys: &str) -> String {
    format!("[sources]\nlog = {{ delta = \"table\"{keys} }}")
}

/// Writes a table whose version 1 has the whole log. Version 2 does not have day 1.
fn whole_table(dir: &Dir) -> Table<'_> {
    let rows = rows();
    let mut table = Table::create(dir, &[added(dir, "day=0/a.parquet", 0, &rows[..14])]);
    let later =
        [added(dir, "day=1/b.parquet", 1, &rows[14..28]), added(dir, "day=2/c.parquet", 2, &rows[28..])];
    table.commit(&later);
    table.commit(&[removed("day=1/b.parquet")]);
    table
}

fn table_version(dataset: &Path) -> Option<TableVersion> {
    Snapshot::load(dataset).unwrap().table_versions.get("log").cloned()
}

#[test]
fn a_version_has_the_rows_of_its_files() {
    let dir = Dir::new();
    let table = whole_table(&dir);
    for version in 0..table.versions {
        let file = fs_err::OpenOptions::new().write(true).open(dir.path(log(version))).unwrap();
        let committed = UNIX_EPOCH + Duration::from_secs(JUNE + 3600 * version);
        file.into_file().set_modified(committed).unwrap();
    }
    dir.configure(&source(", version = 1"), SELECT);
    let (summary, files) = dir.build("whole");
    assert!(files == expected(), "the samples are others");
    assert_eq!(summary["source_rows"], ROWS);
    assert_eq!(summary["table_versions"]["log"], json!({ "table": ID, "version": 1 }));
    assert_eq!(table_version(&dir.path("whole")), Some(TableVersion { table: ID.to_owned(), version: 1 }));
    for (keys, version, samples) in [
        ("", 2, ROWS - 14),
        (", version = 0", 0, 14),
        (", timestamp = \"2024-06-01T01:30:00Z\"", 1, ROWS),
        (", timestamp = 2024-06-01T00:59:00Z", 0, 14),
    ] {
        dir.configure(&source(keys), SELECT);
        let (summary, _) = dir.build(&format!("dataset-{version}-{}", keys.len()));
        assert_eq!(summary["samples"], samples, "{keys}");
        assert_eq!(summary["table_versions"]["log"]["version"], version, "{keys}");
    }
    dir.configure(&source(", timestamp = \"2024-05-31T00:00:00Z\""), SELECT);
    dir.fails(&["source `log`", "no version", "at or before 2024-05-31 00:00:00 UTC", "`timestamp`"]);
    dir.configure(&source(", version = 7"), SELECT);
    dir.fails(&["source `log`", "its version 7 cannot be read", "delta.logRetentionDuration"]);
}

#[test]
fn partitions_are_pruned_and_columns_that_came_later_are_null_before() {
    let dir = Dir::new();
    let rows = rows();
    let mut table = Table::create(&dir, &[added(&dir, "day=0/a.parquet", 0, &rows[..14])]);
    let mut with_kind = columns(&rows[14..28]);
    with_kind.push(("kind", Arc::new(Int64Array::from(vec![3; 14]))));
    let mut holed = parquet(columns(&rows[28..]));
    holed[4..200].fill(0xff);
    // The name of the folder says nothing.
    let later = [
        metadata(ID, &["kind", "later"]),
        added_file(&dir, "b.parquet", 1, &parquet(with_kind)),
        added_file(&dir, "day=0/c%20c.parquet", 7, &holed),
    ];
    // A path in the log is encoded.
    fs_err::rename(dir.path("table/day=0/c%20c.parquet"), dir.path("table/day=0/c c.parquet")).unwrap();
    table.commit(&later);
    for (condition, samples) in [("kind IS NULL", 14), ("kind = 3 AND later IS NULL", 14), ("day = 1", 14)] {
        dir.configure(&source(""), &format!("{SELECT} WHERE day < 7 AND {condition}"));
        assert_eq!(dir.build(&format!("dataset-{}", condition.len())).0["samples"], samples, "{condition}");
    }
    dir.configure(&source(""), SELECT);
    dir.fails(&["source `log`", "table/day=0/c c.parquet", "it cannot be decoded"]);
}

#[test]
fn tables_that_cannot_be_read_are_refused() {
    let reader = |features: &[&str]| {
        json!({ "protocol": {
            "minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features,
        } })
    };
    let rows = rows();
    let fails = |actions: &dyn Fn(&Dir) -> Vec<Value>, parts: &[&str]| {
        let dir = Dir::new();
        Table::create_as(&dir, &actions(&dir));
        dir.configure(&source(""), SELECT);
        dir.fails(&[&["source `log`"][..], parts].concat());
    };
    let plain = |dir: &Dir| added(dir, "a.parquet", 0, &rows);
    fails(
        &|dir| {
            let mut file = plain(dir);
            file["add"]["stats"] = json!("{\"numRecords\":40}");
            file["add"]["deletionVector"] = json!({
                "storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "offset": 4, "sizeInBytes": 40, "cardinality": 6,
            });
            vec![reader(&["deletionVectors"]), metadata(ID, &[]), file]
        },
        &["its file `a.parquet` has a deletion vector", "REORG TABLE"],
    );
    let protocol = || json!({ "protocol": { "minReaderVersion": 1, "minWriterVersion": 2 } });
    fails(
        &|dir| {
            let mut file = plain(dir);
            file["add"]["path"] = json!("file:///elsewhere/a.parquet");
            vec![protocol(), metadata(ID, &[]), file]
        },
        &["`file:///elsewhere/a.parquet` is in another folder", "deep copy"],
    );
    fails(
        &|dir| {
            let mut file = plain(dir);
            file["add"]["path"] = json!("b.parquet");
            vec![protocol(), metadata(ID, &[]), file]
        },
        &["table/b.parquet", "the log of the table lists it", "VACUUM"],
    );
    fails(
        &|dir| {
            let mut file = plain(dir);
            file["add"]["size"] = json!(7);
            vec![protocol(), metadata(ID, &[]), file]
        },
        &["table/a.parquet", "the log of the table states 7"],
    );
    fails(&|_| vec![protocol(), metadata(ID, &[])], &["version 0 of the table has no files"]);
    fails(
        &|dir| {
            let mut columns = metadata(ID, &[]);
            let mut schema: Value =
                serde_json::from_str(columns["metaData"]["schemaString"].as_str().unwrap()).unwrap();
            for (place, field) in schema["fields"].as_array_mut().unwrap().iter_mut().enumerate() {
                let physical = field["name"].clone();
                field["metadata"] = json!({
                    "delta.columnMapping.id": place + 1, "delta.columnMapping.physicalName": physical,
                });
            }
            columns["metaData"]["schemaString"] = json!(schema.to_string());
            columns["metaData"]["configuration"] =
                json!({ "delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "8" });
            let protocol = json!({ "protocol": { "minReaderVersion": 2, "minWriterVersion": 5 } });
            vec![protocol, columns, plain(dir)]
        },
        &["`delta.columnMapping.mode` is \"name\"", "DROP FEATURE columnMapping"],
    );
    let dir = Dir::new();
    dir.write("table/a.parquet", parquet(columns(&rows)));
    dir.configure(&source(""), SELECT);
    dir.fails(&["source `log`", "it is not a Delta Lake table", "`_delta_log`"]);
    dir.configure("[sources]\nlog = { delta = \"nothing\" }", SELECT);
    dir.fails(&["source `log`", "there is no such folder"]);
}

/// Returns the configuration of an append of added files, with partitions by day.
fn by_day(dir: &Dir, keys: &str) {
    let sources = format!("{}\n[partition]\ncolumns = [\"day\"]", source(keys));
    dir.configure(&sources, &SELECT.replace(" FROM log", ", day FROM log"));
}

fn append(dir: &Dir, arguments: &[&str]) -> Command {
    let command = ["append", "dataset.toml", "--out", "dataset", "--threads", "2", "--json"];
    dir.command(&[&command[..], arguments].concat())
}

#[test]
fn an_append_reads_what_was_added() {
    let dir = Dir::new();
    let rows = rows();
    let version = || table_version(&dir.path("dataset")).unwrap().version;
    let mut table = Table::create(&dir, &[added(&dir, "day=0/a.parquet", 0, &rows[..14])]);
    by_day(&dir, ", append = \"added\"");
    assert_eq!(dir.build("dataset").0["samples"], 14);
    table.commit(&[added(&dir, "day=1/b.parquet", 1, &rows[14..28])]);
    let (summary, _) = dir.works(append(&dir, &[]), "dataset");
    assert_eq!((&summary["samples"], &summary["source_rows"], version()), (&json!(28), &json!(14), 1));
    dir.fails_as(append(&dir, &[]), &["version 1 adds no file to version 1", "nothing to append"]);
    // Files of which a filter leaves rows out are read again.
    let days = [added(&dir, "day=2/c.parquet", 2, &rows[28..35]), added(&dir, "d.parquet", 3, &rows[35..])];
    table.commit(&days);
    let (summary, _) = dir.works(append(&dir, &["--partition", "day=2"]), "dataset");
    assert_eq!((&summary["samples"], version()), (&json!(35), 1));
    let (summary, _) = dir.works(append(&dir, &[]), "dataset");
    assert_eq!((&summary["samples"], &summary["source_rows"], version()), (&json!(40), &json!(12), 2));
    dir.build("whole");
    let partitions = |name: &str| {
        let partitions = Snapshot::load(&dir.path(name)).unwrap().partitions;
        partitions.into_iter().map(|partition| (partition.key, partition.digest)).collect::<Vec<_>>()
    };
    assert_eq!(partitions("dataset"), partitions("whole"));
    // A partition does not lose the rows that are not read.
    table.commit(&[added(&dir, "day=3/e.parquet", 3, &rows)]);
    dir.fails_as(append(&dir, &[]), &["partition `day=3` has samples of earlier rows", "--merge"]);
    table.commit(&[removed("day=3/e.parquet")]);
    by_day(&dir, ", append = \"added\", version = 1");
    dir.fails_as(append(&dir, &[]), &["the rows of version 2, which is newer than version 1"]);
    // Rows that moved to another file are not read twice.
    table.commit(&[removed("day=0/a.parquet"), added(&dir, "day=0/z.parquet", 0, &rows[..14])]);
    by_day(&dir, ", append = \"added\"");
    dir.fails_as(append(&dir, &[]), &["1 file of version 2", "`day=0/a.parquet`", "`append = \"all\"`"]);
    by_day(&dir, ", append = \"all\"");
    let (summary, _) = dir.works(append(&dir, &[]), "dataset");
    assert_eq!((&summary["changed"], &summary["source_rows"]), (&json!(false), &json!(40)));
    // Another table at the same place.
    let log = fs_err::read_to_string(dir.path(log(0))).unwrap();
    dir.write("table/_delta_log/00000000000000000000.json", log.replace(ID, "another"));
    by_day(&dir, ", append = \"added\"");
    dir.fails_as(append(&dir, &[]), &["it is not the table whose version 2 the dataset has"]);
}

#[test]
fn a_checkpoint_takes_the_place_of_the_log_before_it() {
    let dir = Dir::new();
    whole_table(&dir);
    by_day(&dir, ", append = \"added\", version = 0");
    assert_eq!(dir.build("dataset").0["samples"], 14);
    let table = Url::from_directory_path(dir.path("table")).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let written = create_checkpoint_from_table_url_and_cleanup(table, 1, Some(false), None);
    runtime.block_on(written).unwrap();
    for version in 0..2 {
        fs_err::remove_file(dir.path(log(version))).unwrap();
    }
    for (keys, samples) in [(", version = 1", ROWS), ("", ROWS - 14)] {
        dir.configure(&source(keys), SELECT);
        assert_eq!(dir.build(&format!("dataset-{samples}")).0["samples"], samples);
    }
    by_day(&dir, ", append = \"added\"");
    let parts = ["version 0, whose rows the dataset has, cannot be read any more", "`append = \"all\"`"];
    dir.fails_as(append(&dir, &[]), &parts);
}

#[test]
fn parts_read_one_version() {
    let dir = Dir::new();
    whole_table(&dir);
    let write = ["write", "dataset.toml", "--dataset", "dataset", "--bucket", "0/1", "--out", "part.json"];
    dir.configure(&source(""), SELECT);
    dir.fails_as(dir.command(&write), &["the source `log` is the newest version", "version = 12"]);
    dir.configure(&source(", version = 1"), SELECT);
    for arguments in [&write[..], &["commit", "dataset", "part.json"]] {
        let output = dir.command(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let snapshot = Snapshot::load(&dir.path("dataset")).unwrap();
    assert_eq!((snapshot.statistics.samples, snapshot.table_versions["log"].version), (40, 1));
}

#[test]
fn a_table_in_a_bucket() {
    let dir = Dir::new();
    whole_table(&dir);
    let server = S3Server::start();
    let files = ["day=0/a.parquet", "day=1/b.parquet", "day=2/c.parquet"].map(|path| format!("table/{path}"));
    for path in files.into_iter().chain((0..3).map(log)) {
        server.put("logs", &format!("lake/{path}"), fs_err::read(dir.path(&path)).unwrap());
    }
    let source = "{ delta = \"s3://logs/lake/table\", version = 1 }";
    dir.configure(&s3::sources(&server, source), SELECT);
    let (_, files) = dir.works(s3::program(&dir, "dataset", SECRET_KEY), "dataset");
    assert!(files == expected(), "the samples are others");
    dir.configure(&s3::sources(&server, "{ delta = \"s3://logs/lake/nothing\" }"), SELECT);
    let parts = ["s3://logs/lake/nothing", "it is not a Delta Lake table"];
    dir.fails_as(s3::program(&dir, "failed", SECRET_KEY), &parts);
    dir.configure(&s3::sources(&server, "\"s3://logs/lake/table\""), SELECT);
    let parts = ["it is a Delta Lake table", "{ delta = \"s3://logs/lake/table\" }"];
    dir.fails_as(s3::program(&dir, "failed", SECRET_KEY), &parts);
}

#[test]
fn init_finds_a_table() {
    let dir = Dir::new();
    whole_table(&dir);
    let output = dir.command(&["init", "table", "--out", "dataset.toml"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = fs_err::read_to_string(dir.path("dataset.toml")).unwrap();
    assert!(text.contains("\ntable = { delta = \"table\" }\n"), "{text}");
    dir.fails_as(
        dir.command(&["shard", "table", "--by", "user", "--out", "segments"]),
        &["it is a Delta Lake table", "{ delta = … }"],
    );
}
