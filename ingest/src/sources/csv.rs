//! Checks CSV before the engine reads it: verifies quotes, and handles rows with fewer or more values than columns.
//!
//! The engine's reader (the `csv-core` crate) accepts any text. A quote character within a text opens a quoted
//! value that ends at the next quote, possibly many rows later; the rows between silently become part of a value.
//! So every byte passes a [`Checker`] first. It finds rows and values by the same rules as the reader (RFC 4180; a
//! line ends with LF, CRLF or CR) and refuses rows that can be read in several ways. Complete rows are passed on
//! unchanged, except that a byte order mark is removed, and that [`Ragged`] rows are completed or left out.

use arrow::csv::reader::Format as CsvFormat;
use serde::{Deserialize, Serialize};

use crate::config::{Quote, Ragged};

/// The maximum size of a row in bytes. A longer row is assumed to be the rest of a file with an unclosed quote.
const ROW_BYTES: usize = 64 << 20;
/// The quote character that the engine gets for files without quotes: a byte that never occurs in UTF-8.
const NO_QUOTE: u8 = 0xff;
/// The byte order mark of UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Rules for checking and decoding a CSV file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CsvRules {
    pub(super) delimiter: u8,
    /// Whether the first row has the names of the columns.
    pub(super) header: bool,
    pub(super) quote: Quote,
    pub(super) escape: Option<u8>,
    pub(super) ragged: Ragged,
    /// The number of values per row. If `None`, the first row defines it.
    pub(super) columns: Option<usize>,
}

impl CsvRules {
    /// Returns the format of the engine's decoder.
    pub(super) fn format(&self) -> CsvFormat {
        let format = CsvFormat::default().with_header(self.header).with_delimiter(self.delimiter);
        let format = format.with_quote(self.quote.character().unwrap_or(NO_QUOTE));
        self.escape.into_iter().fold(format, CsvFormat::with_escape)
    }
}

/// A row that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(super) struct RowError {
    pub(super) message: String,
    pub(super) hint: String,
}

impl RowError {
    /// Returns the error for a row with bytes that are not UTF-8.
    pub(super) fn not_utf8(line: Option<u64>) -> Self {
        let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
        let hint = "convert the file to UTF-8, for example with `iconv -f ISO-8859-1 -t UTF-8`";
        Self { message: format!("{place}it has bytes that are not a text in UTF-8"), hint: hint.to_owned() }
    }
}

/// The position of the next byte within a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    ValueStart,
    Plain,
    Quoted,
    /// After the escape character in a quoted value.
    Escaped,
    /// After a quote in a quoted value: either the value ends, or the quote is the first of two.
    QuoteInQuoted,
}

/// Checks a CSV file that arrives in chunks.
#[derive(Debug)]
pub(super) struct Checker {
    rules: CsvRules,
    quote: Option<u8>,
    state: State,
    /// The bytes of an incomplete row.
    begun: Vec<u8>,
    /// Whether any bytes have arrived. A byte order mark is recognized only at the start.
    started: bool,
    columns: Option<usize>,
    /// The number of complete values in the current row.
    values: usize,
    /// The current line, counted from 1, and the lines in which the current row and the last quoted value began.
    line: u64,
    row_line: u64,
    quote_line: u64,
    /// Whether the last byte was a CR. Then a following LF belongs to it.
    after_return: bool,
    /// The number of delimiters in the current line, including those within quotes.
    line_delimiters: usize,
    /// Whether each line of the current row would be a row with the expected number of values if quotes were
    /// ignored.
    lines_are_rows: bool,
    /// The number of complete rows so far, including a header.
    rows: u64,
    skipped: u64,
}

impl Checker {
    pub(super) fn new(rules: CsvRules) -> Self {
        Self {
            rules,
            quote: rules.quote.character(),
            state: State::ValueStart,
            begun: Vec::new(),
            started: false,
            columns: rules.columns,
            values: 0,
            line: 1,
            row_line: 1,
            quote_line: 1,
            after_return: false,
            line_delimiters: 0,
            lines_are_rows: true,
            rows: 0,
            skipped: 0,
        }
    }

    /// Returns the number of rows that were passed on, including a header.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the line, counted from 1, at which the current incomplete row begins.
    pub(super) fn row_line(&self) -> u64 {
        self.row_line
    }

