//! Reads files with lists of users: text with one key per line, CSV or Parquet.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::csv::ReaderBuilder;
use arrow::csv::reader::Format;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use bytes::Bytes;
use onefold_base::fault::{Fault, Kind};
use onefold_base::process::catch_panic;
use onefold_datasets::Error;
use onefold_datasets::forget::UserKeys;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// Reads a list of users. CSV and Parquet files have named columns. In any other file, each line that is not empty is a
/// key.
pub(super) fn read_users(path: &Path) -> anyhow::Result<UserKeys> {
    const HINT: &str =
        "give a text file with one user a line, or a CSV file with a header, or a Parquet file";
    let bytes = fs_err::read(path);
    let bytes =
        bytes.map_err(|error| Error::from(Fault::new(Kind::Storage, error.to_string()).hint(HINT)))?;
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    let keys = match ending.as_deref().and_then(|ending| ending.to_str()) {
        Some("parquet") => catch_panic(|| of_parquet(bytes)),
        Some("csv") => of_csv(&bytes).map_err(|error| error.to_string()),
        _ => of_lines(&bytes),
    };
    let wrong = |message: String| Fault::of_file(Kind::Data, path, message).hint(HINT);
    let keys = keys.map_err(|message| Error::from(wrong(message)))?;
    if keys.rows.is_empty() {
        return Err(Error::from(wrong("it names no user".to_owned())).into());
    }
    Ok(keys)
}

fn of_lines(bytes: &[u8]) -> Result<UserKeys, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let lines = text.trim_start_matches('\u{feff}').lines().filter(|line| !line.is_empty());
    Ok(UserKeys { columns: None, rows: lines.map(|line| vec![Some(line.to_owned())]).collect() })
}

fn of_csv(bytes: &[u8]) -> Result<UserKeys, ArrowError> {
    let (header, _) = Format::default().with_header(true).infer_schema(bytes, Some(0))?;
    // Read all columns as text, which keeps leading zeros.
    let fields: Vec<Field> =
        header.fields().iter().map(|field| Field::new(field.name(), DataType::Utf8, true)).collect();
    let reader = ReaderBuilder::new(Arc::new(Schema::new(fields))).with_header(true).build(bytes)?;
    of_batches(&header, reader)
}

fn of_parquet(bytes: Vec<u8>) -> Result<UserKeys, String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(Bytes::from(bytes));
    let builder = builder.map_err(|error| error.to_string())?;
    let schema = Arc::clone(builder.schema());
    let reader = builder.build().map_err(|error| error.to_string())?;
    of_batches(&schema, reader).map_err(|error| error.to_string())
}

fn of_batches(
    schema: &Schema,
    batches: impl Iterator<Item = Result<RecordBatch, ArrowError>>,
) -> Result<UserKeys, ArrowError> {
    let columns = schema.fields().iter().map(|field| field.name().clone()).collect();
    let mut rows = Vec::new();
    for batch in batches {
        let batch = batch?;
        let texts = batch.columns().iter().map(|column| cast(column, &DataType::Utf8));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        rows.extend((0..batch.num_rows()).map(|row| {
            let text = |column: &ArrayRef| {
                let texts = column.as_string::<i32>();
                texts.is_valid(row).then(|| texts.value(row).to_owned())
            };
            texts.iter().map(text).collect::<Vec<Option<String>>>()
        }));
    }
    Ok(UserKeys { columns: Some(columns), rows })
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, StringArray};
    use parquet::arrow::ArrowWriter;

    use super::*;

    fn read(name: &str, bytes: &[u8]) -> anyhow::Result<UserKeys> {
        let directory = tempfile::tempdir().unwrap();
        fs_err::write(directory.path().join(name), bytes).unwrap();
        read_users(&directory.path().join(name))
    }

    fn row(values: &[&str]) -> Vec<Option<String>> {
        values.iter().map(|value| Some((*value).to_owned())).collect()
    }

    #[test]
    fn lists_of_users_are_texts_in_every_form() {
        let lines = read("users.txt", "007\r\n\nZürich, 8\n".as_bytes()).unwrap();
        assert_eq!(lines, UserKeys { columns: None, rows: vec![row(&["007"]), row(&["Zürich, 8"])] });
        let csv = read("users.CSV", b"user,country\n007,\n8,\"a,b\"\n").unwrap();
        assert_eq!(csv.columns, Some(vec!["user".to_owned(), "country".to_owned()]));
        assert_eq!(csv.rows, [vec![Some("007".to_owned()), None], row(&["8", "a,b"])]);
        let users: ArrayRef = Arc::new(Int64Array::from(vec![17, -4]));
        let names: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = RecordBatch::try_from_iter([("user", users), ("name", names)]).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        let parquet = read("users.parquet", &writer.into_inner().unwrap()).unwrap();
        assert_eq!(parquet.rows, [row(&["17", "a"]), row(&["-4", "b"])]);
    }

    #[test]
    fn what_is_no_list_of_users_is_refused() {
        let cases: [(&str, &[u8]); 4] =
            [("a.txt", b"\xff"), ("a.parquet", b"17"), ("a.csv", b"user\n"), ("b.txt", b"\n")];
        for (name, bytes) in cases {
            let error = read(name, bytes).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("hint: give a text file"), "{error}");
        }
    }
}
