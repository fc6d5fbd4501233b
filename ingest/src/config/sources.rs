//! `[sources]` and `[object_stores]`: the files of the raw logs' tables, and the settings of remote stores.

use std::collections::BTreeMap;

use super::delta::{DeltaConfig, DeltaKeys, DeltaVersion};
use crate::error::MessageAndHint;
use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::DFSchema;
use datafusion::logical_expr::Expr;
use datafusion::prelude::SessionContext;
use onefold_datasets::suggest;
use onefold_storage::S3Settings;
use serde::{Deserialize, Serialize};

/// The key of `[object_stores]` for buckets without a separate entry.
const ALL_BUCKETS: &str = "s3";

/// One table of `[sources]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceConfig {
    /// Files, directories, glob patterns, or URLs of these (`s3://`, `gs://`, `az://` or `file://`). Relative paths
    /// start at the folder of the configuration file.
    pub paths: Vec<String>,
    /// The format of the files. If `None`, it follows from their names.
    pub format: Option<Format>,
    /// The compression of the files. If `None`, it follows from their names.
    pub compression: Option<Compression>,
    /// The separator of the values of a CSV row. If `None`, a comma, or a tab in `.tsv` files.
    pub delimiter: Option<u8>,
    /// Whether CSV files begin with a row of column names.
    pub header: bool,
    /// The quote character around CSV values that contain delimiters or line ends.
    pub quote: Quote,
    /// The escape character before a quote that is part of a quoted CSV value. A doubled quote has the same
    /// meaning.
    pub escape: Option<u8>,
    /// The handling of CSV rows with fewer or more values than columns.
    pub ragged: Ragged,
    /// The types of columns that are made from `name=value` folders. Other such columns are text.
    pub partition_columns: Vec<(String, DataType)>,
    /// The types of columns of CSV and JSON files, in the order written. Other types are inferred.
    pub schema: Vec<(String, DataType)>,
    /// The handling of columns that some files lack.
    pub missing_columns: MissingColumns,
    /// The name of a column with the number of a row within its file, counted from 0, if one is requested.
    pub row_number: Option<String>,
    /// The name of a column with the name of the row's file: its URL, or its path, relative to the folder of the
    /// configuration file if it is below that folder.
    pub file_name: Option<String>,
    /// The name of a column with the number of the row's file, counted from 0 in the order of the files' names.
    pub file_number: Option<String>,
    /// Set if the only path is the folder of a Delta Lake table. The table's log lists the files.
    pub delta: Option<DeltaConfig>,
}

impl SourceConfig {
    /// Creates a source of the files at `path`, with defaults for all other settings.
    pub fn new(path: impl Into<String>) -> Self {
        Self {
            paths: vec![path.into()],
            format: None,
            compression: None,
            delimiter: None,
            header: true,
            quote: Quote::default(),
            escape: None,
            ragged: Ragged::default(),
            partition_columns: Vec::new(),
            schema: Vec::new(),
            missing_columns: MissingColumns::Error,
            row_number: None,
            file_name: None,
            file_number: None,
            delta: None,
        }
    }

    /// Creates a source of a version of the Delta Lake table at `path`. A column that some of its files lack is null
    /// there, because tables get columns later.
    pub fn delta(path: impl Into<String>, version: DeltaVersion) -> Self {
        Self {
            missing_columns: MissingColumns::Null,
            delta: Some(DeltaConfig { version, append: None, since: None }),
            ..Self::new(path)
        }
    }

    /// Returns the keys `row_number`, `file_name` and `file_number` that are set, with the columns that they name.
    pub(crate) fn made_columns(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let keys = [
            ("row_number", &self.row_number),
            ("file_name", &self.file_name),
            ("file_number", &self.file_number),
        ];
        keys.into_iter().filter_map(|(key, column)| Some((key, column.as_deref()?)))
    }
}

/// The format of a source's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Apache Parquet.
    Parquet,
    /// Rows of separated values (RFC 4180).
    Csv,
    /// One JSON object a line.
    Json,
}

