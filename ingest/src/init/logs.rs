//! Finds and reads the logs at the given paths in the same way as sources. Files with the same columns form one log.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, Fields, Schema, SchemaRef};
use datafusion::dataframe::DataFrame;
use datafusion::logical_expr::Expr;
use datafusion::prelude::ident;
use onefold_base::fault::{Explain, Fault, Kind};

use super::columns::{Column, LABELS, is_position, is_row_label, says, tokens};
use crate::config::{DeltaVersion, Format, MissingColumns, Quote, SourceConfig};
use crate::engine;
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::problems::Problems;
use crate::sources::{self, Source};
use crate::sql::quote;

/// The number of rows of a log whose values are examined.
pub(super) const ROWS: usize = 1000;
/// The name of a log before its final name is chosen.
const PROBED: &str = "log";
/// File name endings that indicate the format.
const ENDINGS: [&str; 6] = [".parquet", ".csv", ".tsv", ".json", ".jsonl", ".ndjson"];

/// A log, which becomes a source.
#[derive(Debug, Clone)]
pub(super) struct Log {
    /// The name of the source.
    pub(super) name: String,
    /// The paths of its files, and the options for reading them.
    pub(super) source: SourceConfig,
    pub(super) format: Format,
    /// The number of its files.
    pub(super) files: usize,
    pub(super) columns: Vec<Column>,
    /// The columns that are fields of objects, with their SQL expressions.
    pub(super) fields: Vec<(String, String)>,
    /// The columns whose values have types that contradict each other.
    pub(super) unread: Vec<String>,
    /// The number of rows that were read.
    pub(super) rows: usize,
}

/// Finds the logs at `paths`, for a configuration at `out`, and reads their first rows.
///
/// # Errors
///
/// [`Error::Fault`] for a path without files, and for files that cannot be read or have no rows.
pub(super) async fn read(paths: &[String], out: &Path, options: &EngineOptions) -> Result<Vec<Log>> {
    let folder = match out.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    // The relative paths in the configuration start at this folder.
    let folder = fs_err::canonicalize(folder)?;
    let mut found: Vec<(Vec<String>, SourceConfig)> = Vec::new();
    for path in paths {
        let path = from_folder(path, &folder)?;
        let (source, config) = probed(out, &path, options).await?;
        let groups = match &config.delta {
            Some(_) => vec![(vec![path.clone()], vec![path], config.missing_columns)],
            None => by_columns(&source, &path, out),
        };
        for (columns, paths, missing_columns) in groups {
            let config = SourceConfig { paths, missing_columns, ..config.clone() };
            let is_same = |known: &SourceConfig| {
                SourceConfig { paths: config.paths.clone(), ..known.clone() } == config
            };
            match found.iter_mut().find(|(known, other)| *known == columns && is_same(other)) {
                Some((_, known)) => known.paths.extend(config.paths),
                None => found.push((columns, config)),
            }
        }
    }
    let mut logs: Vec<Log> = Vec::new();
    for (_, source) in found {
        let log = read_log(out, source, &logs, options).await?;
        logs.push(log);
    }
    Ok(logs)
}

/// Returns a path for a configuration in `folder`: relative to the folder if possible.
///
/// # Errors
///
/// [`Error::Fault`] if a local path has no files.
fn from_folder(path: &str, folder: &Path) -> Result<String> {
    let Some(absolute) = onefold_storage::absolute_pattern(path)? else { return Ok(path.to_owned()) };
    let unreadable = |place: &Path, (message, hint): (String, String)| {
        Error::from(Fault::of_file(Kind::Storage, place, message).hint(hint))
    };
    let found =
        sources::local_paths(Path::new(""), path).map_err(|(place, error)| unreadable(&place, error))?;
    if found.is_empty() {
        let hint = "correct the path; a path is a file, a folder, a URL, or a glob in quotes";
        return Err(unreadable(Path::new(path), ("there is no such file".to_owned(), hint.to_owned())));
    }
    let whole = match (absolute.parent().map(fs_err::canonicalize), absolute.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        (_, None) => fs_err::canonicalize(&absolute)?,
        // The folder part of a glob may contain wildcards.
        _ => absolute,
    };
    let common =
        whole.components().zip(folder.components()).take_while(|(ours, theirs)| ours == theirs).count();
    let up = folder.components().count() - common;
    // If only the root is shared, an absolute path is clearer.
    let relative: PathBuf = match common {
        0 | 1 => whole,
        _ => {
            let below = whole.components().skip(common).map(|part| part.as_os_str());
            std::iter::repeat_n(OsStr::new(".."), up).chain(below).collect()
        }
    };
    let relative = if relative.as_os_str().is_empty() { PathBuf::from(".") } else { relative };
    relative.into_os_string().into_string().map_err(|path| {
        let message = "it is not UTF-8 text";
        Fault::of_file(Kind::Options, PathBuf::from(path), message).hint("rename it").into()
    })
}

