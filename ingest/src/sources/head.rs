//! Reads the first rows of a text file, from which its columns are inferred.

use std::io::Cursor;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use arrow::error::ArrowError;
use arrow::json::reader::infer_json_schema;
use futures::{Stream, StreamExt};

use super::csv::{Checker, RowError};
use super::exact::{as_text, exact};
use super::formats::{Dialect, not_text};
use crate::config::Format;
use crate::error::MessageAndHint;

/// The number of rows of each file from which columns are inferred.
const ROWS: usize = 1000;
/// The number of bytes after which fewer rows are enough.
const BYTES: usize = 8 << 20;
/// The maximum size in bytes of a JSON line. A longer line is assumed to be a file without lines.
const ROW_BYTES: usize = 64 << 20;

/// The first complete rows of a file.
#[derive(Debug)]
pub(super) struct Head {
    bytes: Vec<u8>,
    /// The number of rows, including a header.
    rows: usize,
}

/// Reads the first rows of a decompressed stream, and no more of it than necessary. Checks CSV: rows must have
/// `columns` values, or as many as the first row if it is `None`.
///
/// # Errors
///
/// A message and a hint if the stream fails or does not contain text, CSV has an ambiguous row, or JSON has a line
/// of more than 64 MiB.
pub(super) async fn read_head<E: std::fmt::Display>(
    mut chunks: impl Stream<Item = Result<bytes::Bytes, E>> + Unpin,
    dialect: Dialect,
    columns: Option<usize>,
) -> Result<Head, MessageAndHint> {
    let mut rows = match dialect.format {
        Format::Csv => HeadRows::Csv(Checker::new(dialect.csv_rules(columns))),
        _ => HeadRows::Lines { begun: Vec::new(), rows: 0 },
    };
    let (mut bytes, mut start) = (Vec::new(), Vec::new());
    let wanted = ROWS + usize::from(dialect.format == Format::Csv && dialect.header);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| (format!("it cannot be read: {error}"), damaged_hint()))?;
        if start.len() < START_BYTES {
            start.extend_from_slice(&chunk);
            check_start(&start, dialect)?;
        }
        rows.push(&chunk, &mut bytes)?;
        if rows.count() >= wanted || (bytes.len() >= BYTES && rows.count() > 1) {
            return Ok(Head { bytes, rows: rows.count() });
        }
    }
    rows.finish(&mut bytes)?;
    Ok(Head { bytes, rows: rows.count() })
}

/// The number of bytes at the start of a file from which its format is recognized.
const START_BYTES: usize = 4096;

/// Checks that a file that begins with `start` can have the format.
fn check_start(start: &[u8], dialect: Dialect) -> Result<(), MessageAndHint> {
    if let Some(message) = not_text(start) {
        let hint = match message.contains("UTF-16") {
            true => "convert the file to UTF-8, for example with `iconv -f UTF-16 -t UTF-8`",
            false => "set the source's `format` and `compression` to those of the file",
        };
        return Err((message.to_owned(), hint.to_owned()));
    }
    if dialect.format == Format::Csv && start.starts_with(b"{\"") {
        return Err(("it looks like JSON lines, not CSV".to_owned(), "set `format = \"json\"`".to_owned()));
    }
    check_utf8(start)
}

/// Checks that the first bytes of a file are UTF-8. The last character may be incomplete.
fn check_utf8(bytes: &[u8]) -> Result<(), MessageAndHint> {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_some() => {
            let lines = bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
            let RowError { message, hint } = RowError::not_utf8(Some(lines as u64 + 1));
            Err((message, hint))
        }
        _ => Ok(()),
    }
}

/// Finds the ends of rows.
enum HeadRows {
    Csv(Checker),
    Lines {
        /// The bytes of an incomplete line.
        begun: Vec<u8>,
        rows: usize,
    },
}

impl HeadRows {
    /// Appends the rows that end in `chunk` to `bytes`.
    fn push(&mut self, chunk: &[u8], bytes: &mut Vec<u8>) -> Result<(), MessageAndHint> {
        match self {
            Self::Csv(checker) => checker.push(chunk, bytes).map_err(|error| (error.message, error.hint)),
            Self::Lines { begun, rows } => {
                let whole = chunk.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
                if whole > 0 {
                    bytes.append(begun);
                    bytes.extend_from_slice(&chunk[..whole]);
                    *rows += chunk[..whole].iter().filter(|byte| **byte == b'\n').count();
                }
                begun.extend_from_slice(&chunk[whole..]);
                if begun.len() > ROW_BYTES {
                    let message = format!("line {} has more than {} MiB", *rows + 1, ROW_BYTES >> 20);
                    let hint =
                        "the file has no line ends, or is of another format; correct it, or set `format`";
                    return Err((message, hint.to_owned()));
                }
                Ok(())
            }
        }
    }

