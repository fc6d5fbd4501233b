//! The first rows of a text file, of which its columns are inferred.

use std::io::Cursor;

use arrow::csv::reader::Format as CsvFormat;
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use arrow::json::reader::infer_json_schema;
use futures::{Stream, StreamExt};

use super::formats::{Dialect, not_text};
use crate::config::Format;

/// Rows that are looked at in every file.
const ROWS: usize = 1000;
/// Fewer rows are enough when they have this many bytes.
const BYTES: usize = 8 << 20;
/// A row beyond this is taken for a file that has no rows.
const ROW_BYTES: usize = 64 << 20;
/// What separates and closes the values of CSV rows.
const QUOTE: u8 = b'"';

/// The first whole rows of a file.
#[derive(Debug)]
pub(super) struct Head {
    bytes: Vec<u8>,
    /// Where the rows end, a header among them.
    rows: usize,
}

/// What is wrong with a file, and what to do.
pub(super) type Wrong = (String, String);

/// Reads the first rows of a decompressed stream and no more of it than that takes.
///
/// # Errors
///
/// If the stream fails, holds no text, or a row of more than 64 MiB.
pub(super) async fn read_head<E: std::fmt::Display>(
    mut chunks: impl Stream<Item = Result<bytes::Bytes, E>> + Unpin,
    dialect: Dialect,
) -> Result<Head, Wrong> {
    let mut splitter = RowSplitter::new(dialect);
    let mut bytes = Vec::new();
    let (mut rows, mut end) = (0, 0);
    let wanted = ROWS + usize::from(dialect.format == Format::Csv && dialect.header);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| (format!("it cannot be read: {error}"), damaged_hint()))?;
        let seen = bytes.len();
        bytes.extend_from_slice(&chunk);
        if seen < 4096
            && let Some(message) = not_text(&bytes)
        {
            return Err((
                message.to_owned(),
                "set the source's `format` and `compression` to what it is".to_owned(),
            ));
        }
        for (place, byte) in chunk.iter().enumerate() {
            if splitter.ends_row(*byte) {
                rows += 1;
                end = seen + place + 1;
                if rows == wanted || (end >= BYTES && rows > 1) {
                    bytes.truncate(end);
                    return Ok(Head { bytes, rows });
                }
            }
        }
        if bytes.len() - end > ROW_BYTES {
            let message = format!("row {} has more than {} MiB", rows + 1, ROW_BYTES >> 20);
            return Err((
                message,
                "the file has no line ends or an open quote; correct it, or set `format`".to_owned(),
            ));
        }
    }
    if bytes.len() > end {
        rows += 1;
    }
    Ok(Head { bytes, rows })
}

/// What to do about a file whose bytes cannot be decoded.
pub(super) fn damaged_hint() -> String {
    "the file is damaged or was changed while it was read; write it again".to_owned()
}

impl Head {
    /// The columns of the file, with [`DataType::Null`] where no row has a value.
    ///
    /// # Errors
    ///
    /// If the rows are not of the format, with the line where it is known.
    pub(super) fn infer(&self, dialect: Dialect) -> Result<Schema, Wrong> {
        match dialect.format {
            Format::Csv => self.infer_csv(dialect),
            _ => self.infer_json(),
        }
    }