/// Finds and inspects the files of a source of the configuration at `out`.
async fn found_source(out: &Path, source: &SourceConfig, problems: Problems) -> Result<Source> {
    sources::find_source(out.parent().unwrap_or(Path::new("")), PROBED, source, problems).await
}

/// The first rows of a source.
struct FirstRows {
    columns: SchemaRef,
    /// The name and the SQL expression of each column.
    expressions: Vec<(String, String)>,
    batches: Vec<RecordBatch>,
    /// The columns that cannot be read, which are not among the others.
    unread: Vec<String>,
}

/// Reads the first rows of a source, with the fields of objects as columns. Values that do not have the type inferred
/// from the first rows are null.
async fn first_rows(
    out: &Path,
    source: &SourceConfig,
    rows: usize,
    options: &EngineOptions,
) -> Result<FirstRows> {
    let context = engine::context(options, false)?;
    let found = found_source(out, source, Problems::collected()).await?;
    sources::register(&context, &[found]).await?;
    let table = context.table(PROBED).await?;
    let expressions = flat_columns(table.schema().as_arrow());
    let is_plain = |(name, sql): &(String, String)| *sql == quote(name);
    let select = |expressions: &[(String, String)]| -> Result<DataFrame> {
        let column = |expression: &(String, String)| -> Result<Expr> {
            let (name, sql) = expression;
            Ok(match is_plain(expression) {
                true => ident(name),
                false => table.parse_sql_expr(sql)?.alias(name),
            })
        };
        let columns = expressions.iter().map(column).collect::<Result<Vec<_>>>()?;
        Ok(table.clone().select(columns)?.limit(0, Some(rows))?)
    };
    let all = match expressions.iter().all(is_plain) {
        true => table.clone().limit(0, Some(rows))?,
        false => select(&expressions)?,
    };
    let columns = SchemaRef::from(all.schema().as_arrow().clone());
    let error = match all.collect().await {
        Ok(batches) => return Ok(FirstRows { columns, expressions, batches, unread: Vec::new() }),
        Err(error) => Error::from(error),
    };
    if error.fault().kind == Kind::Storage {
        return Err(error);
    }
    // Find the columns whose values have types that contradict each other.
    let (mut read, mut unread) = (Vec::new(), Vec::new());
    for expression in expressions {
        match select(std::slice::from_ref(&expression))?.collect().await {
            Ok(_) => read.push(expression),
            Err(_) => unread.push(expression.0),
        }
    }
    if read.is_empty() || unread.is_empty() {
        return Err(error);
    }
    let some = select(&read)?;
    let columns = SchemaRef::from(some.schema().as_arrow().clone());
    Ok(FirstRows { columns, expressions: read, batches: some.collect().await?, unread })
}

/// Returns the name and the SQL expression of each column. The fields of objects are columns: `id` in `user` is
/// `user_id`.
fn flat_columns(schema: &Schema) -> Vec<(String, String)> {
    let mut columns = Vec::new();
    let names: Vec<String> = schema.fields().iter().map(|field| field.name().to_lowercase()).collect();
    for field in schema.fields() {
        match field.data_type() {
            DataType::Struct(fields) if !fields.is_empty() => {
                add_fields(&names, (field.name(), &quote(field.name())), fields, &mut columns);
            }
            _ => columns.push((field.name().clone(), quote(field.name()))),
        }
    }
    columns
}