    /// Appends a last row without a line end to `bytes`.
    fn finish(&mut self, bytes: &mut Vec<u8>) -> Result<(), MessageAndHint> {
        match self {
            Self::Csv(checker) => checker.finish(bytes).map_err(|error| (error.message, error.hint)),
            Self::Lines { begun, rows } => {
                *rows += usize::from(!begun.is_empty());
                bytes.append(begun);
                Ok(())
            }
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::Csv(checker) => usize::try_from(checker.rows()).unwrap_or(usize::MAX),
            Self::Lines { rows, .. } => *rows,
        }
    }
}

/// The hint for a file whose bytes cannot be decoded.
pub(super) fn damaged_hint() -> String {
    "the file is damaged or was changed while it was read; write it again".to_owned()
}

impl Head {
    /// Infers the columns of the file, with [`DataType::Null`] for a column without any value.
    ///
    /// # Errors
    ///
    /// A message and a hint if the rows do not have the format, with the line if it is known.
    pub(super) fn infer(&self, dialect: Dialect) -> Result<Schema, MessageAndHint> {
        check_utf8(&self.bytes)?;
        let inferred = match dialect.format {
            Format::Csv => self.infer_csv(dialect)?,
            _ => self.infer_json()?,
        };
        Ok(self.without_loss(inferred, dialect))
    }

    /// Replaces types in `inferred` with text if they do not represent all values of the rows as they are written.
    /// Times with offsets get a type with a time zone.
    fn without_loss(&self, inferred: Schema, dialect: Dialect) -> Schema {
        let text = |field: &Arc<Field>| {
            Field::clone(field).with_data_type(as_text(field.data_type(), dialect.format))
        };
        let texts = Arc::new(Schema::new(inferred.fields().iter().map(text).collect::<Vec<_>>()));
        // Values that cannot be decoded are reported when the rows are read, if their column is read.
        let Ok(rows) = self.decode(&texts, dialect) else { return inferred };
        let fields = inferred.fields().iter().enumerate().map(|(column, field)| {
            let with_offsets = match field.data_type() {
                DataType::Timestamp(unit, None) => Some(DataType::Timestamp(*unit, Some("UTC".into()))),
                _ => None,
            };
            let holds_all =
                |wanted: &DataType| rows.iter().all(|rows| exact(rows.column(column), wanted, true).is_ok());
            let found = std::iter::once(field.data_type().clone()).chain(with_offsets).find(holds_all);
            Field::clone(field)
                .with_data_type(found.unwrap_or_else(|| texts.field(column).data_type().clone()))
        });
        Schema::new(fields.collect::<Vec<_>>())
    }

    /// Decodes the rows from which types are inferred; `None` if the file has no rows.
    fn decode(&self, columns: &SchemaRef, dialect: Dialect) -> Result<Option<RecordBatch>, ArrowError> {
        let (columns, bytes) = (Arc::clone(columns), Cursor::new(&self.bytes));
        match dialect.format {
            Format::Csv => {
                let reader =
                    arrow::csv::ReaderBuilder::new(columns).with_format(dialect.csv_rules(None).format());
                reader.with_batch_size(ROWS).build(bytes)?.next().transpose()
            }
            _ => {
                let reader = arrow::json::ReaderBuilder::new(columns).with_coerce_primitive(true);
                reader.with_batch_size(ROWS).build(bytes)?.next().transpose()
            }
        }
    }

    fn infer_csv(&self, dialect: Dialect) -> Result<Schema, MessageAndHint> {
        if self.rows == 0 {
            let hint = "write at least its header, or delete the file";
            return Err(("it has no rows, not even a header".to_owned(), hint.to_owned()));
        }
        let format = dialect.csv_rules(None).format();
        let (schema, _) = format.infer_schema(Cursor::new(&self.bytes), Some(ROWS)).map_err(|error| {
            let hint = "correct the row, or set the source's `delimiter`, `header` or `format`";
            (format!("it is not CSV: {error}"), hint.to_owned())
        })?;
        let fields = schema.fields().iter().map(|field| {
            // A coarser unit would cut off the fractions of times in later rows.
            let data_type = match field.data_type() {
                DataType::Timestamp(TimeUnit::Second | TimeUnit::Millisecond, zone) => {
                    DataType::Timestamp(TimeUnit::Microsecond, zone.clone())
                }
                other => other.clone(),
            };
            Field::new(field.name(), data_type, true)
        });
        Ok(Schema::new(fields.collect::<Vec<_>>()))
    }

