//! Merges the schemas of all files of a source: widens types if no value is lost, and refuses all other
//! differences.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, SchemaRef};

use super::files::FileError;
use crate::config::{Format, MissingColumns, SourceConfig};
use crate::error::MessageAndHint;
use crate::ids::item_type;

/// The columns of a file.
#[derive(Debug)]
pub(super) struct FileColumns {
    pub(super) name: PathBuf,
    pub(super) schema: SchemaRef,
    /// The names of its `name=value` folders.
    pub(super) folders: Vec<String>,
}

/// The reasons why columns cannot be read, by file and column: the file lacks the column, or has it with a type
/// that does not fit. It is an error only if the query reads the column.
pub(super) type Refused = BTreeMap<PathBuf, BTreeMap<String, MessageAndHint>>;

/// Returns the merged columns of all files, in the order of first appearance, and those that cannot be read from
/// some files. Metadata are left out.
///
/// # Errors
///
/// The first file, by name, that has two columns of the same name, or lacks a column that the configuration
/// declares.
pub(super) fn merge(
    source: &str,
    config: &SourceConfig,
    format: Format,
    files: &[FileColumns],
) -> Result<(SchemaRef, Refused), FileError> {
    let mut refused = Refused::new();
    let mut refuse = |(file, error): FileError, column: &str| {
        refused.entry(file).or_default().insert(column.to_owned(), error);
    };
    let mut merged: Vec<(Field, &Path)> = Vec::new();
    for file in files {
        check_names(file)?;
        for field in file.schema.fields() {
            let given = config.schema.iter().find(|(name, _)| name == field.name());
            let data_type = given.map_or_else(|| plain(field.data_type()), |(_, given)| given.clone());
            let Some((known, first)) = merged.iter_mut().find(|(known, _)| known.name() == field.name())
            else {
                merged.push((Field::new(field.name(), data_type, field.is_nullable()), &file.name));
                continue;
            };
            let Some(wide) = widened(known.data_type(), &data_type, format) else {
                let error = changed_type(source, format, known, &data_type, first, &file.name);
                refuse(error, field.name());
                known.set_nullable(true);
                continue;
            };
            // The next message should name a file in which the column has a type.
            if known.data_type().is_null() {
                *first = &file.name;
            }
            *known = Field::new(known.name(), wide, known.is_nullable() || field.is_nullable());
        }
    }
    for (field, first) in &mut merged {
        let given = config.schema.iter().any(|(name, _)| name == field.name());
        // A JSON object may omit null values, so a declared column may be missing in the first rows.
        let may_be_null = config.missing_columns == MissingColumns::Null || (format == Format::Json && given);
        let name = field.name().clone();
        for file in files.iter().filter(|file| file.schema.field_with_name(&name).is_err()) {
            field.set_nullable(true);
            // A null would hide the value of the folder.
            if file.folders.contains(&name) {
                refuse(only_in_folder(&name, first, file), &name);
            } else if !may_be_null {
                refuse(missing(source, &name, first, file), &name);
            }
        }
    }
    let mut fields: Vec<Field> = merged.into_iter().map(|(field, _)| field).collect();
    add_declared(source, config, format, files, &mut fields)?;
    let typed = fields.into_iter().map(|field| {
        let data_type = without_nulls(field.data_type());
        field.with_data_type(data_type)
    });
    Ok((Arc::new(Schema::new(typed.collect::<Vec<_>>())), refused))
}

/// Adds columns of `schema` that do not occur in the first rows of any file.
fn add_declared(
    source: &str,
    config: &SourceConfig,
    format: Format,
    files: &[FileColumns],
    fields: &mut Vec<Field>,
) -> Result<(), FileError> {
    for (name, data_type) in &config.schema {
        if fields.iter().any(|field| field.name() == name) {
            continue;
        }
        if format == Format::Csv
            && config.missing_columns == MissingColumns::Error
            && let Some(file) = files.first()
        {
            // If the file has no header, its first row was taken for the column names.
            let is_known = |(name, _): &(String, DataType)| fields.iter().any(|field| field.name() == name);
            let names = file.schema.fields().iter().map(|field| format!("`{}`", field.name()));
            let hint = match config.header && !config.schema.iter().any(is_known) {
                true => format!(
                    "its first row names {}; set `header = false` under `[sources].{source}` if these are values, or else correct `schema`",
                    names.collect::<Vec<_>>().join(", ")
                ),
                false => format!(
                    "correct `schema` under `[sources].{source}`, or set `missing_columns = \"null\"`"
                ),
            };
            return Err((file.name.clone(), (format!("it has no column `{name}`"), hint)));
        }
        fields.push(Field::new(name, data_type.clone(), true));
    }
    Ok(())
}

