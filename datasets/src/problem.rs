//! Something in a dataset that is not as it should be, and its place.

use std::fmt;

use serde::Serialize;

/// What is wrong with a dataset, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// A file or a partition's folder, relative to the dataset's directory; `snapshots` for what the snapshot says of
    /// the whole.
    pub path: String,
    /// The row group in the file, counted from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row_group: Option<usize>,
    /// The column.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub column: Option<String>,
    /// The row in the row group, counted from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<usize>,
    /// What is wrong there.
    pub message: String,
}

impl Problem {
    /// A problem of a whole file or folder.
    pub(crate) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), row_group: None, column: None, row: None, message: message.into() }
    }

    /// The same, of one row group.
    pub(crate) fn in_row_group(mut self, row_group: usize) -> Self {
        self.row_group = Some(row_group);
        self
    }

    /// The same, of one column.
    pub(crate) fn in_column(mut self, column: impl Into<String>) -> Self {
        self.column = Some(column.into());
        self
    }

    /// The same, of one row if that is known.
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