    /// Returns the number of rows that were left out.
    pub(super) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Takes the next bytes of the file and appends the rows that they complete to `out`.
    ///
    /// # Errors
    ///
    /// The first row that is ambiguous or does not have the expected number of values.
    pub(super) fn push(&mut self, chunk: &[u8], out: &mut Vec<u8>) -> Result<(), RowError> {
        let Some(chunk) = self.without_mark(chunk) else { return Ok(()) };
        // The number of bytes of the chunk that have been passed on.
        let mut passed = 0;
        for (at, byte) in chunk.iter().enumerate() {
            if !self.ends_row(*byte)? {
                continue;
            }
            self.pass_row(&chunk[passed..at], &chunk[at..=at], out)?;
            passed = at + 1;
        }
        self.begun.extend_from_slice(&chunk[passed..]);
        if self.begun.len() > ROW_BYTES {
            return Err(self.too_long());
        }
        Ok(())
    }

    /// Ends the file and appends a last row without a line end to `out`.
    ///
    /// # Errors
    ///
    /// The errors of [`push`](Self::push), and an unclosed quote.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), RowError> {
        if !self.started {
            // The file has fewer bytes than a byte order mark.
            self.started = true;
            let chunk = std::mem::take(&mut self.begun);
            self.push(&chunk, out)?;
        }
        if matches!(self.state, State::Quoted | State::Escaped) {
            return Err(self.unclosed());
        }
        if self.is_empty_row() {
            out.append(&mut self.begun);
            return Ok(());
        }
        self.pass_row(&[], &[], out)
    }

    /// Ends a row whose last bytes are `rest` and `line_end`, and appends it to `out` unless it is left out.
    fn pass_row(&mut self, rest: &[u8], line_end: &[u8], out: &mut Vec<u8>) -> Result<(), RowError> {
        let Some(missing) = self.end_row()? else {
            self.begun.clear();
            return Ok(());
        };
        out.append(&mut self.begun);
        out.extend_from_slice(rest);
        out.extend(std::iter::repeat_n(self.rules.delimiter, missing));
        out.extend_from_slice(line_end);
        Ok(())
    }

    /// Removes a byte order mark from the chunk; `None` until there are enough bytes to decide.
    fn without_mark<'a>(&mut self, chunk: &'a [u8]) -> Option<std::borrow::Cow<'a, [u8]>> {
        if self.started {
            return Some(chunk.into());
        }
        self.begun.extend_from_slice(chunk);
        if self.begun.len() < MARK.len() && MARK.starts_with(&self.begun) {
            return None;
        }
        self.started = true;
        let bytes = std::mem::take(&mut self.begun);
        let start = if bytes.starts_with(MARK) { MARK.len() } else { 0 };
        Some(bytes[start..].to_vec().into())
    }

    /// Takes the next byte. Returns whether it ends a row.
    fn ends_row(&mut self, byte: u8) -> Result<bool, RowError> {
        let ends_line = byte == b'\r' || (byte == b'\n' && !self.after_return);
        let pair = byte == b'\n' && self.after_return;
        self.after_return = byte == b'\r';
        self.line_delimiters += usize::from(byte == self.rules.delimiter);
        match self.state {
            State::Quoted if Some(byte) == self.rules.escape => self.state = State::Escaped,
            State::Quoted if Some(byte) == self.quote => self.state = State::QuoteInQuoted,
            State::Escaped => self.state = State::Quoted,
            State::Quoted => {}
            State::ValueStart if Some(byte) == self.quote => {
                self.state = State::Quoted;
                self.quote_line = self.line;
            }
            State::QuoteInQuoted if Some(byte) == self.quote => self.state = State::Quoted,
            _ if byte == self.rules.delimiter => {
                self.state = State::ValueStart;
                self.values += 1;
            }
            _ if byte == b'\n' || byte == b'\r' => {
                let is_row = !self.is_empty_row();
                self.state = State::ValueStart;
                if !is_row {
                    // The reader ignores an empty line and the second byte of CRLF.
                    self.line += u64::from(!pair);
                    self.row_line = self.line;
                    self.line_delimiters = 0;
                }
                return Ok(is_row);
            }
            State::QuoteInQuoted => return Err(self.text_after_quote()),
            _ if byte == NO_QUOTE && self.quote.is_none() => return Err(RowError::not_utf8(Some(self.line))),
            State::ValueStart | State::Plain => self.state = State::Plain,
        }
        if ends_line {
            self.end_line();
        }
        Ok(false)
    }

    /// Whether no bytes have arrived since the last row.
    fn is_empty_row(&self) -> bool {
        self.values == 0 && self.state == State::ValueStart
    }

    /// Ends a line, within a quoted value or together with its row.
    fn end_line(&mut self) {
        self.lines_are_rows &= self.columns == Some(self.line_delimiters + 1);
        self.line_delimiters = 0;
        self.line += 1;
    }

    /// Ends a row. Returns the number of empty values to add to it, or `None` if it is left out.
    fn end_row(&mut self) -> Result<Option<usize>, RowError> {
        let (values, first) = (self.values + 1, self.row_line);
        let lines = self.line - first + 1;
        self.end_line();
        let lines_are_rows = std::mem::replace(&mut self.lines_are_rows, true);
        self.row_line = self.line;
        self.values = 0;
        self.state = State::ValueStart;
        let columns = *self.columns.get_or_insert(values);
        if lines > 1 && lines_are_rows && self.rules.quote == Quote::Guarded {
            return Err(self.unclear(first, lines));
        }
        let missing = match self.rules.ragged {
            _ if values == columns => 0,
            Ragged::Skip => {
                self.skipped += 1;
                return Ok(None);
            }
            Ragged::Null if values < columns => columns - values,
            ragged => return Err(ragged_row(first, values, columns, ragged)),
        };
        self.rows += 1;
        Ok(Some(missing))
    }

    fn unclosed(&self) -> RowError {
        RowError {
            message: format!(
                "line {}: a quote opens a value here and is not closed before the end of the file",
                self.quote_line
            ),
            hint: self.quote_hint(),
        }
    }

    fn too_long(&self) -> RowError {
        let message =
            format!("line {}: a row of more than {} MiB begins here", self.row_line, ROW_BYTES >> 20);
        let hint = "the file has no line ends, is of another format, or has a quote that is not closed: correct it, \
                    or set `format` or `quote`";
        RowError { message, hint: hint.to_owned() }
    }

    fn text_after_quote(&self) -> RowError {
        let opened = match self.quote_line == self.line {
            true => String::new(),
            false => format!(", and the value began in line {}", self.quote_line),
        };
        RowError {
            message: format!(
                "line {}: a quote closes a value here, but more text follows{opened}",
                self.line
            ),
            hint: self.quote_hint(),
        }
    }

    fn unclear(&self, first: u64, lines: u64) -> RowError {
        let last = first + lines - 1;
        RowError {
            message: format!(
                "lines {first} to {last}: with their quotes they are one row, but without them they are {lines} rows"
            ),
            hint:
                "set the source's `quote = \"none\"` if quotes are part of the texts, or `quote = '\"'` if \
                   the quoted value has line ends in it"
                    .to_owned(),
        }
    }

    fn quote_hint(&self) -> String {
        "set the source's `quote = \"none\"` if quotes are part of the texts, `quote` or `escape` if the file has \
         other ones, or correct the line (a quote within a quoted value is written twice)"
            .to_owned()
    }
}

