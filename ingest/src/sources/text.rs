//! Rows of text files: decodes and converts them [exactly](super::exact), and locates wrong ones.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::sync::{Arc, Mutex};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, RecordBatchOptions};
use arrow::csv::reader::Format as CsvFormat;
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use arrow::error::ArrowError;
use bytes::Bytes;
use datafusion::datasource::file_format::csv::CsvDecoder;
use datafusion::datasource::file_format::json::JsonDecoder;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{FileOpener, FileSource};
use datafusion::error::{DataFusionError, Result};
use datafusion_datasource::boundary_stream::AlignedBoundaryStream;
use datafusion_datasource::decoder::{DecoderDeserializer, deserialize_stream};
use datafusion_datasource::file_stream::FileOpenFuture;
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use datafusion_datasource::projection::{ProjectionOpener, SplitProjection};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::GetResultPayload;
use onefold_base::sync::locked;

use super::csv::{Checker, CsvRules, RowError};
use super::exact::{as_text, exact, exact_or_null};
use super::files::FileName;
use super::text_store::{SkippedRows, TextStore};
use crate::config::Format;
use crate::error::external;
use crate::problems::{Problems, WrongRows};
use crate::sql::quote;

/// The number of bytes that are read from a local file at once.
const CHUNK: usize = 256 << 10;
/// The kind of problem for a value that does not have its column's type.
const WRONG_TYPE: &str = "type";
/// The number of rows of a batch if the engine does not set it.
const ROWS: usize = 8192;

/// Options for reading text files.
#[derive(Debug, Clone)]
pub(super) struct Text {
    /// The CSV checks, and the counts of rows that they leave out.
    pub(super) csv: Option<(CsvRules, Arc<SkippedRows>)>,
    /// The columns whose types are given in the configuration. The types of other columns were inferred.
    pub(super) declared: Arc<[String]>,
    /// Whether the last column of the files' schema is the row number, which is not in the files.
    pub(super) numbered: bool,
    /// Collects wrong values.
    pub(super) problems: Problems,
}

/// Reads rows of the text files of a source.
#[derive(Debug, Clone)]
struct RowReader {
    source: String,
    store: Arc<TextStore>,
    /// The columns whose types are given in the configuration.
    declared: Arc<[String]>,
    /// The columns of the files.
    schema: SchemaRef,
    /// The indices of the columns that are read.
    read: Vec<usize>,
    columns: SchemaRef,
    /// The column of the row numbers, if it is read.
    number: Option<FieldRef>,
    problems: Problems,
    /// The number of rows with a wrong value for each column that is read. Each opened file or range has its own
    /// map.
    wrong: Arc<Mutex<BTreeMap<String, u64>>>,
    /// The CSV format; `None` for JSON lines.
    csv: Option<CsvFormat>,
    batch_rows: usize,
}

/// Creates a morselizer that reads files like the engine's text `format`, but with a [`RowReader`].
pub(super) fn morselizer(
    format: &Arc<dyn FileSource>,
    source: &str,
    store: TextStore,
    text: &Text,
    batch_rows: Option<usize>,
) -> Result<Box<dyn Morselizer>> {
    let table = format.table_schema();
    let columns = table.file_schema();
    let projection = match format.projection() {
        Some(projection) => SplitProjection::new(columns, projection),
        None => SplitProjection::unprojected(table),
    };
    let in_files = columns.fields().len() - usize::from(text.numbered);
    let mut read = projection.file_indices.clone();
    // The indices are in ascending order.
    let number = read.pop_if(|place| *place == in_files).map(|place| Arc::clone(&columns.fields()[place]));
    let in_files: Vec<usize> = (0..in_files).collect();
    let reader = RowReader {
        source: source.to_owned(),
        store: Arc::new(store),
        declared: Arc::clone(&text.declared),
        schema: Arc::new(columns.project(&in_files)?),
        columns: Arc::new(columns.project(&read)?),
        read,
        number,
        problems: text.problems.clone(),
        wrong: Arc::default(),
        csv: text.csv.as_ref().map(|(rules, _)| rules.format()),
        batch_rows: batch_rows.unwrap_or(ROWS),
    };
    Ok(Box::new(TextFiles(ProjectionOpener::try_new(projection, Arc::new(reader), columns)?)))
}