fn check_names(file: &FileColumns) -> Result<(), FileError> {
    let mut names: Vec<&str> = file.schema.fields().iter().map(|field| field.name().as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => {
            let hint = "write the file again with a name for each column, or set `header` if it lacks one";
            Err((file.name.clone(), (format!("it has two columns `{}`", pair[0]), hint.to_owned())))
        }
    }
}

fn missing(source: &str, column: &str, has: &Path, lacks: &FileColumns) -> FileError {
    let message = format!("the column `{column}` is missing, which `{}` has", has.display());
    let fields = lacks.schema.fields().iter();
    let alike = fields.map(|field| field.name()).find(|name| name.eq_ignore_ascii_case(column));
    let hint = match alike {
        Some(alike) => format!("it has a column `{alike}`: write the file again with one name for both"),
        None => format!(
            "write the file again with the column, or set `missing_columns = \"null\"` under `[sources].{source}`"
        ),
    };
    (lacks.name.clone(), (message, hint))
}

fn only_in_folder(column: &str, has: &Path, lacks: &FileColumns) -> FileError {
    let message = format!(
        "its folder `{column}=…` has a value of the column `{column}`, which is in the file `{}` itself",
        has.display()
    );
    let hint = "write the files again, all with the column or all without it, or make two sources";
    (lacks.name.clone(), (message, hint.to_owned()))
}

fn changed_type(
    source: &str,
    format: Format,
    known: &Field,
    found: &DataType,
    first: &Path,
    file: &Path,
) -> FileError {
    let column = known.name();
    let message =
        format!("the column `{column}` is {found} here and {} in `{}`", known.data_type(), first.display());
    let hint = match format {
        Format::Parquet => format!(
            "write the files again with one type, or make two sources of `{source}` and `CAST` the column in the query"
        ),
        _ => format!(
            "give the column's type under `[sources].{source}`, as `schema = {{ {column} = \"VARCHAR\" }}`"
        ),
    };
    (file.to_owned(), (message, hint))
}

/// Returns `data_type` without dictionaries and runs, because batches of several files can have more values than
/// the keys of one file allow.
fn plain(data_type: &DataType) -> DataType {
    with_types(data_type, &|data_type| match data_type {
        DataType::Dictionary(_, values) => plain(values),
        DataType::RunEndEncoded(_, values) => plain(values.data_type()),
        other => other.clone(),
    })
}

/// Returns `data_type` with other types in place of its values, or of the values of its items and fields.
pub(super) fn with_types(data_type: &DataType, replaced: &dyn Fn(&DataType) -> DataType) -> DataType {
    let inner = |field: &FieldRef| {
        Arc::new(Field::clone(field).with_data_type(with_types(field.data_type(), replaced)))
    };
    match data_type {
        DataType::List(item) => DataType::List(inner(item)),
        DataType::LargeList(item) => DataType::LargeList(inner(item)),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(inner).collect()),
        values => replaced(values),
    }
}