    fn infer_json(&self) -> Result<Schema, MessageAndHint> {
        let start = self.bytes.iter().find(|byte| !byte.is_ascii_whitespace());
        if start == Some(&b'[') {
            let hint = "write one object a line, for example with `jq -c '.[]'`";
            return Err(("it is a JSON array, not JSON lines".to_owned(), hint.to_owned()));
        }
        let error = match infer_json_schema(Cursor::new(&self.bytes), Some(ROWS)) {
            Ok((schema, _)) => return Ok(schema),
            Err(error) => error,
        };
        // The first line that is invalid by itself; `None` if the lines only contradict each other.
        let lines = self.bytes.split(|byte| *byte == b'\n');
        let wrong = lines.enumerate().find(|(_, line)| infer_json_schema(Cursor::new(line), None).is_err());
        let place = wrong.map_or(String::new(), |(line, _)| format!("line {}: ", line + 1));
        let hint = "write one JSON object a line, or set the source's `format`";
        Err((format!("it is not JSON lines: {place}{error}"), hint.to_owned()))
    }

    /// Returns the number of rows without a header.
    pub(super) fn data_rows(&self, dialect: Dialect) -> u64 {
        (self.rows - usize::from(dialect.format == Format::Csv && dialect.header).min(self.rows)) as u64
    }