impl FileOpener for RowReader {
    fn open(&self, file: PartitionedFile) -> Result<FileOpenFuture> {
        let reader = Self { wrong: Arc::default(), ..self.clone() };
        Ok(async move {
            let texts = reader.texts(&file, reader.batch_rows).await?;
            let number = reader.number.clone();
            let opened = Arc::new((reader, file));
            let batches = texts.then(move |texts| {
                let opened = Arc::clone(&opened);
                async move { opened.0.converted(&opened.1, texts).await }
            });
            let Some(number) = number else { return Ok(batches.boxed()) };
            let mut first = 0;
            let number_rows = move |batch: Result<RecordBatch>| -> Result<RecordBatch> {
                let numbered = with_numbers(&batch?, &number, first)?;
                first += numbered.num_rows() as i64;
                Ok(numbered)
            };
            Ok(batches.map(number_rows).boxed())
        }
        .boxed())
    }
}

/// Appends a column of row numbers to a batch. The first row has the number `first`.
fn with_numbers(batch: &RecordBatch, number: &FieldRef, first: i64) -> Result<RecordBatch> {
    let numbers = Int64Array::from_iter_values(first..first + batch.num_rows() as i64);
    let schema = batch.schema();
    let fields: Vec<FieldRef> = schema.fields().iter().chain([number]).cloned().collect();
    let columns = batch.columns().iter().cloned().chain([Arc::new(numbers) as ArrayRef]).collect();
    Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?)
}

impl RowReader {
    /// Converts rows that were decoded as text. An error names its line. If problems are collected, a wrong value
    /// is null and is added to them.
    async fn converted(&self, file: &PartitionedFile, texts: Result<RecordBatch>) -> Result<RecordBatch> {
        let texts = match texts {
            Err(error) if is_of_row(&error) => return Err(self.locate(file, &error).await),
            texts => texts?,
        };
        match self.exactly(&texts) {
            Err(error) if is_of_row(&error) && self.problems.collects() => self.leniently(file, &texts).await,
            Err(error) if is_of_row(&error) => Err(self.locate(file, &error).await),
            rows => rows,
        }
    }

    /// Converts like [`exactly`](Self::exactly), but replaces each wrong value with null and collects it as a
    /// problem.
    async fn leniently(&self, file: &PartitionedFile, texts: &RecordBatch) -> Result<RecordBatch> {
        let mut columns = Vec::with_capacity(texts.num_columns());
        for (place, (field, texts)) in self.columns.fields().iter().zip(texts.columns()).enumerate() {
            let declared = self.declared.contains(field.name());
            if let Ok(values) = exact(texts, field.data_type(), !declared) {
                columns.push(values);
                continue;
            }
            let (values, wrong) = exact_or_null(texts, field.data_type(), !declared)?;
            self.collect(file, place, &wrong).await?;
            columns.push(values);
        }
        self.batch(columns, texts.num_rows())
    }

    /// Adds rows with these wrong values in a column to the problems.
    async fn collect(&self, file: &PartitionedFile, place: usize, values: &[String]) -> Result<()> {
        let column = self.columns.field(place);
        let declared = self.declared.contains(column.name());
        let of_file = {
            let mut wrong = locked(&self.wrong);
            let of_file = wrong.entry(column.name().clone()).or_default();
            *of_file += values.len() as u64;
            *of_file
        };
        let source = format!("source `{}`: column `{}`", self.source, column.name());
        let mut what = String::new();
        if !self.problems.knows(&source, WRONG_TYPE) {
            let read = vec![self.read[place]];
            let columns = Arc::new(self.schema.project(&read)?);
            let alone = Self { read, columns, ..self.clone() };
            let line = match alone.first_wrong_row(file).await {
                Some(row) => self.line(file, row).await,
                None => None,
            };
            let line = line.map(|line| format!("line {line} of ")).unwrap_or_default();
            let name = file.extension::<FileName>().map(|name| name.0.display().to_string());
            let name = name.unwrap_or_else(|| file.object_meta.location.to_string());
            let (data_type, by) = (column.data_type(), by(declared));
            let first = values.first().map(String::as_str).unwrap_or_default();
            what = format!(
                "rows have a value that does not fit {by}, {data_type}; the first is `{first}` in {line}`{name}`"
            );
        }
        let range = file.range.as_ref().map_or(0, |range| range.start);
        let part = format!("{}:{range}", file.object_meta.location);
        let hint = self.type_hint(values, column);
        let wrong = WrongRows { place: &source, kind: WRONG_TYPE, what: &what, hint: &hint };
        self.problems.count(&wrong, &part, of_file).map_err(external)
    }