/// Returns the narrowest type that represents every value of both types; `None` if none represents them exactly.
/// The types of text files are only inferred, so more combinations are allowed for them.
fn widened(a: &DataType, b: &DataType, format: Format) -> Option<DataType> {
    use DataType::{
        Binary, BinaryView, Date32, Float64, Int64, LargeBinary, LargeList, LargeUtf8, List, Null, Struct,
        Timestamp, UInt64, Utf8, Utf8View,
    };
    let text = format != Format::Parquet;
    if let (Some(ours), Some(theirs)) = (item_type(a), item_type(b))
        && a != b
    {
        let item = Arc::new(Field::new_list_field(widened(ours, theirs, format)?, true));
        let is_large = |list: &DataType| matches!(list, LargeList(_) | DataType::LargeListView(_));
        return Some(if is_large(a) || is_large(b) { LargeList(item) } else { List(item) });
    }
    match (a, b) {
        _ if a == b => Some(a.clone()),
        (Null, other) | (other, Null) => Some(other.clone()),
        (Utf8 | LargeUtf8 | Utf8View, Utf8 | LargeUtf8 | Utf8View) => Some(LargeUtf8),
        (Binary | LargeBinary | BinaryView, Binary | LargeBinary | BinaryView) => Some(LargeBinary),
        _ if a.is_signed_integer() && b.is_signed_integer() => wider(a, b),
        _ if a.is_unsigned_integer() && b.is_unsigned_integer() => wider(a, b),
        _ if a.is_floating() && b.is_floating() => wider(a, b),
        _ if a.is_integer() && b.is_integer() && *a != UInt64 && *b != UInt64 => Some(Int64),
        (Int64, Float64) | (Float64, Int64) if text => Some(Float64),
        (Date32, Timestamp(..)) if text => Some(b.clone()),
        (Timestamp(..), Date32) if text => Some(a.clone()),
        // A time that the finer unit cannot represent is an error when it is read.
        (Timestamp(a, zone), Timestamp(b, other)) if is_one_zone(zone.as_deref(), other.as_deref()) => {
            Some(Timestamp(*a.max(b), zone.clone()))
        }
        _ if a.equals_datatype(b) => Some(a.clone()),
        (Struct(a), Struct(b)) => united(a, b, format),
        // Text represents all values of text files.
        _ if text && !a.is_nested() && !b.is_nested() => Some(Utf8),
        _ => None,
    }
}

/// Whether times with these zones are equal instants with equal display. A time without a zone is local.
fn is_one_zone(a: Option<&str>, b: Option<&str>) -> bool {
    let is_utc = |zone: &str| ["UTC", "Z", "+00:00", "Etc/UTC"].contains(&zone);
    a == b || a.zip(b).is_some_and(|(a, b)| is_utc(a) && is_utc(b))
}

/// Returns the union of the fields of two objects.
fn united(a: &Fields, b: &Fields, format: Format) -> Option<DataType> {
    let mut fields: Vec<Field> = a.iter().map(|field| Field::clone(field)).collect();
    for field in b {
        match fields.iter_mut().find(|known| known.name() == field.name()) {
            Some(known) => known.set_data_type(widened(known.data_type(), field.data_type(), format)?),
            None => fields.push(Field::clone(field)),
        }
    }
    Some(DataType::Struct(fields.into_iter().map(|field| field.with_nullable(true)).collect()))
}

fn wider(a: &DataType, b: &DataType) -> Option<DataType> {
    let width = |data_type: &DataType| data_type.primitive_width();
    Some(if width(a) >= width(b) { a.clone() } else { b.clone() })
}