/// The compression of a whole CSV or JSON file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Not compressed.
    None,
    /// `.gz`
    Gzip,
    /// `.bz2`
    Bzip2,
    /// `.xz`
    Xz,
    /// `.zst`
    Zstd,
}

/// The quote character around CSV values that contain delimiters or line ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Quote {
    /// `"`. Several lines that are one row because of quotes, but would be several rows without them, are an error.
    #[default]
    Guarded,
    /// This ASCII character.
    Character(u8),
    /// No quote character: quotes are part of the values.
    None,
}

impl Quote {
    /// Returns the quote character, if there is one.
    pub fn character(self) -> Option<u8> {
        match self {
            Self::Guarded => Some(b'"'),
            Self::Character(character) => Some(character),
            Self::None => None,
        }
    }
}

/// The handling of CSV rows with fewer or more values than columns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ragged {
    /// They are an error.
    #[default]
    Error,
    /// Missing values are null; more values than columns are an error.
    Null,
    /// They are left out and counted.
    Skip,
}

/// The handling of a column that only some files of a source have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingColumns {
    /// It is an error.
    #[default]
    Error,
    /// It is null in the files that lack it.
    Null,
}

/// The settings of `[object_stores]`, by `s3://bucket` or `s3`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectStores(BTreeMap<String, S3Settings>);