fn ragged_row(line: u64, values: usize, columns: usize, ragged: Ragged) -> RowError {
    let hint = match ragged {
        Ragged::Null => "correct the line, or set the source's `ragged = \"skip\"` to leave such rows out",
        _ if values < columns => {
            "correct the line, or set the source's `ragged = \"null\"` (missing values are null) or \
             `ragged = \"skip\"` (such rows are left out and counted)"
        }
        _ => {
            "correct the line, or set the source's `delimiter`, `quote`, or `ragged = \"skip\"` (such rows are left out \
             and counted)"
        }
    };
    let plural = if values == 1 { "" } else { "s" };
    let message = format!("line {line}: the row has {values} value{plural}, but there are {columns} columns");
    RowError { message, hint: hint.to_owned() }
}

#[cfg(test)]
mod tests {
    use arrow::csv::reader::Format;
    use proptest::prelude::*;

    use super::*;

    const RULES: CsvRules = CsvRules {
        delimiter: b',',
        header: true,
        quote: Quote::Guarded,
        escape: None,
        ragged: Ragged::Error,
        columns: None,
    };

    /// Checks a file in chunks of `size` bytes. Returns the text that is passed on, and the number of rows left
    /// out.
    fn check(text: &str, rules: CsvRules, size: usize) -> Result<(String, u64), RowError> {
        let (mut checker, mut out) = (Checker::new(rules), Vec::new());
        for chunk in text.as_bytes().chunks(size) {
            checker.push(chunk, &mut out)?;
        }
        checker.finish(&mut out)?;
        Ok((String::from_utf8(out).unwrap(), checker.skipped()))
    }

