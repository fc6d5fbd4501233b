//! The names and the first values of columns, which determine their roles.

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};

use crate::error::{Result, arrow_bug};
use crate::ids::item_type;

/// The number of items of a list that are examined.
pub(super) const MOST_ITEMS: usize = 32;
/// The number of characters of a value that comments show.
const MOST_SHOWN: usize = 32;
/// Nouns for things that have ids: `itemid` is the id of an item. In this and all other lists of words, blanks separate
/// the words.
const NOUNS: &str = "user visitor item product article news session request transaction order event category customer \
    device track song artist hotel city query search impression campaign page video movie member client \
    author shop store brand country";

/// Words in the names of labels.
pub(super) const LABELS: &str = "label target click clicked clk purchase purchased buy bought book booked booking conversion \
    converted convert like liked ordered chosen selected skipped played watched y";

/// The types of values, as far as roles depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Type {
    /// An integer that fits into a signed 64-bit integer.
    Integer,
    /// An unsigned 64-bit integer.
    Unsigned,
    /// A 64-bit float, or another number.
    Number,
    /// A float of at most 32 bits.
    Float32,
    Boolean,
    Text,
    /// A timestamp or date.
    Time,
    /// A struct, bytes, a list of lists, or a column without a value.
    Other,
}

impl Type {
    fn of(data_type: &DataType) -> Self {
        match data_type {
            DataType::Dictionary(_, values) => Self::of(values),
            DataType::Boolean => Self::Boolean,
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Self::Text,
            DataType::Date32 | DataType::Date64 | DataType::Timestamp(..) => Self::Time,
            DataType::UInt64 => Self::Unsigned,
            integer if integer.is_integer() => Self::Integer,
            DataType::Float16 | DataType::Float32 => Self::Float32,
            number if number.is_numeric() => Self::Number,
            _ => Self::Other,
        }
    }

    /// Returns whether values are integers.
    pub(super) fn is_integer(self) -> bool {
        matches!(self, Self::Integer | Self::Unsigned)
    }

    /// Returns whether values are numbers with fractions.
    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::Number | Self::Float32)
    }
}

/// A column, and its values in the first rows as texts.
#[derive(Debug, Clone)]
pub(super) struct Column {
    pub(super) name: String,
    /// The type of its values, or of the items of its lists.
    pub(super) kind: Type,
    pub(super) is_list: bool,
    /// Whether the column comes from `name=value` folders.
    pub(super) is_folder: bool,
    /// Whether the log has no header, so that the name has no meaning.
    pub(super) is_unnamed: bool,
    /// The single values; empty if the column has lists.
    pub(super) values: Vec<Option<String>>,
    /// The first items of each list, and the length of the list; empty if the column has single values.
    pub(super) lists: Vec<Option<(Vec<String>, usize)>>,
    /// Whether a list has a null item.
    pub(super) has_null_items: bool,
}

impl Column {
    /// Reads column `index` of `rows`, which are batches with the same columns.
    pub(super) fn of(name: &str, data_type: &DataType, rows: &[RecordBatch], index: usize) -> Result<Self> {
        let item = item_type(data_type);
        let mut column = Self {
            name: name.to_owned(),
            kind: Type::of(item.unwrap_or(data_type)),
            is_list: item.is_some(),
            is_folder: false,
            is_unnamed: false,
            values: Vec::new(),
            lists: Vec::new(),
            has_null_items: false,
        };
        for batch in rows {
            match item {
                None => column.values.extend(texts(batch.column(index))?),
                Some(item) => column.add_lists(batch.column(index), item)?,
            }
        }
        Ok(column)
    }

    fn add_lists(&mut self, column: &ArrayRef, item: &DataType) -> Result<()> {
        let field = Arc::new(Field::new("element", item.clone(), true));
        let lists = cast(column, &DataType::List(field)).map_err(arrow_bug)?;
        let lists = lists.as_list::<i32>();
        for row in 0..lists.len() {
            if lists.is_null(row) {
                self.lists.push(None);
                continue;
            }
            let items = lists.value(row);
            self.has_null_items |= items.null_count() > 0;
            let first = texts(&items.slice(0, items.len().min(MOST_ITEMS)))?;
            self.lists.push(Some((first.into_iter().flatten().collect(), items.len())));
        }
        Ok(())
    }

    /// Returns the values that are not null.
    pub(super) fn present(&self) -> impl Iterator<Item = &str> {
        self.values.iter().flatten().map(String::as_str)
    }

    /// Returns the number of rows without a value.
    pub(super) fn nulls(&self) -> usize {
        let lists = self.lists.iter().filter(|list| list.is_none()).count();
        self.values.iter().filter(|value| value.is_none()).count() + lists
    }

    /// Returns whether no row has a value.
    pub(super) fn is_empty(&self) -> bool {
        self.present().next().is_none() && self.lists.iter().all(Option::is_none)
    }

    pub(super) fn distinct(&self) -> BTreeSet<&str> {
        self.present().collect()
    }

    /// Returns whether each row has a value, and all values differ.
    pub(super) fn is_unique(&self) -> bool {
        self.values.len() > 1 && self.distinct().len() == self.values.len()
    }