/// Adds the fields of an object with this name and SQL expression. `names` are the names of other columns.
fn add_fields(
    names: &[String],
    (name, sql): (&str, &str),
    fields: &Fields,
    columns: &mut Vec<(String, String)>,
) {
    for field in fields {
        let mut name = format!("{name}_{}", field.name());
        let sql = format!("{sql}['{}']", field.name().replace('\'', "''"));
        match field.data_type() {
            DataType::Struct(fields) if !fields.is_empty() => {
                add_fields(names, (&name, &sql), fields, columns);
            }
            _ => {
                while names.contains(&name.to_lowercase())
                    || columns.iter().any(|(known, _)| known.eq_ignore_ascii_case(&name))
                {
                    name.push('_');
                }
                columns.push((name, sql));
            }
        }
    }
}

/// Finds out how to read the files of a path: as their names indicate, or in another way if this fails or gives fewer
/// than two columns.
///
/// # Errors
///
/// The errors of the first way if no way works.
async fn probed(out: &Path, path: &str, options: &EngineOptions) -> Result<(Source, SourceConfig)> {
    if sources::is_table(&out.parent().unwrap_or(Path::new("")).join(path)) {
        let table = SourceConfig::delta(path, DeltaVersion::Newest);
        return Ok((found_source(out, &table, Problems::default()).await?, table));
    }
    let plain = SourceConfig::new(path);
    let first = found_source(out, &plain, Problems::default()).await;
    let is_csv = |source: &Source| source.format() == Format::Csv;
    let is_narrow =
        |source: &Source| source.columns_of_files().all(|(_, columns)| columns.fields().len() < 2);
    match first {
        // Do not query a store or disk again that has failed, and do not read Parquet or JSON files as CSV.
        Err(error) if error.fault().kind == Kind::Storage || !may_be_csv(path) => return Err(error),
        Ok(source) if !is_csv(&source) => return Ok((source, plain)),
        Ok(source) if !is_narrow(&source) => return with_header(out, source, plain, options).await,
        _ => {}
    }
    for other in other_ways(path) {
        if let Ok(source) = found_source(out, &other, Problems::default()).await
            && (!is_csv(&source) || !is_narrow(&source))
        {
            // The names of a header may be wrong, but they are no values.
            if !other.header && is_csv(&source) && has_names(out, &other, options).await {
                break;
            }
            return with_header(out, source, other, options).await;
        }
    }
    Ok((first?, plain))
}

/// Returns whether the first row of CSV files that are read without a header has names: a column begins with a text, and
/// has only numbers below.
async fn has_names(out: &Path, source: &SourceConfig, options: &EngineOptions) -> bool {
    let Ok(FirstRows { columns, batches, .. }) = first_rows(out, source, ROWS, options).await else {
        return false;
    };
    let is_number = |value: &Option<String>| value.as_ref().is_none_or(|text| text.parse::<f64>().is_ok());
    let has_name = |(index, field): (usize, &Arc<Field>)| {
        let column = Column::of(field.name(), field.data_type(), &batches, index);
        column.is_ok_and(|column| match column.values.split_first() {
            Some((first, rest)) => {
                !is_number(first) && rest.iter().any(Option::is_some) && rest.iter().all(is_number)
            }
            None => false,
        })
    };
    columns.fields().iter().enumerate().any(has_name)
}

/// Returns whether a file name does not indicate a format other than CSV.
fn may_be_csv(path: &str) -> bool {
    let path = path.to_lowercase();
    ENDINGS.iter().all(|ending| [".csv", ".tsv"].contains(ending) || !path.contains(ending))
}

/// Returns other ways to read the files.
fn other_ways(path: &str) -> Vec<SourceConfig> {
    let plain = SourceConfig::new(path);
    let is_named = ENDINGS.iter().any(|ending| path.to_lowercase().contains(ending));
    let csv = SourceConfig { format: (!is_named).then_some(Format::Csv), ..plain.clone() };
    let mut ways = Vec::new();
    for quote in [Quote::Guarded, Quote::None] {
        for header in [true, false] {
            for delimiter in [None, Some(b'\t'), Some(b';'), Some(b'|'), Some(b' ')] {
                ways.push(SourceConfig { delimiter, header, quote, ..csv.clone() });
            }
        }
    }
    if !is_named {
        ways.push(SourceConfig { format: Some(Format::Json), ..plain });
    }
    ways
}