impl ObjectStores {
    /// Returns the settings of `bucket`: those of its own entry, those for all buckets, or the defaults.
    pub fn of_bucket(&self, bucket: &str) -> S3Settings {
        let own = self.0.get(&format!("s3://{bucket}"));
        own.or_else(|| self.0.get(ALL_BUCKETS)).cloned().unwrap_or_default()
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Paths {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    path: Option<Paths>,
    format: Option<Format>,
    compression: Option<Compression>,
    delimiter: Option<String>,
    header: Option<bool>,
    quote: Option<String>,
    escape: Option<String>,
    ragged: Option<Ragged>,
    #[serde(default)]
    partition_columns: toml::Table,
    #[serde(default)]
    schema: toml::Table,
    #[serde(default)]
    missing_columns: MissingColumns,
    row_number: Option<String>,
    file_name: Option<String>,
    file_number: Option<String>,
}

/// The sources of files, and the queries of the other sources, by name.
type Sources = (BTreeMap<String, SourceConfig>, BTreeMap<String, String>);

/// Reads `[sources]`.
///
/// # Errors
///
/// A message that names the key, and a hint.
pub(super) fn parse_sources(section: &toml::Table) -> Result<Sources, MessageAndHint> {
    let (mut sources, mut queries) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in section {
        let source = match value {
            toml::Value::Table(table) if table.contains_key("query") => {
                queries.insert(name.clone(), query(name, table)?);
                continue;
            }
            toml::Value::String(path) => SourceConfig::new(path),
            value => {
                let is_delta = value.as_table().is_some_and(|table| table.contains_key("delta"));
                let source = if is_delta { delta(value) } else { files(value) };
                source.map_err(|(message, hint)| (format!("`[sources].{name}`: {message}"), hint))?
            }
        };
        if source.paths.is_empty() || source.paths.iter().any(String::is_empty) {
            let hint = "name at least one file, directory or pattern";
            let key = if source.delta.is_some() { "delta" } else { "path" };
            return Err((format!("`[sources].{name}`: `{key}` is empty"), hint.to_owned()));
        }
        sources.insert(name.clone(), source);
    }
    if sources.is_empty() {
        let hint = "name at least one file, as `events = \"events.parquet\"`";
        let message = if queries.is_empty() { "is empty" } else { "has queries, but no files" };
        return Err((format!("`[sources]` {message}"), hint.to_owned()));
    }
    Ok((sources, queries))
}

/// Returns the query of a source that is defined by a query.
fn query(name: &str, table: &toml::Table) -> Result<String, MessageAndHint> {
    if let Some(other) = table.keys().find(|key| *key != "query") {
        let hint = "a source is either files or a query over the sources of files";
        return Err((format!("`[sources].{name}` has a `query` and also `{other}`"), hint.to_owned()));
    }
    match table["query"].as_str() {
        Some(query) if !query.trim().is_empty() => Ok(query.to_owned()),
        _ => {
            let hint =
                "write one `SELECT`, as `clicks = { query = \"SELECT * FROM events WHERE kind = 'click'\" }`";
            Err((format!("`[sources].{name}.query` is not a text with a query"), hint.to_owned()))
        }
    }
}

/// Reads a source that is a version of a Delta Lake table.
fn delta(value: &toml::Value) -> Result<SourceConfig, MessageAndHint> {
    let keys = DeltaKeys::parse(value)?;
    let config = keys.config()?;
    let DeltaKeys { delta, row_number, file_name, file_number, .. } = keys;
    let source = SourceConfig::delta(delta, config.version);
    let source = SourceConfig { delta: Some(config), row_number, file_name, file_number, ..source };
    check_made_columns(&source)?;
    Ok(source)
}

/// Reads a source of files.
fn files(value: &toml::Value) -> Result<SourceConfig, MessageAndHint> {
    let hint = || {
        "write a path, or `{ path = \"events/*.csv\", format = \"csv\" }`; \
         the manual's page `dataset.toml` lists all keys"
            .to_owned()
    };
    let mut table =
        Table::deserialize(value.clone()).map_err(|error| (error.message().to_owned(), hint()))?;
    match table.path.take() {
        Some(Paths::One(path)) => source(vec![path], table),
        Some(Paths::Many(paths)) => source(paths, table),
        None => Err(("missing field `path`".to_owned(), hint())),
    }
}

fn source(paths: Vec<String>, table: Table) -> Result<SourceConfig, MessageAndHint> {
    let delimiter = table.delimiter.map(|text| match text.as_bytes() {
        &[byte] if !matches!(byte, b'"' | b'\n' | b'\r') => Ok(byte),
        _ => Err((
            format!("`delimiter` is {text:?}, which is not one ASCII character"),
            "write for example `\";\"`, or `\"\\t\"` for a tab".to_owned(),
        )),
    });
    let delimiter = delimiter.transpose()?;
    let quote = match table.quote.as_deref() {
        None => Quote::Guarded,
        Some("none") => Quote::None,
        Some(text) => Quote::Character(one_character("quote", text)?),
    };
    let escape = table.escape.as_deref().map(|text| one_character("escape", text)).transpose()?;
    check_quotes(delimiter, quote, escape)?;
    let source = SourceConfig {
        paths,
        format: table.format,
        compression: table.compression,
        delimiter,
        header: table.header.unwrap_or(true),
        quote,
        escape,
        ragged: table.ragged.unwrap_or_default(),
        partition_columns: types("partition_columns", &table.partition_columns)?,
        schema: types("schema", &table.schema)?,
        missing_columns: table.missing_columns,
        row_number: table.row_number,
        file_name: table.file_name,
        file_number: table.file_number,
        delta: None,
    };
    check_made_columns(&source)?;
    let of_csv = [
        ("delimiter", source.delimiter.is_some()),
        ("header", !source.header),
        ("quote", source.quote != Quote::Guarded),
        ("escape", source.escape.is_some()),
        ("ragged", source.ragged != Ragged::Error),
    ];
    if source.format == Some(Format::Json)
        && let Some((key, _)) = of_csv.into_iter().find(|(_, given)| *given)
    {
        let hint = format!("remove `{key}`, or set `format = \"csv\"`");
        return Err((format!("`{key}` is for CSV files, and `format` is JSON"), hint));
    }
    let mut of_text = of_csv.into_iter().chain([
        ("compression", !matches!(source.compression, None | Some(Compression::None))),
        ("schema", !source.schema.is_empty()),
    ]);
    if source.format == Some(Format::Parquet)
        && let Some((key, _)) = of_text.find(|(_, given)| *given)
    {
        let hint = "Parquet files say this themselves; use `CAST` in the query for another type";
        return Err((format!("`{key}` is for CSV and JSON files, and `format` is Parquet"), hint.to_owned()));
    }
    Ok(source)
}

/// Checks that the columns `row_number`, `file_name` and `file_number` have different names.
fn check_made_columns(source: &SourceConfig) -> Result<(), MessageAndHint> {
    let mut known: Vec<(&str, &str)> = Vec::new();
    for (key, column) in source.made_columns() {
        if column.is_empty() {
            let hint = format!("write the name of a column, as `{key} = \"{}\"`", &key[..1]);
            return Err((format!("`{key}` is empty"), hint));
        }
        if let Some((other, _)) = known.iter().find(|(_, known)| *known == column) {
            let message = format!("`{other}` and `{key}` name the same column, `{column}`");
            return Err((message, "give them different names".to_owned()));
        }
        known.push((key, column));
    }
    Ok(())
}

fn one_character(key: &str, text: &str) -> Result<u8, MessageAndHint> {
    match text.as_bytes() {
        &[byte] if byte.is_ascii_graphic() => Ok(byte),
        _ => Err((
            format!("`{key}` is {text:?}, which is not one visible ASCII character"),
            match key {
                "quote" => {
                    "write for example `quote = \"'\"`, or `quote = \"none\"` if quotes are part of the texts"
                }
                _ => "write for example `escape = \"\\\\\"`, that is, one backslash",
            }
            .to_owned(),
        )),
    }
}

/// Checks that the delimiter, the quote and the escape character differ.
fn check_quotes(delimiter: Option<u8>, quote: Quote, escape: Option<u8>) -> Result<(), MessageAndHint> {
    let quote_character = quote.character();
    let same = |a: &str, b: &str| {
        let hint = "give them different characters; a quote within a quoted value may be written twice without `escape`";
        Err((format!("`{a}` and `{b}` are the same character"), hint.to_owned()))
    };
    match escape {
        Some(_) if quote_character.is_none() => {
            let hint = "remove `escape`: it applies within quotes only";
            Err(("there is an `escape`, but `quote` is \"none\"".to_owned(), hint.to_owned()))
        }
        Some(_) if escape == quote_character => same("escape", "quote"),
        Some(_) if escape == delimiter => same("escape", "delimiter"),
        _ if delimiter.is_some() && delimiter == quote_character => same("quote", "delimiter"),
        _ => Ok(()),
    }
}

/// Parses a table of columns and their types, in the order written.
fn types(key: &str, columns: &toml::Table) -> Result<Vec<(String, DataType)>, MessageAndHint> {
    let parse = |(column, value): (&String, &toml::Value)| {
        let text = value.as_str().unwrap_or_default();
        match parse_type(text) {
            Some(parsed) => Ok((column.clone(), parsed)),
            None => Err((
                format!("`{key}`: the column `{column}` has the type {value}, which is not an SQL type"),
                "write for example \"BIGINT\", \"DOUBLE\", \"VARCHAR\", \"TIMESTAMP\" or \"BIGINT[]\""
                    .to_owned(),
            )),
        }
    };
    columns.iter().map(parse).collect()
}

/// Parses the name of an SQL type (`BIGINT[]`) or an Arrow type (`Utf8`).
fn parse_type(text: &str) -> Option<DataType> {
    if let Ok(arrow) = text.parse() {
        return Some(arrow);
    }
    let cast = format!("CAST(NULL AS {text})");
    match SessionContext::new().parse_sql_expr(&cast, &DFSchema::empty()).ok()? {
        Expr::Cast(cast) => Some(without_views(cast.field.data_type())),
        _ => None,
    }
}

/// Replaces text views, which are DataFusion's SQL text types, because readers of text files do not build them
/// faster than plain text.
fn without_views(data_type: &DataType) -> DataType {
    match data_type {
        DataType::Utf8View => DataType::Utf8,
        DataType::List(item) => {
            DataType::List(Field::new_list_field(without_views(item.data_type()), true).into())
        }
        other => other.clone(),
    }
}

/// Reads `[object_stores]`.
///
/// # Errors
///
/// A message that names the key, and a hint. Keys that look like credentials are refused, too.
pub(super) fn parse_object_stores(section: &toml::Table) -> Result<ObjectStores, MessageAndHint> {
    let mut stores = BTreeMap::new();
    for (name, value) in section {
        let place = format!("`[object_stores.{name:?}]`");
        let bucket = name.strip_prefix("s3://").map(|bucket| bucket.trim_end_matches('/'));
        if name != ALL_BUCKETS && bucket.is_none_or(|bucket| bucket.is_empty() || bucket.contains('/')) {
            let hint = "write `[object_stores.\"s3://bucket\"]`, or `[object_stores.s3]` for all buckets";
            return Err((format!("{place} names no store"), hint.to_owned()));
        }
        let keys = value.as_table().into_iter().flat_map(toml::Table::keys);
        if let Some(secret) = keys.into_iter().find(|key| looks_secret(key)) {
            return Err((
                format!("{place} has `{secret}`: credentials do not belong into a file"),
                credentials_hint(),
            ));
        }
        let store = S3Settings::deserialize(value.clone()).map_err(|error| {
            let hint = suggest("", ["endpoint", "region", "allow_http", "path_style", "anonymous"]);
            (format!("{place}: {}", error.message()), hint)
        })?;
        check_endpoint(&store).map_err(|(message, hint)| (format!("{place}: {message}"), hint))?;
        stores.insert(name.trim_end_matches('/').to_owned(), store);
    }
    Ok(ObjectStores(stores))
}

/// The hint about where to put credentials.
pub(crate) fn credentials_hint() -> String {
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) in the environment, or AWS_PROFILE to the \
     name of a profile, or `anonymous = true` for public buckets"
        .to_owned()
}

fn looks_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    ["key", "secret", "token", "password", "credential"].iter().any(|part| key.contains(part))
}