    /// Returns the values as numbers, or `None` if one of them is not a number.
    pub(super) fn numbers(&self) -> Option<Vec<f64>> {
        self.present().map(|value| value.parse().ok()).collect()
    }

    /// Returns whether the values are floats that are whole numbers, as pandas writes integers with missing values.
    pub(super) fn is_whole(&self) -> bool {
        let most = if self.kind == Type::Float32 { 1e7 } else { 9e15 };
        let is_whole = |number: &f64| number.fract() == 0.0 && number.abs() < most;
        self.kind.is_float() && !self.is_list && self.numbers().is_some_and(|all| all.iter().all(is_whole))
    }

    /// Returns whether all values are 0 or 1.
    pub(super) fn is_binary(&self) -> bool {
        let is_bit = |value: &str| matches!(value, "0" | "1" | "0.0" | "1.0");
        let is_number = self.kind.is_integer() || self.kind.is_float();
        let bits = self.kind == Type::Boolean || (is_number && self.present().all(is_bit));
        !self.is_list && !self.is_empty() && bits
    }

    /// Returns whether the name contains one of the `words`, as [`says`] finds them.
    pub(super) fn says(&self, words: &str) -> bool {
        !self.is_unnamed && says(&self.name, words)
    }

    /// Returns whether the name is the name of an id.
    pub(super) fn is_id(&self) -> bool {
        let is_id = |token: &String| {
            let stem = token.strip_suffix("ids").or_else(|| token.strip_suffix("id"));
            ["id", "ids", "uid", "uuid", "guid"].contains(&token.as_str())
                || stem.is_some_and(|stem| is_word(stem, NOUNS))
        };
        !self.is_unnamed && tokens(&self.name).iter().any(is_id)
    }

    /// Returns some values for a comment.
    pub(super) fn examples(&self) -> String {
        let mut shown: Vec<String> = Vec::new();
        let lists = self.lists.iter().flatten().filter(|(items, _)| !items.is_empty());
        let lists = lists.map(|(items, length)| {
            let more = if *length > 3 { ", …" } else { "" };
            format!("[{}{more}]", items.iter().take(3).cloned().collect::<Vec<_>>().join(", "))
        });
        for value in self.present().map(str::to_owned).chain(lists) {
            let value = in_comment(&value);
            if !shown.contains(&value) {
                shown.push(value);
            }
            if shown.len() == 3 {
                break;
            }
        }
        if shown.is_empty() { "no value".to_owned() } else { shown.join(", ") }
    }
}

/// Returns whether a name is the position of a column, as in headers of tables without names.
pub(super) fn is_position(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_digit())
}

/// Returns whether pandas gives this name to the labels of rows, which are not data of the log.
pub(super) fn is_row_label(name: &str) -> bool {
    name.is_empty() || name.starts_with("__index_level_") || name.starts_with("Unnamed: ")
}

/// Returns whether `word` is one of the `words`, which are separated by blanks.
pub(super) fn is_word(word: &str, words: &str) -> bool {
    words.split(' ').any(|known| known == word)
}

/// Returns whether a name contains one of the `words`, alone or in forms such as `itemid` and `items`.
pub(super) fn says(name: &str, words: &str) -> bool {
    let is_said = |token: &String| {
        let stems = ["ids", "id", "s"].map(|end| token.strip_suffix(end));
        is_word(token, words) || stems.into_iter().flatten().any(|stem| is_word(stem, words))
    };
    tokens(name).iter().any(is_said)
}

/// Splits a name into words: `userId` and `user_id` become `user` and `id`.
pub(super) fn tokens(name: &str) -> Vec<String> {
    let (mut tokens, mut was_lower) = (vec![String::new()], false);
    for character in name.chars() {
        if !character.is_alphanumeric() || (character.is_uppercase() && was_lower) {
            tokens.push(String::new());
        }
        was_lower = character.is_lowercase() || character.is_numeric();
        if character.is_alphanumeric()
            && let Some(token) = tokens.last_mut()
        {
            token.extend(character.to_lowercase());
        }
    }
    tokens.retain(|token| !token.is_empty());
    tokens
}

/// Formats a value for a comment: on one line, and shortened.
pub(super) fn in_comment(value: &str) -> String {
    let mut shown: String = value.chars().take(MOST_SHOWN).flat_map(char::escape_debug).collect();
    if value.chars().nth(MOST_SHOWN).is_some() {
        shown.push('…');
    }
    // Comments need no escaped quotes.
    shown.replace("\\\"", "\"").replace("\\'", "'")
}

fn texts(column: &ArrayRef) -> Result<Vec<Option<String>>> {
    let options = FormatOptions::default();
    let formatter = ArrayFormatter::try_new(column.as_ref(), &options).map_err(arrow_bug)?;
    let nulls = column.logical_nulls();
    let is_null = |row: usize| nulls.as_ref().is_some_and(|nulls| nulls.is_null(row));
    Ok((0..column.len()).map(|row| (!is_null(row)).then(|| formatter.value(row).to_string())).collect())
}
