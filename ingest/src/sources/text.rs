//! Rows of text files: decoded, converted [exactly](super::exact), and located if they are wrong.

use std::any::Any;
use std::fmt;
use std::io::Read;
use std::sync::Arc;

use arrow::array::{RecordBatch, RecordBatchOptions};
use arrow::csv::reader::Format as CsvFormat;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use bytes::Bytes;
use datafusion::datasource::file_format::csv::CsvDecoder;
use datafusion::datasource::file_format::json::JsonDecoder;
use datafusion::datasource::listing::PartitionedFile;
use datafusion::datasource::physical_plan::{CsvSource, FileOpener, FileSource};
use datafusion::error::{DataFusionError, Result};
use datafusion_datasource::boundary_stream::AlignedBoundaryStream;
use datafusion_datasource::decoder::{DecoderDeserializer, deserialize_stream};
use datafusion_datasource::file_stream::FileOpenFuture;
use datafusion_datasource::morsel::{Morsel, MorselPlan, MorselPlanner, Morselizer};
use datafusion_datasource::projection::{ProjectionOpener, SplitProjection};
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::{GetOptions, GetResultPayload, ObjectStore, ObjectStoreExt};

use super::csv::{Checker, RowError};
use super::exact::{as_text, exact};
use super::text_store::TextStore;
use crate::config::Format;

/// Bytes that are read from a local file at once.
const CHUNK: usize = 256 << 10;
/// Rows of a batch if the engine does not say how many.
const ROWS: usize = 8192;

/// How rows of the text files of a source are read.
#[derive(Debug, Clone)]
struct RowReader {
    source: String,
    store: Arc<TextStore>,
    /// The columns whose types the configuration gives.
    declared: Arc<[String]>,
    /// The columns of the files.
    schema: SchemaRef,
    /// Those that are read.
    read: Vec<usize>,
    /// JSON lines if `None`.
    csv: Option<CsvFormat>,
    header: bool,
    batch_rows: usize,
}

/// Reads files as the engine's `format` of text would, but by a [`RowReader`].
///
/// # Errors
///
/// Those of the engine.
pub(super) fn morselizer(
    format: &Arc<dyn FileSource>,
    source: &str,
    store: TextStore,
    declared: &Arc<[String]>,
    batch_rows: Option<usize>,
) -> Result<Box<dyn Morselizer>> {
    let table = format.table_schema();
    let columns = table.file_schema();
    let projection = match format.projection() {
        Some(projection) => SplitProjection::new(columns, projection),
        None => SplitProjection::unprojected(table),
    };
    let csv = (format.as_ref() as &dyn Any).downcast_ref::<CsvSource>();
    let header = csv.is_some_and(CsvSource::has_header);
    let csv = csv.map(|csv| {
        let format = CsvFormat::default().with_header(csv.has_header()).with_delimiter(csv.delimiter());
        csv.escape().into_iter().fold(format.with_quote(csv.quote()), CsvFormat::with_escape)
    });
    let reader = RowReader {
        source: source.to_owned(),
        store: Arc::new(store),
        declared: Arc::clone(declared),
        schema: Arc::clone(columns),
        read: projection.file_indices.clone(),
        csv,
        header,
        batch_rows: batch_rows.unwrap_or(ROWS),
    };
    Ok(Box::new(TextFiles(ProjectionOpener::try_new(projection, Arc::new(reader), columns)?)))
}

impl FileOpener for RowReader {
    fn open(&self, file: PartitionedFile) -> Result<FileOpenFuture> {
        let reader = self.clone();
        Ok(async move {
            let batches = reader.batches(&file, reader.batch_rows).await?;
            let located = Arc::new((reader, file));
            let batches = batches.then(move |batch| {
                let located = Arc::clone(&located);
                async move {
                    match batch {
                        Err(error) if is_of_row(&error) => Err(located.0.locate(&located.1, &error).await),
                        batch => batch,
                    }
                }
            });
            Ok(batches.boxed())
        }
        .boxed())
    }
}