/// Returns the source, without a header if the first row of its CSV files looks like values.
async fn with_header(
    out: &Path,
    source: Source,
    config: SourceConfig,
    options: &EngineOptions,
) -> Result<(Source, SourceConfig)> {
    if source.format() != Format::Csv || !config.header {
        return Ok((source, config));
    }
    // pandas writes the positions of columns without names. In a narrow file, they may be values.
    let has_positions = |columns: &Schema| {
        let mut names = columns.fields().iter().map(|field| field.name());
        columns.fields().len() > 3 && names.all(|name| is_position(name) || is_row_label(name))
    };
    if source.columns_of_files().all(|(_, columns)| has_positions(columns)) {
        return Ok((source, config));
    }
    let bare = SourceConfig { header: false, ..config.clone() };
    let Ok(FirstRows { columns, batches: rows, .. }) = first_rows(out, &bare, 1, options).await else {
        return Ok((source, config));
    };
    let is_value = |(index, field): (usize, &Arc<Field>)| -> Result<bool> {
        let column = Column::of(field.name(), field.data_type(), &rows, index)?;
        let is_number =
            |text: &str| text.parse::<f64>().is_ok() && text.contains(|c: char| c.is_ascii_digit());
        let is_time =
            |text: &str| text.starts_with(|c: char| c.is_ascii_digit()) && text.contains(['-', '/', ':']);
        Ok(column.present().any(|text| is_number(text) || is_time(text)))
    };
    let of_files = |(_, field): &(usize, &Arc<Field>)| {
        source.folder_columns().iter().all(|folder| folder.name() != field.name())
    };
    let fields = columns.fields().iter().enumerate().filter(of_files);
    let are_values = fields.map(is_value).collect::<Result<Vec<bool>>>()?;
    if are_values.contains(&true) {
        return Ok((found_source(out, &bare, Problems::default()).await?, bare));
    }
    Ok((source, config))
}

/// Groups the files of `path` by the names of their columns. Files that lack a few columns are in a group with the
/// others, because logs get further columns over time. Each group has its columns and paths; a group of all files has
/// only `path`. JSON omits nulls, so the files of a JSON path always form one group.
fn by_columns(source: &Source, path: &str, out: &Path) -> Vec<(Vec<String>, Vec<String>, MissingColumns)> {
    let base = out.parent().unwrap_or(Path::new(""));
    let mut groups: Vec<(Vec<String>, Vec<String>, MissingColumns)> = Vec::new();
    for (file, columns) in source.columns_of_files() {
        let names = columns.fields().iter().map(|field| field.name().clone());
        let mut names: Vec<String> = names.filter(|name| !is_row_label(name)).collect();
        names.sort_unstable();
        let file = file.strip_prefix(base).unwrap_or(file).to_string_lossy().into_owned();
        match groups.iter_mut().find(|(known, ..)| are_alike(known, &names)) {
            Some((known, files, missing)) => {
                if *known != names {
                    *missing = MissingColumns::Null;
                    known.extend(names);
                    known.sort_unstable();
                    known.dedup();
                }
                files.push(file);
            }
            None => groups.push((names, vec![file], MissingColumns::Error)),
        }
    }
    match groups.len() {
        1 => groups.into_iter().map(|(names, _, missing)| (names, vec![path.to_owned()], missing)).collect(),
        _ if source.format() == Format::Json => {
            vec![(Vec::new(), vec![path.to_owned()], MissingColumns::Error)]
        }
        _ => groups,
    }
}

/// Returns whether files with these columns are the same log: more than four of five columns are in both, and the
/// others are no labels, which may be unknown in a part of a log.
fn are_alike(ours: &[String], theirs: &[String]) -> bool {
    let differ = |names: &[String], others: &[String]| -> Vec<String> {
        names.iter().filter(|name| !others.contains(name)).cloned().collect()
    };
    let others = [differ(ours, theirs), differ(theirs, ours)].concat();
    let shared = (ours.len() + theirs.len() - others.len()) / 2;
    others.is_empty() || (shared > 4 * others.len() && !others.iter().any(|name| says(name, LABELS)))
}

