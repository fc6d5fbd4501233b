//! A problem in a dataset, with its location.

use std::fmt;

use serde::Serialize;

/// A description of an error in a dataset, with its location.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// A file or a partition's folder, relative to the dataset's folder; `snapshots` if the problem concerns
    /// the whole snapshot.
    pub path: String,
    /// The index of the row group in the file, counted from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row_group: Option<usize>,
    /// The name of the column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// The index of the row in the row group, counted from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<usize>,
    /// A description of the problem.
    pub message: String,
}

impl Problem {
    /// Creates a problem of a whole file or folder.
    pub(crate) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), row_group: None, column: None, row: None, message: message.into() }
    }

    /// Adds the index of the row group.
    pub(crate) fn in_row_group(mut self, row_group: usize) -> Self {
        self.row_group = Some(row_group);
        self
    }

    /// Adds the name of the column.
    pub(crate) fn in_column(mut self, column: impl Into<String>) -> Self {
        self.column = Some(column.into());
        self
    }

    /// Adds the index of the row, if it is known.
    pub(crate) fn in_row(mut self, row: impl Into<Option<usize>>) -> Self {
        self.row = row.into();
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.path)?;
        if let Some(row_group) = self.row_group {
            write!(f, ", row group {row_group}")?;
        }
        if let Some(column) = &self.column {
            write!(f, ", column `{column}`")?;
        }
        if let Some(row) = self.row {
            write!(f, ", row {row}")?;
        }
        write!(f, ": {}", self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_named_from_the_file_to_the_row() {
        let whole = Problem::new("split=a/part.parquet", "it is missing");
        assert_eq!(whole.to_string(), "`split=a/part.parquet`: it is missing");
        let row = Problem::new("part.parquet", "it is null").in_row_group(2).in_column("city").in_row(7);
        assert_eq!(row.to_string(), "`part.parquet`, row group 2, column `city`, row 7: it is null");
        assert_eq!(serde_json::to_value(whole).unwrap().as_object().unwrap().len(), 2);
    }
}