impl RowReader {
    /// The rows of a file, or of the lines that begin in its range.
    async fn batches(
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
                // Numbers as they are written.
                let decoder = arrow::json::ReaderBuilder::new(texts).with_coerce_primitive(true);
                let decoder = decoder.with_batch_size(rows).build_decoder()?;
                deserialize_stream(bytes, DecoderDeserializer::new(JsonDecoder::new(decoder)))
            }
        };
        let reader = self.clone();
        let columns = Arc::new(self.schema.project(&self.read)?);
        Ok(decoded.map(move |texts| reader.exactly(&texts?, &columns)).boxed())
    }

    async fn bytes(&self, file: &PartitionedFile) -> Result<BoxStream<'static, Result<Bytes>>> {
        let location = &file.object_meta.location;
        if let Some(range) = &file.range {
            let store = Arc::clone(&self.store) as Arc<dyn ObjectStore>;
            let (start, end) = (range.start.unsigned_abs(), range.end.unsigned_abs());
            let size = file.object_meta.size;
            let lines = AlignedBoundaryStream::new(store, location.clone(), start, end, size, b'\n').await?;
            return Ok(lines.map_err(DataFusionError::from).boxed());
        }
        let whole = self.store.get_opts(location, GetOptions::default()).await?;
        Ok(match whole.payload {
            GetResultPayload::File(file, _) => stream::iter(chunks(file)).boxed(),
            GetResultPayload::Stream(chunks) => chunks.map_err(DataFusionError::from).boxed(),
        })
    }

    /// The `columns` of rows that were decoded as text.
    fn exactly(&self, texts: &RecordBatch, columns: &SchemaRef) -> Result<RecordBatch> {
        let read = columns.fields().iter().zip(texts.columns()).map(|(field, texts)| {
            let declared = self.declared.contains(field.name());
            exact(texts, field.data_type(), !declared).map_err(|value| self.unfit(&value, field, declared))
        });
        let read = read.collect::<Result<Vec<_>>>()?;
        let rows = RecordBatchOptions::new().with_row_count(Some(texts.num_rows()));
        Ok(RecordBatch::try_new_with_options(Arc::clone(columns), read, &rows)?)
    }

    /// The error for a value that is not of its column's type.
    fn unfit(&self, value: &str, column: &Field, declared: bool) -> DataFusionError {
        let (name, data_type) = (column.name(), column.data_type());
        let by = if declared { "`schema`" } else { "the first rows" };
        let message = format!("`{value}` in the column `{name}` is not the {data_type} that {by} make of it");
        let is_number = value.parse::<f64>().is_ok_and(f64::is_finite) && !value.contains(['+', 'x']);
        // An integer with zeros in front, or with too many digits, names something.
        let is_fraction = is_number && value.contains(['.', 'e', 'E']) && !value.starts_with("00");
        let wider = match data_type {
            integer if integer.is_integer() && is_fraction => "DOUBLE",
            DataType::List(_) | DataType::LargeList(_) => "VARCHAR[]",
            _ => "VARCHAR",
        };
        let hint = format!(
            "correct the row, or give the column's type under `[sources].{}`, as `schema = {{ {} = \"{wider}\" }}`",
            self.source,
            toml_key(name)
        );
        DataFusionError::External(Box::new(RowError { message, hint }))
    }

    /// The error of a row, with its line.
    async fn locate(&self, file: &PartitionedFile, error: &DataFusionError) -> DataFusionError {
        let line = match self.first_wrong_row(file).await {
            Some(row) => self.line(file, row).await,
            None => None,
        };
        let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let located = match row_error(error) {
            Some(RowError { message, hint }) => {
                RowError { message: format!("{place}{message}"), hint: hint.clone() }
            }
            None => {
                let message = error.find_root().strip_backtrace();
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

    /// The first row of a file, from 0, that cannot be read: they are read one by one.
    async fn first_wrong_row(&self, file: &PartitionedFile) -> Option<u64> {
        let mut rows = self.batches(file, 1).await.ok()?;
        let mut row = 0;
        while let Some(read) = rows.next().await {
            match read {
                Ok(batch) => row += batch.num_rows() as u64,
                Err(_) => return Some(row),
            }
        }
        None
    }

    /// The line, from 1, in which row number `row` of [`batches`](Self::batches) begins.
    async fn line(&self, file: &PartitionedFile, row: u64) -> Option<u64> {
        let whole = self.store.unchecked().get(&file.object_meta.location).await.ok()?;
        let start = file.range.as_ref().map_or(0, |range| range.start.unsigned_abs());
        let mut lines = match self.store.csv_rules() {
            Some(rules) => Lines::Csv { checker: Checker::new(rules), row: row + u64::from(self.header) },
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
        /// The row, where a header is the first.
        row: u64,
    },
    Json {
        offset: u64,
        line: u64,
        /// Where the line begins.
        begins: u64,
        /// Whether nothing has come in the line.
        blank: bool,
        /// Lines count that begin here or later.
        start: u64,
        /// Rows that are before the one that is looked for.
        rows: u64,
    },
}

impl Lines {
    /// Takes the next byte; gives the line if it is known then.
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

    /// The line of a last row without a line end.
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

/// The rest of a file in chunks.
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

/// The error of a row in an error of reading, if there is one.
pub(super) fn row_error(error: &DataFusionError) -> Option<&RowError> {
    match error.find_root() {
        DataFusionError::External(cause) => cause.downcast_ref(),
        _ => None,
    }
}

/// Whether bytes were read but a row does not have the columns' types.
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

/// A name as a key of TOML.
fn toml_key(name: &str) -> String {
    let is_bare = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !name.is_empty() && name.chars().all(is_bare) { name.to_owned() } else { format!("{name:?}") }
}

/// Text files that are opened by a [`FileOpener`].
struct TextFiles(Arc<dyn FileOpener>);

/// One of them.
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