/// Reads the first rows of a log. `others` are the logs that already have names.
async fn read_log(out: &Path, source: SourceConfig, others: &[Log], options: &EngineOptions) -> Result<Log> {
    let mut source = source;
    let mut found = found_source(out, &source, Problems::default()).await?;
    if found.format() == Format::Json {
        source.missing_columns = MissingColumns::Null;
        found = found_source(out, &source, Problems::default()).await?;
    }
    let FirstRows { columns, expressions, batches, unread } = first_rows(out, &source, ROWS, options).await?;
    let rows = batches.iter().map(RecordBatch::num_rows).sum();
    if rows == 0 {
        let message = "its files have no rows";
        let hint = "write some rows, or leave it out";
        return Err(Fault::of_file(Kind::Data, source.paths.join(", "), message).hint(hint).into());
    }
    let folders = found.folder_columns();
    let column = |(index, field): (usize, &Arc<Field>)| -> Result<Column> {
        Ok(Column {
            is_folder: folders.iter().any(|folder| folder.name() == field.name()),
            is_unnamed: !source.header || is_position(field.name()),
            ..Column::of(field.name(), field.data_type(), &batches, index)?
        })
    };
    let columns = columns.fields().iter().enumerate().map(column).collect::<Result<Vec<_>>>()?;
    let (format, files) = (found.format(), found.columns_of_files().count());
    let fields = expressions.into_iter().filter(|(name, sql)| *sql != quote(name)).collect();
    Ok(Log { name: name_of(&source.paths, others), source, format, files, columns, fields, unread, rows })
}

/// Returns a name for the source of these paths. No other log has it, and SQL accepts it without quotes.
fn name_of(paths: &[String], others: &[Log]) -> String {
    let words = |path: &String| -> Vec<String> {
        // The last path component that contains words, without its ending and without wildcards.
        let parts =
            path.trim_end_matches('/').rsplit('/').map(|part| part.split('.').next().unwrap_or_default());
        let named = parts.map(tokens).find(|words| !words.is_empty());
        named.unwrap_or_default()
    };
    let all: Vec<Vec<String>> = paths.iter().map(words).collect();
    let first = all.first().cloned().unwrap_or_default();
    // The words that the names of all files begin or end with.
    let begin = |other: &Vec<String>| first.iter().zip(other).take_while(|(one, other)| one == other).count();
    let end = |other: &Vec<String>| {
        first.iter().rev().zip(other.iter().rev()).take_while(|(one, other)| one == other).count()
    };
    let common = match all.iter().map(begin).min().unwrap_or(0) {
        0 => &first[first.len() - all.iter().map(end).min().unwrap_or(0)..],
        begin => &first[..begin],
    };
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let plain: String = common.join("_").chars().filter(is_plain).collect();
    let plain = plain.trim_matches('_');
    let name = match plain.starts_with(|c: char| c.is_ascii_alphabetic()) {
        true => plain.to_owned(),
        false => "log".to_owned(),
    };
    let is_free = |name: &String| others.iter().all(|log| log.name != *name);
    let numbered = (2..).map(|number| format!("{name}_{number}"));
    std::iter::once(name.clone()).chain(numbered).find(is_free).unwrap_or_default()
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn paths_give_names() {
        let name =
            |paths: &[&str]| name_of(&paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>(), &[]);
        assert_eq!(name(&["logs/events.csv"]), "events");
        assert_eq!(name(&["features/*.parquet"]), "features");
        assert_eq!(name(&["s3://bucket/My-Log/"]), "my_log");
        assert_eq!(name(&["a/trace-AR.parquet", "a/trace-SE.parquet"]), "trace");
        assert_eq!(name(&["train_behaviors.parquet", "validation_behaviors.parquet"]), "behaviors");
        assert_eq!(name(&["2024.csv"]), "log");
        assert_eq!(name(&["*.csv"]), "log");
    }
}
