//! Reading and writing of the crate's JSON files, with a common version check and common error messages.

use std::io::{self, ErrorKind, Write};
use std::path::Path;

use onefold_base::fault::{option, text};
use onefold_base::versioned::parse_json;
use onefold_storage::commit;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// A kind of file.
pub(crate) struct FileKind {
    /// The kind as messages name it, such as `a plan`.
    pub(crate) name: &'static str,
    /// The only supported format version.
    pub(crate) version: u32,
    /// The hint that says how to get a file of this kind.
    pub(crate) hint: &'static str,
}

/// Reads the bytes of the file at `path`.
///
/// # Errors
///
/// [`Error::Fault`] with `hint` if the file is missing; [`Error::Io`] if it cannot be read.
pub(crate) fn read(path: &Path, hint: &str) -> Result<Vec<u8>> {
    match fs_err::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Error::file(path, "there is no such file", hint))
        }
        other => Ok(other?),
    }
}

/// Reads the file at `path`, and rejects every version except that of `kind`.
///
/// # Errors
///
/// The errors of [`read`]; [`Error::Fault`] if the file is not JSON, is of another version or lacks a field.
pub(crate) fn load<T: DeserializeOwned>(path: &Path, kind: &FileKind) -> Result<T> {
    let bytes = read(path, kind.hint)?;
    let wrong = |message| Error::file(path, of_another_kind(&bytes, kind.name).unwrap_or(message), kind.hint);
    parse_json(&bytes, kind.version).map_err(wrong)
}

/// Returns the message for a JSON file that is of another kind than `expected`, or `None` if its kind is not known.
pub(crate) fn of_another_kind(bytes: &[u8], expected: &str) -> Option<String> {
    let fields: Map<String, Value> = serde_json::from_slice(bytes).ok()?;
    // A field that files of a kind have, and no file of a kind after it.
    let kinds = [
        ("search", PLAN),
        ("ranks_per_node", TOPOLOGY),
        ("kernel_version", MODEL),
        ("world_size", "a plan for TorchRec"),
        ("format_version", TABLES),
        ("tables", TORCHREC_TABLES),
    ];
    let (_, found) = kinds.into_iter().find(|(field, _)| fields.contains_key(*field))?;
    let is_known = found != TABLES || fields.contains_key("tables");
    (is_known && found != expected).then(|| format!("this is {found}, not {expected}"))
}

pub(crate) const PLAN: &str = "a plan";
pub(crate) const TOPOLOGY: &str = "a topology";
pub(crate) const MODEL: &str = "a cost model";
pub(crate) const TABLES: &str = "a file of tables";
pub(crate) const TORCHREC_TABLES: &str = "a file of tables with TorchRec's fields";

/// Replaces the file at `path` atomically with `value` as indented JSON.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written. The old file then remains unchanged.
pub(crate) fn store(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).map_err(std::io::Error::other)?;
    text.push('\n');
    Ok(commit::write_atomically(path, text.as_bytes())?)
}

/// Like [`store`], but writes every array on one line, for arrays of thousands of numbers.
///
/// # Errors
///
/// See [`store`].
pub(crate) fn store_wide(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, WideArrays::default());
    value.serialize(&mut serializer).map_err(std::io::Error::other)?;
    text.push(b'\n');
    Ok(commit::write_atomically(path, &text)?)
}

/// A JSON formatter that indents objects and writes arrays without line breaks.
#[derive(Default)]
struct WideArrays(PrettyFormatter<'static>);

impl Formatter for WideArrays {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
    }
}

/// Checks, before any work begins, that a file can be written at `path`.
///
/// # Errors
///
/// The errors of [`check_output`](commit::check_output), and an error if the file exists and `overwrite` is false.
pub fn claim_output(path: &Path, overwrite: bool) -> Result<()> {
    commit::check_output(path)?;
    if path.exists() && !overwrite {
        let hint = text!["choose another file, or replace it with ", option("overwrite")];
        return Err(onefold_storage::Error::exists(path, hint).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wide_arrays_are_on_one_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("wide.json");
        let value = json!({"a": [1.5, 2.0, []], "b": {"c": [{"d": 1}, {}], "e": {}}, "f": "g"});
        store_wide(&path, &value).unwrap();
        let text = fs_err::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            "{\n  \"a\": [1.5, 2.0, []],\n  \"b\": {\n    \"c\": [{\n      \"d\": 1\n    }, {}],\n    \"e\": {}\n  },\n  \"f\": \"g\"\n}\n"
        );
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn a_file_of_another_kind_is_named() {
        let topology = br#"{"format_version": 1, "ranks": 2, "ranks_per_node": 2}"#;
        let named = |expected| of_another_kind(topology, expected);
        assert_eq!(named(TABLES).unwrap(), "this is a topology, not a file of tables");
        assert_eq!(named(TOPOLOGY), None);
        let of_torchrec = br#"{"global_batch_size": 8, "tables": []}"#;
        assert_eq!(
            of_another_kind(of_torchrec, TABLES).unwrap(),
            "this is a file of tables with TorchRec's fields, not a file of tables"
        );
        let unknown: [&[u8]; 3] = [b"[]", b"{", br#"{"format_version": 2, "size": 3}"#];
        assert!(unknown.into_iter().all(|bytes| of_another_kind(bytes, PLAN).is_none()));
    }
}