    /// Reads the rows of a file, or the lines that begin in its range, as text.
    async fn texts(
        &self,
        file: &PartitionedFile,
        rows: usize,
    ) -> Result<BoxStream<'static, Result<RecordBatch>>> {
        let bytes = self.bytes(file).await?;
        let format = if self.csv.is_some() { Format::Csv } else { Format::Json };
        let text =
            |field: &Arc<Field>| Field::clone(field).with_data_type(as_text(field.data_type(), format));
        let texts = Schema::new(self.schema.fields().iter().map(text).collect::<Vec<_>>());
        let decoded = match &self.csv {
            Some(csv) => {
                let decoder = arrow::csv::ReaderBuilder::new(Arc::new(texts)).with_format(csv.clone());
                let decoder =
                    decoder.with_projection(self.read.clone()).with_batch_size(rows).build_decoder();
                deserialize_stream(bytes, DecoderDeserializer::new(CsvDecoder::new(decoder)))
            }
            None => {
                let texts = Arc::new(texts.project(&self.read)?);
                // The decoder returns numbers as they are written.
                let decoder = arrow::json::ReaderBuilder::new(texts).with_coerce_primitive(true);
                let decoder = decoder.with_batch_size(rows).build_decoder()?;
                deserialize_stream(bytes, DecoderDeserializer::new(JsonDecoder::new(decoder)))
            }
        };
        Ok(decoded.map_err(DataFusionError::from).boxed())
    }

    async fn bytes(&self, file: &PartitionedFile) -> Result<BoxStream<'static, Result<Bytes>>> {
        let location = &file.object_meta.location;
        if let Some(range) = &file.range {
            let store = self.store.parts()?;
            let (start, end) = (range.start.unsigned_abs(), range.end.unsigned_abs());
            let size = file.object_meta.size;
            let lines = AlignedBoundaryStream::new(store, location.clone(), start, end, size, b'\n').await?;
            return Ok(lines.map_err(DataFusionError::from).boxed());
        }
        let whole = self.store.get(location).await?;
        Ok(match whole.payload {
            GetResultPayload::File(file, _) => stream::iter(chunks(file)).boxed(),
            GetResultPayload::Stream(chunks) => chunks.map_err(DataFusionError::from).boxed(),
        })
    }

    /// Converts the columns of rows that were decoded as text.
    fn exactly(&self, texts: &RecordBatch) -> Result<RecordBatch> {
        let read = self.columns.fields().iter().zip(texts.columns()).map(|(field, texts)| {
            let declared = self.declared.contains(field.name());
            exact(texts, field.data_type(), !declared).map_err(|value| self.unfit(&value, field, declared))
        });
        self.batch(read.collect::<Result<Vec<_>>>()?, texts.num_rows())
    }

    fn batch(&self, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
        let rows = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(Arc::clone(&self.columns), columns, &rows)?)
    }

    /// Returns the error for a value that does not have its column's type.
    fn unfit(&self, value: &str, column: &Field, declared: bool) -> DataFusionError {
        let (name, data_type, by) = (column.name(), column.data_type(), by(declared));
        let message = format!("`{value}` in the column `{name}` does not fit {by}, {data_type}");
        DataFusionError::External(Box::new(RowError {
            message,
            hint: self.type_hint(&[value.to_owned()], column),
        }))
    }

    /// Returns the hint for values that do not have their column's type.
    fn type_hint(&self, values: &[String], column: &Field) -> String {
        let is_number = |value: &String| value.parse::<f64>().is_ok_and(f64::is_finite);
        let is_text = !values.iter().all(is_number);
        // An integer with leading zeros, or with too many digits, is likely to be an identifier.
        let is_fraction = values.iter().all(|value| {
            is_number(value)
                && value.contains(['.', 'e', 'E'])
                && !value.contains('+')
                && !value.starts_with("00")
        });
        let name = column.name();
        let cast = |to: &str| format!("TRY_CAST({} AS {to})", quote(name));
        let null = |to: &str| format!("; then `{}` in the query is null for such texts", cast(to));
        let (wider, then) = match column.data_type() {
            integer if integer.is_integer() && is_fraction => ("DOUBLE", String::new()),
            DataType::List(_) | DataType::LargeList(_) => ("VARCHAR[]", String::new()),
            integer if integer.is_integer() && is_text => ("VARCHAR", null("BIGINT")),
            DataType::Float32 | DataType::Float64 if is_text => ("VARCHAR", null("DOUBLE")),
            DataType::Boolean => ("VARCHAR", null("BOOLEAN")),
            DataType::Date32 | DataType::Timestamp(..) => {
                let such = cast("TIMESTAMP");
                ("VARCHAR", format!("; then leave such rows out in the query, `WHERE {such} IS NOT NULL`"))
            }
            _ => ("VARCHAR", String::new()),
        };
        // Files that were joined have a header in the middle.
        let correct = match values.first() == Some(name) {
            true => "remove the row, which repeats the header",
            false => "correct the row",
        };
        format!(
            "{correct}, or give the column's type under `[sources].{}`, as `schema = {{ {} = \"{wider}\" }}`{then}",
            self.source,
            toml_key(name)
        )
    }

    /// Returns the error of a row with the number of its line.
    async fn locate(&self, file: &PartitionedFile, error: &DataFusionError) -> DataFusionError {
        let line = match self.first_wrong_row(file).await {
            Some(row) => self.line(file, row).await,
            None => None,
        };
        let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let message = error.find_root().strip_backtrace();
        let located = match row_error(error) {
            Some(RowError { message, hint }) => {
                RowError { message: format!("{place}{message}"), hint: hint.clone() }
            }
            None if message.contains("UTF-8") => RowError::not_utf8(line),
            None => {
                let column = message.split_once("field '").and_then(|(_, rest)| rest.split_once('\''));
                let column = column.map_or_else(|| "column".to_owned(), |(name, _)| toml_key(name));
                let hint = format!(
                    "the row does not fit the types of the first rows: correct it, or give its column's type under \
                     `[sources].{}`, as `schema = {{ {column} = \"VARCHAR\" }}`",
                    self.source
                );
                RowError { message: format!("{place}{message}"), hint }
            }
        };
        DataFusionError::External(Box::new(located))
    }

    /// Returns the index of the first row of a file that cannot be read. Reads the rows one by one.
    async fn first_wrong_row(&self, file: &PartitionedFile) -> Option<u64> {
        let mut rows = self.texts(file, 1).await.ok()?;
        let mut row = 0;
        while let Some(texts) = rows.next().await {
            match texts.and_then(|texts| self.exactly(&texts)) {
                Ok(batch) => row += batch.num_rows() as u64,
                Err(_) => return Some(row),
            }
        }
        None
    }

    /// Returns the line number, counted from 1, at which row number `row` of [`texts`](Self::texts) begins.
    async fn line(&self, file: &PartitionedFile, row: u64) -> Option<u64> {
        let whole = self.store.unchecked().get(&file.object_meta.location).await.ok()?;
        let start = file.range.as_ref().map_or(0, |range| range.start.unsigned_abs());
        let mut lines = match self.store.csv_rules() {
            Some(rules) => Lines::Csv { checker: Checker::new(rules), row: row + u64::from(rules.header) },
            None => Lines::Json { offset: 0, line: 1, begins: 0, blank: true, start, rows: row },
        };
        let mut chunks = whole.into_stream();
        while let Some(chunk) = chunks.next().await {
            if let Some(line) = chunk.ok()?.iter().find_map(|byte| lines.push(*byte)) {
                return Some(line);
            }
        }
        lines.last()
    }
}

