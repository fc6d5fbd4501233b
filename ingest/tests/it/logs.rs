//! A log whose rows can be written in each format, and a wrapper of the program that builds datasets from it.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use arrow::datatypes::Int64Type;
use bytes::Bytes;
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use futures::{StreamExt, stream};
use onefold_datasets::Snapshot;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

/// The number of rows of [`rows`].
pub(crate) const ROWS: i64 = 40;
/// 2024-05-01T00:00Z in microseconds since 1970.
const DAY: i64 = 1_714_521_600_000_000;

/// A row of the log.
#[derive(Clone)]
pub(crate) struct Row {
    pub(crate) request: i64,
    pub(crate) user: i64,
    pub(crate) time: i64,
    pub(crate) age: Option<f64>,
    pub(crate) page: String,
    pub(crate) history: Vec<i64>,
    pub(crate) clicked: bool,
}

/// Returns a log with texts that need quotes, lists of all lengths, and missing values.
pub(crate) fn rows() -> Vec<Row> {
    let row = |request: i64| Row {
        request,
        user: request / 7,
        time: DAY + request * 61_000_001,
        age: (request % 5 != 0).then_some(30.0 + request as f64 / 4.0),
        page: format!("page \"{}\", line\n{}", request % 3, request % 2),
        history: (0..request % 6).map(|i| 1_000_000_007 * (request / 7) + i).collect(),
        clicked: request % 3 == 0,
    };
    (0..ROWS).map(row).collect()
}

/// Formats the time of a row in ISO 8601.
pub(crate) fn iso(time: i64) -> String {
    let (second, micros) = ((time - DAY) / 1_000_000, time % 1_000_000);
    format!("2024-05-01T{:02}:{:02}:{:02}.{micros:06}", second / 3600, second / 60 % 60, second % 60)
}

/// Returns the columns of rows as Parquet stores them.
pub(crate) fn columns(rows: &[Row]) -> Vec<(&'static str, ArrayRef)> {
    let lists = rows.iter().map(|row| Some(row.history.iter().copied().map(Some)));
    vec![
        ("request", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.request)))),
        ("user", Arc::new(Int64Array::from_iter_values(rows.iter().map(|row| row.user)))),
        ("time", Arc::new(TimestampMicrosecondArray::from_iter_values(rows.iter().map(|row| row.time)))),
        ("age", Arc::new(Float64Array::from_iter(rows.iter().map(|row| row.age)))),
        ("page", Arc::new(StringArray::from_iter_values(rows.iter().map(|row| &row.page)))),
        ("history", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
        ("clicked", Arc::new(BooleanArray::from_iter(rows.iter().map(|row| Some(row.clicked))))),
    ]
}

