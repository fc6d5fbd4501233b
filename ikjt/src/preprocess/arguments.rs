//! The keys of one `[[step]]`, which parsers take out one by one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use onefold_datasets::suggest;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::problem::{Checked, Problem};

/// The remaining keys of a step.
#[derive(Debug)]
pub(super) struct Arguments<'a> {
    table: Table,
    files: &'a mut TableFiles,
}

/// The texts of the files that steps refer to.
#[derive(Debug)]
pub(super) struct TableFiles {
    /// The directory that file names are relative to. `None` if the texts came with the steps.
    directory: Option<PathBuf>,
    texts: BTreeMap<String, String>,
}

impl TableFiles {
    /// Creates a store that reads each file when a step refers to it.
    pub(super) fn of_directory(directory: PathBuf) -> Self {
        Self { directory: Some(directory), texts: BTreeMap::new() }
    }

    /// Creates a store of texts that are known already, by file name.
    pub(super) fn known(texts: BTreeMap<String, String>) -> Self {
        Self { directory: None, texts }
    }

    /// Returns the text of a file.
    pub(super) fn text(&mut self, name: &str) -> Checked<&str> {
        if let Some(directory) = self.directory.as_ref().filter(|_| !self.texts.contains_key(name)) {
            let text = fs_err::read_to_string(directory.join(name)).map_err(|error| {
                Problem::new(error.to_string(), "the path is relative to the `preprocess.toml`")
            })?;
            self.texts.insert(name.to_owned(), text);
        }
        let missing =
            || Problem::new(format!("`{name}` did not come with the steps"), "send the pipeline again");
        self.texts.get(name).map(String::as_str).ok_or_else(missing)
    }

    /// Returns the texts of all files that were read, by name.
    pub(super) fn into_texts(self) -> BTreeMap<String, String> {
        self.texts
    }
}

/// A number as it is written in the file.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
pub(super) enum Number {
    /// A number without a fraction.
    Integer(i64),
    /// A number with a fraction, or `inf`.
    Real(f64),
}

impl Number {
    /// Returns the number as a value of a dense feature.
    pub(super) fn real(self) -> f32 {
        match self {
            Self::Integer(value) => value as f32,
            Self::Real(value) => value as f32,
        }
    }

    /// Returns the number as an id, or a problem with `key` if it is not an integer.
    pub(super) fn id(self, key: &str) -> Checked<i64> {
        match self {
            Self::Integer(value) => Ok(value),
            Self::Real(value) => Err(Problem::new(
                format!("`{key}` is {value}, but a list holds ids"),
                "write an integer, or name only dense features in `inputs`",
            )),
        }
    }
}

impl<'a> Arguments<'a> {
    pub(super) fn new(table: Table, files: &'a mut TableFiles) -> Self {
        Self { table, files }
    }

    pub(super) fn files(&mut self) -> &mut TableFiles {
        self.files
    }

    /// Returns a problem if there is a key that is not in `known`.
    pub(super) fn refuse_unknown(&self, known: &[&str]) -> Checked<()> {
        match self.table.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                Err(Problem::new(format!("unknown key `{key}`"), suggest(key, known.iter().copied())))
            }
        }
    }

    pub(super) fn optional<T: DeserializeOwned>(&mut self, key: &str) -> Checked<Option<T>> {
        self.table.remove(key).map(|value| decode(key, value)).transpose()
    }

    pub(super) fn required<T: DeserializeOwned>(&mut self, key: &str) -> Checked<T> {
        self.optional(key)?.ok_or_else(|| {
            Problem::new(format!("`{key}` is missing"), format!("add a line `{key} = …` to the step"))
        })
    }

    /// Takes an integer in `least..=most`. If the key is absent, returns `default`, or a problem if that is `None`.
    pub(super) fn integer(
        &mut self,
        key: &str,
        default: Option<i64>,
        (least, most): (i64, i64),
    ) -> Checked<i64> {
        let value = match default {
            Some(default) => self.optional(key)?.unwrap_or(default),
            None => self.required(key)?,
        };
        if (least..=most).contains(&value) {
            return Ok(value);
        }
        let (bound, hint) = if value < least { ("least", least) } else { ("most", most) };
        Err(Problem::new(
            format!("`{key}` is {value}, which is out of range"),
            format!("it must be at {bound} {hint}"),
        ))
    }

    /// Takes a number that is finite as `f32`. If the key is absent, behaves like [`integer`](Self::integer).
    pub(super) fn finite(&mut self, key: &str, default: Option<f64>) -> Checked<f32> {
        let value = match default {
            Some(default) => self.optional::<f64>(key)?.unwrap_or(default),
            None => self.required::<f64>(key)?,
        };
        finite(key, value)
    }
}

/// Returns `value` as `f32`, or a problem with `key` if the result is not finite.
pub(super) fn finite(key: &str, value: f64) -> Checked<f32> {
    let single = value as f32;
    if single.is_finite() {
        return Ok(single);
    }
    Err(Problem::new(
        format!("`{key}` is {value}, which is not finite as a 32-bit float"),
        "write a number whose magnitude is below 3.4e38",
    ))
}

fn decode<T: DeserializeOwned>(key: &str, value: Value) -> Checked<T> {
    value.try_into().map_err(|error: toml::de::Error| {
        Problem::new(
            format!("`{key}`: {}", error.message()),
            "the manual's page `preprocess.toml` lists the keys of every operator",
        )
    })
}