/// Finds the line of a row.
enum Lines {
    Csv {
        checker: Checker,
        /// The index of the row; a header has index 0.
        row: u64,
    },
    Json {
        offset: u64,
        line: u64,
        /// The offset at which the line begins.
        begins: u64,
        /// Whether the line has been blank so far.
        blank: bool,
        /// Only lines that begin at this offset or later count.
        start: u64,
        /// The number of rows before the wanted one.
        rows: u64,
    },
}

impl Lines {
    /// Takes the next byte. Returns the line once it is known.
    fn push(&mut self, byte: u8) -> Option<u64> {
        match self {
            Self::Csv { checker, row } => {
                let line = checker.row_line();
                checker.push(&[byte], &mut Vec::new()).ok()?;
                (checker.rows() > *row).then_some(line)
            }
            Self::Json { offset, line, begins, blank, start, rows } => {
                *offset += 1;
                if byte == b'\n' {
                    (*line, *begins, *blank) = (*line + 1, *offset, true);
                } else if *blank && !byte.is_ascii_whitespace() {
                    *blank = false;
                    if *begins >= *start {
                        if *rows == 0 {
                            return Some(*line);
                        }
                        *rows -= 1;
                    }
                }
                None
            }
        }
    }

    /// Returns the line of a last row without a line end.
    fn last(self) -> Option<u64> {
        match self {
            Self::Csv { mut checker, row } => {
                let line = checker.row_line();
                checker.finish(&mut Vec::new()).ok()?;
                (checker.rows() > row).then_some(line)
            }
            Self::Json { .. } => None,
        }
    }
}