/// Returns `columns` with the columns of the same names in `changed` replaced.
pub(crate) fn with(
    columns: Vec<(&'static str, ArrayRef)>,
    changed: &[(&'static str, ArrayRef)],
) -> Vec<(&'static str, ArrayRef)> {
    let change = |(name, values): (&'static str, ArrayRef)| {
        let new = changed.iter().find(|(changed, _)| *changed == name);
        (name, new.map_or(values, |(_, new)| new.clone()))
    };
    columns.into_iter().map(change).collect()
}

/// Returns a column of 32-bit integers.
pub(crate) fn int32(values: impl Iterator<Item = i64>) -> ArrayRef {
    Arc::new(Int32Array::from_iter_values(values.map(|value| value as i32)))
}

/// Returns the bytes of a Parquet file.
pub(crate) fn parquet(columns: Vec<(&'static str, ArrayRef)>) -> Vec<u8> {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// Returns the text of a CSV file. Lists are texts with spaces between the ids.
pub(crate) fn csv(rows: &[Row], delimiter: char, header: bool) -> String {
    let names = ["request", "user", "time", "age", "page", "history", "clicked"];
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut lines = vec![];
    lines.extend(header.then(|| names.map(str::to_owned).join(&delimiter.to_string())));
    for row in rows {
        let history: Vec<String> = row.history.iter().map(i64::to_string).collect();
        let values = [
            row.request.to_string(),
            row.user.to_string(),
            iso(row.time),
            row.age.map_or(String::new(), |age| age.to_string()),
            quoted(&row.page),
            history.join(" "),
            row.clicked.to_string(),
        ];
        lines.push(values.join(&delimiter.to_string()));
    }
    lines.join("\n") + "\n"
}

/// Returns the text of a JSON lines file.
pub(crate) fn json_lines(rows: &[Row]) -> String {
    let line = |row: &Row| -> Value {
        json!({
            "request": row.request,
            "user": row.user,
            "time": iso(row.time),
            "age": row.age,
            "page": row.page,
            "history": row.history,
            "clicked": row.clicked,
        })
    };
    rows.iter().map(|row| format!("{}\n", line(row))).collect()
}

/// Compresses `text` with the compression of a file name ending (`gz`, `bz2`, `xz`, `zst`).
pub(crate) fn compressed(text: impl AsRef<[u8]>, ending: &str) -> Vec<u8> {
    let compression: FileCompressionType = ending.parse().unwrap();
    let chunks = stream::iter([Ok(Bytes::copy_from_slice(text.as_ref()))]).boxed();
    let chunks = compression.convert_to_compress_stream(chunks).unwrap().collect::<Vec<_>>();
    futures::executor::block_on(chunks).into_iter().flat_map(|chunk| chunk.unwrap()).collect()
}

/// The query for logs with list columns.
pub(crate) const SELECT: &str = "SELECT request, user, time, COALESCE(age, 0) AS age, \
    char_length(page) AS page, history, clicked FROM log";
/// The query for logs with lists as texts.
pub(crate) const SELECT_TEXT: &str = "SELECT request, user, time, COALESCE(age, 0) AS age, \
    char_length(page) AS page, CAST(string_to_array(history, ' ') AS BIGINT[]) AS history, clicked FROM log";
/// The query for logs that have only `request`; `{user}` is the expression for `user`.
pub(crate) const SELECT_TWO: &str = "SELECT request, {user} AS user, to_timestamp(1714521600 + request) AS time, 1 AS age, \
    2 AS page, [1] AS history, true AS clicked FROM log";

/// A temporary folder in which the program runs.
pub(crate) struct Dir(tempfile::TempDir);

impl Dir {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: impl AsRef<Path>, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, bytes).unwrap();
    }

    /// Writes a `dataset.toml` with `sources`, the lines of this section with its heading, and `query`.
    pub(crate) fn configure(&self, sources: &str, query: &str) {
        let text = format!(
            "format_version = 1\n{sources}\n[samples]\nquery = \"\"\"{query}\"\"\"\n\
             [session]\nuser = \"user\"\ngap = \"30m\"\ntime = \"time\"\norder = [\"request\"]\n\
             [features]\nclicked = {{ kind = \"label\" }}\nage = {{ kind = \"dense\" }}\npage = {{ kind = \"sparse\" }}\n\
             request = {{ kind = \"sparse\" }}\nuser = {{ kind = \"sparse\", group = \"user\" }}\n\
             history = {{ kind = \"sequence\", group = \"history\" }}\n"
        );
        self.write("dataset.toml", text);
    }

    /// Returns the command `onefold-ingest build dataset.toml --out out`, without S3 settings in the environment.
    pub(crate) fn program(&self, out: &str) -> Command {
        self.command(&["build", "dataset.toml", "--out", out, "--threads", "2", "--json"])
    }

    /// Returns the command `onefold-ingest` with these arguments, without S3 settings in the environment.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_onefold-ingest"));
        command.args(arguments);
        command.current_dir(self.0.path()).env_remove("ONEFOLD_LOG").env("RUST_BACKTRACE", "0");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
            command.env_remove(name);
        }
        command
    }

    /// Builds a dataset, and returns its summary and the bytes of its data files.
    #[track_caller]
    pub(crate) fn build(&self, out: &str) -> (Value, BTreeMap<PathBuf, Vec<u8>>) {
        self.works(self.program(out), out)
    }

    #[track_caller]
    pub(crate) fn works(&self, mut command: Command, out: &str) -> (Value, BTreeMap<PathBuf, Vec<u8>>) {
        let output = command.output().unwrap();
        let (stdout, stderr) = texts(&output);
        assert!(output.status.success(), "it must succeed: {stderr}");
        let summary = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
        (summary, data_files(&self.path(out)))
    }

    /// Runs a build that must fail with one error that contains all of `parts` and a hint, and that must leave no
    /// files.
    #[track_caller]
    pub(crate) fn fails(&self, parts: &[&str]) {
        self.fails_as(self.program("failed"), parts);
        assert!(!self.path("failed").exists());
    }

    #[track_caller]
    pub(crate) fn fails_as(&self, mut command: Command, parts: &[&str]) {
        let output = loop {
            match command.output() {
                // A child process of another test that has not yet started may still have the copied program open.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {}
                output => break output.unwrap(),
            }
        };
        let (_, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "it must fail: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains("\n  hint: "), "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "no {part:?} in: {stderr}");
        }
    }
}

/// Returns the statistics of a feature in the summary of a build.
pub(crate) fn statistics_of(summary: &Value, feature: &str) -> Value {
    let features = summary["statistics"]["features"].as_array().unwrap();
    features.iter().find(|known| known["name"] == feature).unwrap().clone()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Returns the Parquet files of a folder by their relative paths. For a dataset, returns the files of its newest
/// snapshot by path without the part that is unique to each writer.
fn data_files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let bytes = |path: &Path| fs_err::read(folder.join(path)).unwrap();
    let files: BTreeMap<PathBuf, Vec<u8>> = if folder.join("snapshots").exists() {
        let snapshot = Snapshot::load(folder).unwrap();
        let name = |path: &str| PathBuf::from(path.rsplit_once('-').unwrap().0);
        snapshot.file_paths().map(|path| (name(path), bytes(path.as_ref()))).collect()
    } else {
        let entries =
            fs_err::read_dir(folder).unwrap().map(|entry| PathBuf::from(entry.unwrap().file_name()));
        let is_parquet = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "parquet");
        entries.filter(is_parquet).map(|path| (path.clone(), bytes(&path))).collect()
    };
    assert!(!files.is_empty(), "no data files in `{}`", folder.display());
    files
}

/// Returns the data files of the dataset of the whole log, built from one Parquet file.
pub(crate) fn expected() -> BTreeMap<PathBuf, Vec<u8>> {
    let dir = Dir::new();
    dir.write("log.parquet", parquet(columns(&rows())));
    dir.configure("[sources]\nlog = \"log.parquet\"", SELECT);
    let (summary, files) = dir.build("dataset");
    assert_eq!(summary["samples"], ROWS);
    files
}