    /// Checks a file with every chunk size, which must not change the result.
    fn checked(text: &str, rules: CsvRules) -> Result<(String, u64), RowError> {
        let whole = check(text, rules, text.len().max(1));
        for size in 1..text.len() {
            assert_eq!(check(text, rules, size), whole, "chunks of {size} bytes of {text:?}");
        }
        whole
    }

    fn passes(text: &str, rules: CsvRules) -> String {
        checked(text, rules).unwrap().0
    }

    fn refused(text: &str, rules: CsvRules) -> String {
        let error = checked(text, rules).unwrap_err();
        format!("{}; {}", error.message, error.hint)
    }

    #[test]
    fn unambiguous_text_is_not_changed() {
        for text in [
            "",
            "a,b\n",
            "a,b\n1,2\n3,4",
            "a,b\r\n1,2\r\n\r\n3,\"x\r\ny\"\r\n",
            "a,b\r1,2\r3,4\r",
            "a,b\n\n1,\"x\ny\"\n\n",
            "a,b\n1,\"say \"\"hi\"\", please\"\n",
            "a,b\n5\" screen,7\" screen\n",
            "a,b\n\"\",\"\"\"\"\n",
        ] {
            assert_eq!(passes(text, RULES), text);
        }
        assert_eq!(passes("\u{feff}a,b\n1,2\n", RULES), "a,b\n1,2\n");
        assert_eq!(passes("\u{feff}", RULES), "");
        assert_eq!(passes("é", RULES), "é");
    }

    #[test]
    fn ambiguous_quotes_are_refused() {
        for (text, message) in [
            ("a,b\n1,2\n\"x,y\n3,4\n", "line 3: a quote opens a value here and is not closed"),
            ("a,b\n1,\"x\"y\n", "line 2: a quote closes a value here, but more text follows;"),
            (
                "a,b\n1,\"x\n2,\"y\n",
                "line 3: a quote closes a value here, but more text follows, and the value began in line 2",
            ),
            ("a,b\n\"x,1\nmore,2\ny\",3\n", "lines 2 to 4: with their quotes they are one row"),
            (
                "a,b\n1,\"x\n2,y\"\n3,4\n",
                "lines 2 to 3: with their quotes they are one row, but without them they are 2 rows",
            ),
        ] {
            let error = refused(text, RULES);
            assert!(error.starts_with(message) && error.contains("quote = \"none\""), "{text:?}: {error}");
        }
        let given = CsvRules { quote: Quote::Character(b'"'), ..RULES };
        let text = "a,b\n1,\"x\n2,y\"\n3,4\n";
        assert_eq!(passes(text, given), text, "the configuration says that these are quotes");
    }

    #[test]
    fn quotes_may_be_text_and_escapes_are_known() {
        let none = CsvRules { quote: Quote::None, delimiter: b'\t', ..RULES };
        let text = "a\tb\n\"Great\t5\n\"Bad\" film\t\"\n";
        assert_eq!(passes(text, none), text);
        let error = check_bytes(b"a\tb\n\xff\t1\n", none).unwrap_err();
        assert!(error.message.starts_with("line 2: it has bytes"), "{error}");
        let escaped = CsvRules { escape: Some(b'\\'), ..RULES };
        let text = "a,b\n1,\"x \\\"y\\\", \\\\\"\n";
        assert_eq!(passes(text, escaped), text);
        assert!(refused(text, RULES).starts_with("line 2: a quote closes a value here"));
        let single = CsvRules { quote: Quote::Character(b'\''), ..RULES };
        assert_eq!(passes("a,b\n'x,y',\"\n", single), "a,b\n'x,y',\"\n");
    }

    fn check_bytes(bytes: &[u8], rules: CsvRules) -> Result<Vec<u8>, RowError> {
        let (mut checker, mut out) = (Checker::new(rules), Vec::new());
        checker.push(bytes, &mut out)?;
        checker.finish(&mut out)?;
        Ok(out)
    }

