//! Reads popularity files, which contain how often jobs read each column.

use std::collections::BTreeMap;
use std::path::Path;

use onefold_datasets::{SESSION_COLUMN, TIME_COLUMN, suggest};

use crate::config::Config;
use crate::error::{Error, Result};

/// Returns the columns that the file at `path` names, by descending number of reads, then by name. Each line is
/// `column,reads`. Empty lines, lines that start with `#`, and a first line without a number are ignored.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be read; [`Error::Fault`], with the line number, if a line has another form, a
/// column occurs twice, or the dataset of `config` does not have the column.
pub(crate) fn column_order(path: &Path, config: &Config) -> Result<Vec<String>> {
    let text = fs_err::read_to_string(path)?;
    let features = config.feature_columns().map(|(name, _)| name);
    let kept = config.keep.iter().map(String::as_str);
    let known: Vec<&str> = [SESSION_COLUMN, TIME_COLUMN].into_iter().chain(features).chain(kept).collect();
    let mut reads = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |message: String, hint: &str| {
            Error::data(format!("`{}`, line {}", path.display(), number + 1), message, hint)
        };
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (column, count) = line.rsplit_once(',').unwrap_or((line, ""));
        let (column, count) = (column.trim().trim_matches('"'), count.trim());
        let Ok(count) = count.parse::<u64>() else {
            if reads.is_empty() && number == 0 {
                continue;
            }
            let hint = "write lines `column,reads`, as `user_id,120`";
            return Err(wrong(format!("`{line}` is not a column and a whole number"), hint));
        };
        if !known.contains(&column) {
            let message = format!("the dataset has no column `{column}`");
            return Err(wrong(message, &suggest(column, known.iter().copied())));
        }
        if reads.insert(column.to_owned(), count).is_some() {
            return Err(wrong(format!("`{column}` is there twice"), "remove one of the lines"));
        }
    }
    let mut columns: Vec<(String, u64)> = reads.into_iter().collect();
    columns.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    Ok(columns.into_iter().map(|(column, _)| column).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(text: &str) -> Result<Vec<String>, String> {
        let config = "format_version = 1\n[sources]\nlog = \"log.parquet\"\n[samples]\nquery = \"\"\n\
                      [session]\nkey = [\"a\"]\ntime = \"t\"\n[features]\nclicked = { kind = \"label\" }\n\
                      item = { kind = \"sparse\" }\nuser = { kind = \"sparse\" }\n";
        let config = Config::parse(Path::new("dataset.toml"), config).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(file.path(), text).unwrap();
        column_order(file.path(), &config).map_err(|error| error.to_string())
    }

    #[test]
    fn columns_that_are_read_most_come_first() {
        let columns = order("column,reads\nitem, 3\n# the rest\n\nuser,12\nclicked,3\n").unwrap();
        assert_eq!(columns, ["user", "clicked", "item"]);
        assert_eq!(order("").unwrap(), [""; 0]);
    }

    #[test]
    fn a_mistake_names_its_line() {
        let error = order("item,3\nuser,often\n").unwrap_err();
        assert!(error.contains("line 2: `user,often` is not a column and a whole number"), "{error}");
        assert!(order("item,3\nuzer,1").unwrap_err().contains("did you mean `user`"));
        assert!(order("item,3\nitem,1").unwrap_err().contains("`item` is there twice"));
    }
}