/// Replaces the null type with text. Then a value of another type in later rows is an error, and no value is lost.
fn without_nulls(data_type: &DataType) -> DataType {
    with_types(data_type, &|values| if values.is_null() { DataType::Utf8 } else { values.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, columns: &[(&str, &str)]) -> FileColumns {
        let fields = columns.iter().map(|(name, kind)| Field::new(*name, kind.parse().unwrap(), false));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        FileColumns { name: name.into(), schema, folders: Vec::new() }
    }

    fn merged(config: &SourceConfig, format: Format, files: &[FileColumns]) -> Result<String, String> {
        match merge("logs", config, format, files) {
            Ok((_, refused)) if !refused.is_empty() => {
                let (path, columns) = refused.first_key_value().unwrap();
                let (message, hint) = columns.first_key_value().unwrap().1;
                Err(format!("{}: {message}: {hint}", path.display()))
            }
            Ok((schema, _)) => {
                let show = |field: &Arc<Field>| {
                    let null = if field.is_nullable() { "?" } else { "" };
                    format!("{} {}{null}", field.name(), field.data_type())
                };
                Ok(schema.fields().iter().map(show).collect::<Vec<_>>().join(", "))
            }
            Err((path, (message, hint))) => Err(format!("{}: {message}: {hint}", path.display())),
        }
    }

    fn two(a: &str, b: &str, format: Format) -> Result<String, String> {
        let files = [file("a", &[("x", a)]), file("b", &[("x", b)])];
        let (there, back) = (merged(&SourceConfig::new("p"), format, &files), {
            let files = [file("a", &[("x", b)]), file("b", &[("x", a)])];
            merged(&SourceConfig::new("p"), format, &files)
        });
        assert_eq!(there.is_ok(), back.is_ok(), "{a} and {b} must not depend on the order");
        if there.is_ok() {
            assert_eq!(there, back);
        }
        there
    }

    #[test]
    fn a_column_that_only_the_folder_of_a_file_has_is_not_null() {
        let with = file("region=1/a", &[("x", "Int64"), ("region", "Int64")]);
        let without = file("region=2/b", &[("x", "Int64")]);
        let files = [with, FileColumns { folders: vec!["region".to_owned()], ..without }];
        for missing_columns in [MissingColumns::Null, MissingColumns::Error] {
            let config = SourceConfig { missing_columns, ..SourceConfig::new("p") };
            let error = merged(&config, Format::Parquet, &files).unwrap_err();
            assert!(error.starts_with("region=2/b: its folder `region=…` has a value"), "{error}");
        }
    }

    #[test]
    fn numbers_widen_where_nothing_is_lost() {
        for (a, b, wide) in [
            ("Int32", "Int64", "Int64"),
            ("Int8", "Int16", "Int16"),
            ("UInt32", "Int8", "Int64"),
            ("UInt8", "UInt64", "UInt64"),
            ("Float32", "Float64", "Float64"),
            ("List(Int32)", "List(Int64)", "List(Int64)"),
            ("LargeList(Int32)", "List(Int64)", "LargeList(Int64)"),
            ("Utf8", "LargeUtf8", "LargeUtf8"),
            ("Dictionary(Int32, Utf8)", "Utf8", "Utf8"),
            ("Dictionary(Int8, Utf8)", "Dictionary(Int8, Utf8)", "Utf8"),
            ("Dictionary(Int8, Utf8)", "Dictionary(Int16, LargeUtf8)", "LargeUtf8"),
            ("List(Null)", "List(Int64)", "List(Int64)"),
            ("List(Int64)", "List(Int64, field: 'element')", "List(Int64)"),
            ("FixedSizeList(2 x Int64)", "List(Int32)", "List(Int64)"),
            ("List(Dictionary(Int8, Utf8))", "LargeList(Utf8)", "LargeList(Utf8)"),
            ("Timestamp(ms)", "Timestamp(µs)", "Timestamp(µs)"),
            ("Timestamp(ns)", "Timestamp(µs)", "Timestamp(ns)"),
            ("Timestamp(ms, \"UTC\")", "Timestamp(µs, \"UTC\")", "Timestamp(µs, \"UTC\")"),
        ] {
            assert_eq!(two(a, b, Format::Parquet).unwrap(), format!("x {wide}"));
        }
        for (a, b) in [
            ("Int64", "Float64"),
            ("UInt64", "Int64"),
            ("Utf8", "Float64"),
            ("Int64", "List(Int64)"),
            ("List(Int64)", "List(Utf8)"),
            ("Timestamp(µs)", "Timestamp(µs, \"UTC\")"),
            ("Timestamp(µs, \"UTC\")", "Timestamp(µs, \"America/New_York\")"),
            ("Boolean", "Int8"),
        ] {
            let error = two(a, b, Format::Parquet).unwrap_err();
            assert!(error.starts_with("b: the column `x` is ") && error.contains(" in `a`: "), "{error}");
            assert!(error.contains(a) && error.contains(b) && error.contains("CAST"), "{error}");
        }
    }

    #[test]
    fn guessed_types_widen_further() {
        for (a, b, wide) in [
            ("Int64", "Float64", "Float64"),
            ("Null", "Int64", "Int64"),
            ("Null", "Null", "Utf8"),
            ("List(Null)", "List(Int64)", "List(Int64)"),
            ("Date32", "Timestamp(us)", "Timestamp(µs)"),
            ("Timestamp(ns)", "Timestamp(us)", "Timestamp(ns)"),
        ] {
            assert_eq!(two(a, b, Format::Csv).unwrap(), format!("x {wide}"), "{a} {b}");
        }
        for (a, b) in [
            ("Int64", "Utf8"),
            ("Float64", "Utf8"),
            ("Boolean", "Int64"),
            ("Date32", "Int64"),
            ("Timestamp(us)", "Timestamp(us, \"UTC\")"),
        ] {
            for format in [Format::Csv, Format::Json] {
                assert_eq!(two(a, b, format).unwrap(), "x Utf8", "{a} {b}");
            }
        }
        assert_eq!(two("List(Int64)", "List(Utf8)", Format::Json).unwrap(), "x List(Utf8)");
        let error = two("Int64", "List(Int64)", Format::Json).unwrap_err();
        assert!(error.contains("schema = { x = \"VARCHAR\" }"), "{error}");
    }

    #[test]
    fn columns_that_are_missing_are_refused_or_null() {
        let files =
            [file("a", &[("x", "Int64"), ("y", "Utf8")]), file("b", &[("z", "Utf8"), ("x", "Int32")])];
        let mut config = SourceConfig::new("p");
        let error = merged(&config, Format::Parquet, &files).unwrap_err();
        assert!(error.starts_with("a: the column `z` is missing, which `b` has: "), "{error}");
        assert!(error.contains("`missing_columns = \"null\"` under `[sources].logs`"), "{error}");
        config.missing_columns = MissingColumns::Null;
        assert_eq!(merged(&config, Format::Parquet, &files).unwrap(), "x Int64, y Utf8?, z Utf8?");
    }

    #[test]
    fn a_column_whose_name_differs_by_case_is_named() {
        let files = [file("a", &[("item", "Int64")]), file("b", &[("Item", "Int64")])];
        let error = merged(&SourceConfig::new("p"), Format::Parquet, &files).unwrap_err();
        assert!(
            error.starts_with("a: the column `Item` is missing") && error.contains("a column `item`"),
            "{error}"
        );
        let (columns, refused) = merge("logs", &SourceConfig::new("p"), Format::Parquet, &files).unwrap();
        assert_eq!((columns.fields().len(), refused.len()), (2, 2));
    }

    #[test]
    fn declared_types_are_taken() {
        let files = [file("a", &[("x", "Int64")]), file("b", &[("x", "Utf8"), ("y", "Int64")])];
        let mut config = SourceConfig::new("p");
        config.schema =
            vec![("x".into(), DataType::Utf8), ("y".into(), DataType::Float64), ("z".into(), DataType::Int8)];
        assert_eq!(merged(&config, Format::Json, &files).unwrap(), "x Utf8, y Float64?, z Int8?");
        let error = merged(&config, Format::Csv, &files).unwrap_err();
        assert!(error.starts_with("a: it has no column `z`"), "{error}");
        let files = [file("a", &[("x", "Int64"), ("y", "Int64")])];
        let error = merged(&config, Format::Csv, &files).unwrap_err();
        assert!(error.starts_with("a: it has no column `z`: correct `schema`"), "{error}");
        // No name matches, so the file may have no header.
        config.schema.remove(0);
        config.schema.remove(0);
        let error = merged(&config, Format::Csv, &files).unwrap_err();
        let hint = "its first row names `x`, `y`; set `header = false` under `[sources].logs`";
        assert!(error.starts_with(&format!("a: it has no column `z`: {hint}")), "{error}");
    }

    #[test]
    fn repeated_column_names_are_refused() {
        let error =
            merged(&SourceConfig::new("p"), Format::Csv, &[file("a", &[("x", "Utf8"), ("x", "Utf8")])]);
        assert!(error.unwrap_err().starts_with("a: it has two columns `x`"));
    }
}