    #[test]
    fn ragged_rows_are_refused_filled_or_left_out() {
        let text = "a,b,c\n1,2,3\n4\n5,\"x\ny\"\r\n6,7,8\n9,10";
        assert!(refused(text, RULES).starts_with("line 3: the row has 1 value, but there are 3 columns"));
        let null = CsvRules { ragged: Ragged::Null, ..RULES };
        assert_eq!(passes(text, null), "a,b,c\n1,2,3\n4,,\n5,\"x\ny\",\r\n6,7,8\n9,10,");
        let skip = CsvRules { ragged: Ragged::Skip, ..RULES };
        assert_eq!(checked(text, skip).unwrap(), ("a,b,c\n1,2,3\n\n6,7,8\n".to_owned(), 3));
        let more = "a,b\n1,2\n3,4,5\n6,7\n";
        assert!(refused(more, null).starts_with("line 3: the row has 3 values, but there are 2 columns"));
        assert_eq!(checked(more, skip).unwrap(), ("a,b\n1,2\n6,7\n".to_owned(), 1));
        let bare = CsvRules { columns: Some(2), ..skip };
        assert_eq!(checked("1\n2,3\n", bare).unwrap(), ("2,3\n".to_owned(), 1));
    }

    #[test]
    fn a_row_without_end_is_refused() {
        let (mut checker, mut out) = (Checker::new(RULES), Vec::new());
        checker.push(b"a,b\n1,2\n\"", &mut out).unwrap();
        let chunk = vec![b'x'; 8 << 20];
        let error = (0..9).find_map(|_| checker.push(&chunk, &mut out).err()).unwrap();
        assert!(error.message.starts_with("line 3: a row of more than 64 MiB"), "{error}");
    }

    /// Returns the rows that Arrow's reader finds.
    fn read(text: &str, columns: usize) -> Vec<Vec<String>> {
        let fields: Vec<_> = (0..columns).map(|at| format!("c{at}")).collect();
        let fields = fields
            .iter()
            .map(|name| arrow::datatypes::Field::new(name, arrow::datatypes::DataType::Utf8, true));
        let schema = std::sync::Arc::new(arrow::datatypes::Schema::new(fields.collect::<Vec<_>>()));
        let reader = arrow::csv::ReaderBuilder::new(schema).with_format(Format::default());
        let batches = reader.build(text.as_bytes()).unwrap();
        let rows = batches.flat_map(|batch| {
            let batch = batch.unwrap();
            let row = |row: usize| {
                let value = |column: &arrow::array::ArrayRef| {
                    use arrow::array::AsArray;
                    column.as_string::<i32>().value(row).to_owned()
                };
                batch.columns().iter().map(value).collect()
            };
            (0..batch.num_rows()).map(row).collect::<Vec<_>>()
        });
        rows.collect()
    }

    proptest! {
        /// Rows written with quotes are passed on, and the reader returns the original values.
        #[test]
        fn written_rows_are_read_again(
            rows in prop::collection::vec(prop::collection::vec("[ab,\"\n\r]{0,4}", 3), 1..8),
            size in 1..20_usize,
        ) {
            let value = |value: &String| format!("\"{}\"", value.replace('"', "\"\""));
            let line = |row: &Vec<String>| row.iter().map(value).collect::<Vec<_>>().join(",") + "\n";
            let text: String = rows.iter().map(line).collect();
            let given = CsvRules { quote: Quote::Character(b'"'), columns: Some(3), ..RULES };
            let (passed, skipped) = check(&text, given, size).unwrap();
            prop_assert_eq!((&passed, skipped), (&text, 0));
            prop_assert_eq!(read(&passed, 3), rows);
        }

        /// If a text passes the check, the reader finds the same number of rows as the checker.
        #[test]
        fn the_reader_finds_the_same_rows(text in "[a,\"\n\r]{0,24}", columns in 1..4_usize) {
            let rules = CsvRules { columns: Some(columns), quote: Quote::Character(b'"'), ..RULES };
            let (mut checker, mut out) = (Checker::new(rules), Vec::new());
            let passed = checker.push(text.as_bytes(), &mut out).and_then(|()| checker.finish(&mut out));
            if passed.is_ok() {
                let rows = read(std::str::from_utf8(&out).unwrap(), columns);
                prop_assert_eq!(rows.len() as u64, checker.rows());
            }
        }
    }
}