/// Returns the rest of a file in chunks.
fn chunks(mut file: impl Read) -> impl Iterator<Item = Result<Bytes>> {
    std::iter::from_fn(move || {
        let mut chunk = Vec::with_capacity(CHUNK);
        match file.by_ref().take(CHUNK as u64).read_to_end(&mut chunk) {
            Ok(0) => None,
            Ok(_) => Some(Ok(Bytes::from(chunk))),
            Err(error) => Some(Err(DataFusionError::IoError(error))),
        }
    })
}

/// Returns the error of a row that is contained in an error of reading, if there is one.
pub(super) fn row_error(error: &DataFusionError) -> Option<&RowError> {
    match error.find_root() {
        DataFusionError::External(cause) => cause.downcast_ref(),
        _ => None,
    }
}

/// Whether the bytes were read but a row does not fit the types of the columns.
fn is_of_row(error: &DataFusionError) -> bool {
    use ArrowError::{CastError, CsvError, InvalidArgumentError, JsonError, ParseError};
    match error.find_root() {
        DataFusionError::ArrowError(cause, _) => {
            let cause = cause.as_ref();
            matches!(
                cause,
                CastError(_) | CsvError(_) | InvalidArgumentError(_) | JsonError(_) | ParseError(_)
            )
        }
        _ => row_error(error).is_some(),
    }
}

/// Describes the origin of a column's type.
fn by(declared: bool) -> &'static str {
    if declared { "its type in `schema`" } else { "the type of the first rows" }
}

/// Formats a name as a TOML key.
pub(super) fn toml_key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { format!("{name:?}") }
}

/// Text files that are opened by a [`FileOpener`].
struct TextFiles(Arc<dyn FileOpener>);

/// A text file to open.
struct TextFile {
    opener: Arc<dyn FileOpener>,
    file: PartitionedFile,
}

impl fmt::Debug for TextFiles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TextFiles").finish_non_exhaustive()
    }
}

impl fmt::Debug for TextFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TextFile")
            .field("file", &self.file.object_meta.location)
            .finish_non_exhaustive()
    }
}

impl Morselizer for TextFiles {
    fn plan_file(&self, file: PartitionedFile) -> Result<Box<dyn MorselPlanner>> {
        Ok(Box::new(TextFile { opener: Arc::clone(&self.0), file }))
    }
}

impl MorselPlanner for TextFile {
    fn plan(self: Box<Self>) -> Result<Option<MorselPlan>> {
        let morsel: Box<dyn Morsel> = self;
        Ok(Some(MorselPlan::new().with_morsels(vec![morsel])))
    }
}

impl Morsel for TextFile {
    fn into_stream(self: Box<Self>) -> BoxStream<'static, Result<RecordBatch>> {
        let Self { opener, file } = *self;
        stream::once(async move { opener.open(file)?.await }).try_flatten().boxed()
    }
}