    /// Estimates the decoded size of the rows in bytes: 8 bytes for every value (counted by separators), and at
    /// least the size of the text.
    pub(super) fn decoded_bytes(&self, dialect: Dialect) -> u64 {
        let separators =
            self.bytes.iter().filter(|byte| **byte == dialect.delimiter || **byte == b',').count();
        (8 * (separators + self.rows)).max(self.bytes.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;
    use crate::config::{Quote, Ragged};

    const CSV: Dialect = Dialect {
        format: Format::Csv,
        delimiter: b',',
        header: true,
        quote: Quote::Guarded,
        escape: None,
        ragged: Ragged::Error,
    };
    const JSON: Dialect = Dialect { format: Format::Json, ..CSV };

    /// Reads the head of `text`, which arrives in chunks of `size` bytes. Returns it with the number of chunks that
    /// were read.
    fn head(text: &str, dialect: Dialect, size: usize) -> (Result<Head, MessageAndHint>, usize) {
        let taken = std::cell::Cell::new(0);
        let chunks = text.as_bytes().chunks(size).map(|chunk| {
            taken.set(taken.get() + 1);
            Ok::<_, String>(bytes::Bytes::copy_from_slice(chunk))
        });
        let read = futures::executor::block_on(read_head(stream::iter(chunks), dialect, None));
        (read, taken.get())
    }

    fn infer(text: &str, dialect: Dialect) -> Result<String, MessageAndHint> {
        let schema = head(text, dialect, 7).0?.infer(dialect)?;
        let fields = schema.fields().iter();
        Ok(fields
            .map(|field| format!("{} {}", field.name(), field.data_type()))
            .collect::<Vec<_>>()
            .join(", "))
    }

    #[test]
    fn rows_end_outside_of_quotes_only() {
        let text = "a,b\n1,\"x\ny\"\"\nz\"\n2,5\" screen\n3,\n4,last";
        for size in 1..text.len() {
            let head = head(text, CSV, size).0.unwrap();
            assert_eq!((head.rows, head.data_rows(CSV)), (5, 4), "chunks of {size}");
        }
        assert_eq!(head("{\"a\": \"x\\\"\"}\n{\"a\": 1}\n", JSON, 3).0.unwrap().rows, 2);
    }

    #[test]
    fn only_the_first_rows_are_read() {
        let text: String = (0..20_000).map(|row| format!("{row},{row}\n")).collect();
        let (head, chunks) = head(&text, CSV, 100);
        let head = head.unwrap();
        // Reading stops at the end of a chunk, and every row has at least 4 bytes.
        assert!((1001..1001 + 25).contains(&head.rows), "{} rows", head.rows);
        assert_eq!(head.data_rows(CSV), head.rows as u64 - 1);
        assert!(chunks <= head.bytes.len() / 100 + 1, "{chunks} chunks for {} bytes", head.bytes.len());
        let last = head.rows - 1;
        assert!(head.bytes.ends_with(format!("\n{last},{last}\n").as_bytes()));
        assert!(head.decoded_bytes(CSV) >= 16 * 1001);
    }

    #[test]
    fn columns_are_inferred() {
        let csv = "id,score,text,day,at,none\n1,2,x,2024-05-01,2024-05-01T10:00:00,\n-2,1.5,7,2024-05-02,,\n";
        assert_eq!(
            infer(csv, CSV).unwrap(),
            "id Int64, score Float64, text Utf8, day Date32, at Timestamp(µs), none Null"
        );
        assert_eq!(infer("id,score\n", CSV).unwrap(), "id Null, score Null");
        let bare = Dialect { header: false, delimiter: b';', ..CSV };
        assert_eq!(infer("1;a\n2;b\n", bare).unwrap(), "column_1 Int64, column_2 Utf8");
        let json =
            "{\"ids\": [1, 2], \"empty\": [], \"deep\": [[1]], \"x\": 1}\n\n{\"x\": 1.5, \"none\": null}\n";
        let mut fields: Vec<String> = infer(json, JSON).unwrap().split(", ").map(str::to_owned).collect();
        fields.sort();
        assert_eq!(
            fields,
            ["deep List(List(Int64))", "empty List(Null)", "ids List(Int64)", "none Null", "x Float64"]
        );
    }

    #[test]
    fn a_type_that_loses_a_digit_or_an_offset_is_not_guessed() {
        let csv = "zip,user,ratio,version,at,day,mixed\n02139,4873214862074861313,0.5,1.10,2024-05-01T10:00:00Z,\
                   2024-05-01T10:00:00,2024-05-01T10:00:00Z\n2139,7.0,0.123456789012345678,1.2,2024-05-01T10:00:00+02:00,\
                   2024-05-02T10:00:00.5,2024-05-01T10:00:00\n";
        assert_eq!(
            infer(csv, CSV).unwrap(),
            "zip Utf8, user Utf8, ratio Utf8, version Float64, at Timestamp(µs, \"UTC\"), day Timestamp(µs), mixed Utf8"
        );
        for id in ["007", "-0", "99999999999999999999"] {
            assert_eq!(infer(&format!("id\n1\n{id}\n"), CSV).unwrap(), "id Utf8", "{id}");
        }
        let json = "{\"id\": 1, \"ids\": [1, 2]}\n{\"id\": 20000000000000000001, \"ids\": [9007199254740993, 0.5]}\n";
        assert_eq!(infer(json, JSON).unwrap(), "id Utf8, ids List(Utf8)");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_named_before_their_rows_are_read() {
        let read = |bytes: &'static [u8]| {
            let chunks = stream::iter([Ok::<_, String>(bytes::Bytes::from_static(bytes))]);
            let head = futures::executor::block_on(read_head(chunks, CSV, None))?;
            head.infer(CSV).map(|schema| schema.fields().len())
        };
        // Another delimiter would be a second error, but the encoding comes first.
        let (message, hint) = read(b"a;b\n1;caf\xe9, 2\n").unwrap_err();
        assert!(message.starts_with("line 2: ") && message.contains("UTF-8"), "{message}");
        assert!(hint.contains("iconv -f ISO-8859-1"), "{hint}");
        assert_eq!(read("a;b\n1;café\n".as_bytes()), Ok(1));
    }

    #[test]
    fn files_of_another_format_are_recognized() {
        for (text, dialect, part) in [
            ("", CSV, "not even a header"),
            ("{\"a\": 1}\n", CSV, "JSON lines"),
            ("a,b\n1,2,3\n", CSV, "line 2: the row has 3 values"),
            ("a,b\n1,\"2\n", CSV, "line 2: a quote opens"),
            ("[{\"a\": 1}]\n", JSON, "a JSON array"),
            ("{\"a\": 1}\n{\"a\": \n", JSON, "line 2"),
            ("{\"a\": 1}\n3\n", JSON, "line 2"),
            ("a,b\n1,2\n", JSON, "line 1"),
            ("PAR1xxxx", CSV, "a Parquet file"),
        ] {
            let (message, hint) = infer(text, dialect).unwrap_err();
            assert!(message.contains(part) && !hint.is_empty(), "{text}: {message}");
        }
    }
}