    fn infer_csv(&self, dialect: Dialect) -> Result<Schema, Wrong> {
        if self.rows == 0 {
            let hint = "write at least its header, or delete the file";
            return Err(("it has no rows, not even a header".to_owned(), hint.to_owned()));
        }
        if self.bytes.starts_with(b"{\"") {
            return Err((
                "it looks like JSON lines, not CSV".to_owned(),
                "set `format = \"json\"`".to_owned(),
            ));
        }
        let format = CsvFormat::default().with_header(dialect.header).with_delimiter(dialect.delimiter);
        let (schema, _) = format.infer_schema(Cursor::new(&self.bytes), Some(ROWS)).map_err(|error| {
            let hint = "correct the row, or set the source's `delimiter`, `header` or `format`";
            (format!("it is not CSV: {error}"), hint.to_owned())
        })?;
        let fields = schema.fields().iter().map(|field| {
            // A coarser unit would cut off the fractions of later rows.
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

    fn infer_json(&self) -> Result<Schema, Wrong> {
        let start = self.bytes.iter().find(|byte| !byte.is_ascii_whitespace());
        if start == Some(&b'[') {
            let hint = "write one object a line, for example with `jq -c '.[]'`";
            return Err(("it is a JSON array, not JSON lines".to_owned(), hint.to_owned()));
        }
        let error = match infer_json_schema(Cursor::new(&self.bytes), None) {
            Ok((schema, _)) => return Ok(schema),
            Err(error) => error,
        };
        // The first line that is wrong by itself; none if lines only do not go together.
        let lines = self.bytes.split(|byte| *byte == b'\n');
        let wrong = lines.enumerate().find(|(_, line)| infer_json_schema(Cursor::new(line), None).is_err());
        let place = wrong.map_or(String::new(), |(line, _)| format!("line {}: ", line + 1));
        let hint = "write one JSON object a line, or set the source's `format`";
        Err((format!("it is not JSON lines: {place}{error}"), hint.to_owned()))
    }

    /// Rows of the head that are samples, not names.
    pub(super) fn data_rows(&self, dialect: Dialect) -> u64 {
        (self.rows - usize::from(dialect.format == Format::Csv && dialect.header).min(self.rows)) as u64
    }

    /// Decoded bytes of the rows, estimated: 8 for every value, which a separator ends, and no fewer than the text has.
    pub(super) fn decoded_bytes(&self, dialect: Dialect) -> u64 {
        let separators =
            self.bytes.iter().filter(|byte| **byte == dialect.delimiter || **byte == b',').count();
        (8 * (separators + self.rows)).max(self.bytes.len()) as u64
    }
}

/// Finds where rows end: at a newline, for CSV only outside of quotes, which open at the start of a value (RFC 4180).
struct RowSplitter {
    delimiter: u8,
    quotes: bool,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    ValueStart,
    Plain,
    Quoted,
    QuoteInQuoted,
}

impl RowSplitter {
    fn new(dialect: Dialect) -> Self {
        Self { delimiter: dialect.delimiter, quotes: dialect.format == Format::Csv, state: State::ValueStart }
    }

    /// Takes the next byte.
    fn ends_row(&mut self, byte: u8) -> bool {
        let quoted = self.quotes && self.state == State::Quoted;
        let ends = byte == b'\n' && !quoted;
        self.state = match (self.state, byte) {
            (State::ValueStart | State::QuoteInQuoted, QUOTE) => State::Quoted,
            (State::Quoted, QUOTE) => State::QuoteInQuoted,
            (State::Quoted, _) => State::Quoted,
            (_, b'\n') => State::ValueStart,
            (_, byte) if byte == self.delimiter => State::ValueStart,
            _ => State::Plain,
        };
        if ends {
            self.state = State::ValueStart;
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    const CSV: Dialect = Dialect { format: Format::Csv, delimiter: b',', header: true };
    const JSON: Dialect = Dialect { format: Format::Json, delimiter: b',', header: true };

    /// The head of `text`, which comes in chunks of `size` bytes, and how many chunks were taken.
    fn head(text: &str, dialect: Dialect, size: usize) -> (Result<Head, Wrong>, usize) {
        let taken = std::cell::Cell::new(0);
        let chunks = text.as_bytes().chunks(size).map(|chunk| {
            taken.set(taken.get() + 1);
            Ok::<_, String>(bytes::Bytes::copy_from_slice(chunk))
        });
        let read = futures::executor::block_on(read_head(stream::iter(chunks), dialect));
        (read, taken.get())
    }

    fn infer(text: &str, dialect: Dialect) -> Result<String, Wrong> {
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
    fn no_more_is_read_than_the_first_rows_take() {
        let text: String = (0..20_000).map(|row| format!("{row},{row}\n")).collect();
        let (head, chunks) = head(&text, CSV, 100);
        let head = head.unwrap();
        assert_eq!((head.rows, head.data_rows(CSV)), (1001, 1000));
        assert!(chunks <= head.bytes.len() / 100 + 1, "{chunks} chunks for {} bytes", head.bytes.len());
        assert!(head.bytes.ends_with(b"1000,1000\n"));
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
    fn files_of_another_format_are_told() {
        for (text, dialect, part) in [
            ("", CSV, "not even a header"),
            ("{\"a\": 1}\n", CSV, "JSON lines"),
            ("a,b\n1,2,3\n", CSV, "it is not CSV"),
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