fn check_endpoint(store: &S3Settings) -> Result<(), MessageAndHint> {
    let Some(endpoint) = &store.endpoint else { return Ok(()) };
    let (scheme, rest) = endpoint.split_once("://").unwrap_or_default();
    if !matches!(scheme, "http" | "https") || rest.is_empty() {
        let hint = "write it with its scheme, as `https://minio.example.com:9000`";
        return Err((format!("`endpoint` is {endpoint:?}, which is not a URL"), hint.to_owned()));
    }
    if rest.contains('@') {
        return Err(("`endpoint` has a user or password in it".to_owned(), credentials_hint()));
    }
    if scheme == "http" && !store.allow_http {
        let hint = "use https, or write `allow_http = true` if the network may see the logs";
        return Err((format!("`endpoint` is {endpoint:?}, which is not encrypted"), hint.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::super::DeltaAppend;
    use super::*;

    fn sources(text: &str) -> Result<BTreeMap<String, SourceConfig>, MessageAndHint> {
        parse_sources(&toml::from_str(text).unwrap()).map(|(files, _)| files)
    }

    fn stores(text: &str) -> Result<ObjectStores, MessageAndHint> {
        parse_object_stores(&toml::from_str(text).unwrap())
    }

    #[test]
    fn a_source_is_a_path_or_a_table() {
        let text = r#"
            plain = "events/*.parquet"
            [whole]
            path = ["a.csv", "s3://logs/b.tsv.gz"]
            format = "csv"
            compression = "gzip"
            delimiter = "\t"
            header = false
            quote = "'"
            escape = "\\"
            ragged = "skip"
            partition_columns = { date = "Utf8", hour = "INT" }
            schema = { z = "BIGINT", a = "VARCHAR", m = "BIGINT[]", t = "TIMESTAMP", x = "Float32" }
            missing_columns = "null"
            row_number = "n"
            file_name = "f"
        "#;
        let sources = sources(text).unwrap();
        assert_eq!(sources["plain"], SourceConfig::new("events/*.parquet"));
        let whole = &sources["whole"];
        assert_eq!(whole.paths, ["a.csv", "s3://logs/b.tsv.gz"]);
        assert_eq!((whole.format, whole.compression), (Some(Format::Csv), Some(Compression::Gzip)));
        assert_eq!((whole.delimiter, whole.header), (Some(b'\t'), false));
        let quotes = (whole.quote, whole.escape, whole.ragged);
        assert_eq!(quotes, (Quote::Character(b'\''), Some(b'\\'), Ragged::Skip));
        assert_eq!(whole.missing_columns, MissingColumns::Null);
        assert_eq!(whole.made_columns().collect::<Vec<_>>(), [("row_number", "n"), ("file_name", "f")]);
        let types = |columns: &[(String, DataType)]| {
            columns.iter().map(|(name, kind)| format!("{name} {kind}")).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(types(&whole.partition_columns), "date Utf8, hour Int32");
        assert_eq!(types(&whole.schema), "z Int64, a Utf8, m List(Int64), t Timestamp(ns), x Float32");
    }

    #[test]
    fn a_source_is_a_version_of_a_table() {
        let text = r#"
            newest = { delta = "s3://logs/events", append = "added", row_number = "n" }
            number = { delta = "events", version = 12 }
            at = { delta = "events", timestamp = "2024-06-01T02:00:00+02:00", append = "all" }
            time = { delta = "events", timestamp = 2024-06-01T00:00:00Z }
        "#;
        let sources = sources(text).unwrap();
        let newest = SourceConfig::delta("s3://logs/events", DeltaVersion::Newest);
        let delta =
            newest.delta.clone().map(|delta| DeltaConfig { append: Some(DeltaAppend::Added), ..delta });
        assert_eq!(sources["newest"], SourceConfig { delta, row_number: Some("n".to_owned()), ..newest });
        assert_eq!(sources["number"], SourceConfig::delta("events", DeltaVersion::Number(12)));
        assert_eq!(sources["number"].missing_columns, MissingColumns::Null);
        let at = sources["at"].delta.clone().unwrap();
        let midnight = DateTime::from_timestamp(1_717_200_000, 0).unwrap();
        assert_eq!((at.version, at.append), (DeltaVersion::At(midnight), Some(DeltaAppend::All)));
        assert_eq!(sources["time"], SourceConfig::delta("events", DeltaVersion::At(midnight)));
    }

    #[test]
    fn every_mistake_in_a_source_names_its_key() {
        for (text, part, hint) in [
            ("", "`[sources]` is empty", "events.parquet"),
            ("e = 3", "`[sources].e`", "write a path"),
            ("e = []", "`[sources].e`", "write a path"),
            ("e = ''", "`path` is empty", "at least one"),
            ("e = { path = [] }", "`path` is empty", "at least one"),
            ("e = { format = 'csv' }", "missing field `path`", "write a path"),
            ("e = { delta = '' }", "`delta` is empty", "at least one"),
            ("e = { delta = 'a', version = -1 }", "invalid value", "version = 12"),
            ("e = { delta = 'a', format = 'parquet' }", "unknown field `format`", "says the rest"),
            ("e = { delta = 'a', path = 'b' }", "unknown field `path`", "says the rest"),
            (
                "e = { delta = 'a', version = 1, timestamp = '2024-06-01T00:00:00Z' }",
                "a `version` and also a `timestamp`",
                "remove one",
            ),
            ("e = { delta = 'a', timestamp = '2024-06-01' }", "`timestamp` is \"2024-06-01\"", "00:00:00Z"),
            ("e = { delta = 'a', append = 'new' }", "unknown variant `new`", "page `dataset.toml`"),
            ("e = { path = 'a', version = 1 }", "unknown field `version`", "page `dataset.toml`"),
            ("e = { path = 'a', formt = 'csv' }", "unknown field `formt`", "page `dataset.toml`"),
            ("e = { path = 'a', format = 'avro' }", "`avro`", "page `dataset.toml`"),
            ("e = { path = 'a', compression = 'lz4' }", "`lz4`", "page `dataset.toml`"),
            ("e = { path = 'a', delimiter = '::' }", "`delimiter`", "\"\\t\""),
            ("e = { path = 'a', quote = '' }", "`quote` is \"\"", "quote = \"none\""),
            ("e = { path = 'a', quote = '\"\"' }", "`quote` is", "quote = \"none\""),
            ("e = { path = 'a', escape = 'no' }", "`escape` is \"no\"", "backslash"),
            ("e = { path = 'a', escape = '\"' }", "`escape` and `quote` are the same", "different"),
            (
                "e = { path = 'a', escape = '|', delimiter = '|' }",
                "`escape` and `delimiter` are",
                "different",
            ),
            ("e = { path = 'a', quote = '|', delimiter = '|' }", "`quote` and `delimiter` are", "different"),
            ("e = { path = 'a', quote = 'none', escape = '\\' }", "`quote` is \"none\"", "remove `escape`"),
            ("e = { path = 'a', ragged = 'fill' }", "`fill`", "page `dataset.toml`"),
            (
                "e = { path = 'a', format = 'json', ragged = 'skip' }",
                "`ragged` is for CSV",
                "format = \"csv\"",
            ),
            ("e = { path = 'a', row_number = '' }", "`row_number` is empty", "row_number = \"r\""),
            (
                "e = { path = 'a', row_number = 'n', file_number = 'n' }",
                "`row_number` and `file_number` name the same column, `n`",
                "different names",
            ),
            ("e = { path = 'a', schema = { x = 'BIGNT' } }", "the column `x`", "BIGINT[]"),
            ("e = { path = 'a', schema = { x = 'BIGINT) + (1' } }", "the column `x`", "BIGINT[]"),
            ("e = { path = 'a', partition_columns = { x = 3 } }", "`partition_columns`", "VARCHAR"),
            ("e = { path = 'a', format = 'parquet', schema = { x = 'INT' } }", "`schema` is for CSV", "CAST"),
        ] {
            let (message, given) = sources(text).unwrap_err();
            assert!(message.contains(part) && given.contains(hint), "{text}: {message}: {given}");
        }
    }

    #[test]
    fn a_bucket_has_its_own_store_or_that_of_all() {
        let stores = stores(
            "s3 = { region = 'eu-central-1' }\n\
             's3://own' = { endpoint = 'http://127.0.0.1:9000', allow_http = true, anonymous = true }",
        );
        let stores = stores.unwrap();
        assert_eq!(stores.of_bucket("own").endpoint.as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(stores.of_bucket("own").region, None);
        assert_eq!(stores.of_bucket("other").region.as_deref(), Some("eu-central-1"));
        assert_eq!(ObjectStores::default().of_bucket("any"), S3Settings::default());
    }

    #[test]
    fn credentials_and_wrong_stores_are_refused() {
        for (text, part, hint) in [
            ("s3 = { secret_access_key = 'x' }", "`secret_access_key`", "AWS_SECRET_ACCESS_KEY"),
            ("s3 = { access_key_id = 'x' }", "`access_key_id`", "in the environment"),
            ("s3 = { endpoint = 'https://me:secret@host' }", "user or password", "in the environment"),
            ("s3 = { endpoint = 'localhost:9000' }", "not a URL", "https://"),
            ("s3 = { endpoint = 'http://localhost:9000' }", "not encrypted", "allow_http = true"),
            ("s3 = { endpiont = 'http://localhost:9000' }", "unknown field `endpiont`", "`endpoint`"),
            ("'gs://bucket' = {}", "names no store", "s3://bucket"),
            ("'s3://bucket/deep' = {}", "names no store", "s3://bucket"),
        ] {
            let (message, given) = stores(text).unwrap_err();
            assert!(message.contains(part) && given.contains(hint), "{text}: {message}: {given}");
            assert!(!message.contains("secret@"), "{message}");
        }
    }
}
