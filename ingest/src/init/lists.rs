//! Finds lists and numbers with commas in texts, and lists that belong to other lists.

use std::fmt;

use super::columns::{Column, MOST_ITEMS, Type};

/// The format of lists in the texts of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextLists {
    pub(super) separator: char,
    /// Whether brackets enclose each text.
    brackets: bool,
    /// The character between each item and the label after it, as in `N123-1 N456-0`.
    pub(super) pairs: Option<char>,
}

impl TextLists {
    /// Finds the format of lists in the texts of a column; returns `None` if they are not lists.
    pub(super) fn of(column: &Column) -> Option<Self> {
        if column.is_list || column.kind != Type::Text || column.is_empty() {
            return None;
        }
        let brackets = column.present().all(|text| text.starts_with('[') && text.ends_with(']'));
        let separators = if brackets { [',', ' ', ';', '|'] } else { ['|', ';', ',', ' '] };
        let of_separator = |separator: char| {
            let lists = Self { separator, brackets, pairs: None };
            let (mut texts, mut separated, mut items, mut with_digits) = (0, 0, 0, 0);
            let mut pairs = ['-', ':'].map(Some);
            let mut has_positive = false;
            for text in column.present() {
                let parts = lists.split(text);
                texts += 1;
                separated += usize::from(parts.len() > 1);
                for item in parts {
                    if !is_name(item, matches!(separator, '|' | ';')) {
                        return None;
                    }
                    items += 1;
                    with_digits += usize::from(item.contains(|c: char| c.is_ascii_digit()));
                    let label = |mark: char| {
                        item.rsplit_once(mark)
                            .map(|(name, label)| !name.is_empty() && matches!(label, "0" | "1"))
                    };
                    for pair in &mut pairs {
                        *pair = pair.filter(|mark| label(*mark) == Some(true));
                    }
                    has_positive |= item.ends_with('1');
                }
            }
            // A text with commas or blanks may be a sentence. The items are ids if nearly all of them have digits.
            let is_list = separated > 0 && 10 * separated >= 3 * texts;
            let are_ids = matches!(separator, '|' | ';') || 10 * with_digits >= 9 * items;
            let pairs = pairs.into_iter().flatten().next().filter(|_| has_positive);
            (is_list && are_ids).then_some(Self { pairs, ..lists })
        };
        separators.into_iter().find_map(of_separator)
    }

    fn split<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let text = if self.brackets { text.trim_matches(['[', ']']) } else { text };
        text.split(self.separator).map(str::trim).filter(|item| !item.is_empty()).collect()
    }

    /// Returns the SQL expression for the lists of a text column. `column` is a quoted name.
    pub(super) fn sql(&self, column: &str) -> String {
        let text = if self.brackets { format!("btrim({column}, '[]')") } else { column.to_owned() };
        format!("split_ids({text}, '{}')", self.separator)
    }

    /// Returns `column` with lists instead of texts.
    pub(super) fn apply(&self, column: &Column) -> Column {
        let list = |text: &String| -> (Vec<String>, usize) {
            let items = self.split(text);
            (items.iter().take(MOST_ITEMS).map(|item| (*item).to_owned()).collect(), items.len())
        };
        Column {
            is_list: true,
            values: Vec::new(),
            lists: column.values.iter().map(|text| text.as_ref().map(list)).collect(),
            ..column.clone()
        }
    }
}

/// The meaning of commas in texts that are numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecimalComma {
    /// A comma is before the fraction, and points are between thousands, as in `1.234,50`.
    Fraction,
    /// Commas are between thousands, as in `1,234.50`.
    Thousands,
}

impl DecimalComma {
    /// Finds the meaning of commas in the texts of a column; returns `None` if the texts are not numbers with commas.
    /// Texts such as `7,50` may also be lists, so it must be `likely` that the column has numbers.
    pub(super) fn of(column: &Column, likely: bool) -> Option<Self> {
        if !likely || column.is_list || column.kind != Type::Text || column.is_empty() {
            return None;
        }
        let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let is_number = |text: &str, thousands: char, fraction: char| {
            let text = text.strip_prefix(['-', '+']).unwrap_or(text);
            let (whole, rest) = text.split_once(fraction).unwrap_or((text, "0"));
            let (first, groups) = whole.split_once(thousands).unwrap_or((whole, ""));
            let has_groups = groups.split(thousands).all(|group| group.len() == 3 && are_digits(group));
            are_digits(first) && are_digits(rest) && (groups.is_empty() || (first.len() <= 3 && has_groups))
        };
        let has = |mark: char| column.present().any(|text| text.contains(mark));
        if has(',') && column.present().all(|text| is_number(text, '.', ',')) {
            return Some(Self::Fraction);
        }
        // Without a point, they may be lists of ids with three digits.
        (has(',') && has('.') && column.present().all(|text| is_number(text, ',', '.')))
            .then_some(Self::Thousands)
    }

    /// Returns the SQL expression for the numbers of a text column. `column` is a quoted name.
    pub(super) fn sql(self, column: &str) -> String {
        match self {
            Self::Fraction => format!("CAST(replace(replace({column}, '.', ''), ',', '.') AS DOUBLE)"),
            Self::Thousands => format!("CAST(replace({column}, ',', '') AS DOUBLE)"),
        }
    }
}

impl fmt::Display for DecimalComma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fraction => "with a comma before the fraction",
            Self::Thousands => "with commas between thousands",
        })
    }
}

/// Returns whether a text may be an item of a list: an id, or, between unambiguous separators, some words.
fn is_name(item: &str, with_blanks: bool) -> bool {
    let may_have = |c: char| c.is_alphanumeric() || "_-.:/#'\"&()+".contains(c) || (with_blanks && c == ' ');
    item.chars().count() <= 64 && item.chars().all(may_have)
}

/// Returns whether each value, or each item, of `chosen` is in the list of `shown` in its row. Lists of `shown` with
/// more items than were read are ignored.
pub(super) fn is_among(chosen: &Column, shown: &Column) -> bool {
    let mut found = false;
    let mut longer = false;
    for (row, list) in shown.lists.iter().enumerate() {
        let items = match chosen.is_list {
            true => chosen.lists[row].as_ref().map(|(items, _)| items.clone()).unwrap_or_default(),
            false => chosen.values[row].iter().cloned().collect(),
        };
        let Some((list, length)) = list else {
            if items.is_empty() {
                continue;
            }
            return false;
        };
        longer |= *length > items.len().max(1);
        if *length > MOST_ITEMS {
            continue;
        }
        if !items.iter().all(|item| list.contains(item)) {
            return false;
        }
        found |= !items.is_empty();
    }
    found && longer
}

/// Returns whether the lists of both columns have the same length in each row, and the rows have different lengths.
pub(super) fn are_parallel(one: &Column, other: &Column) -> bool {
    let length = |list: &Option<(Vec<String>, usize)>| list.as_ref().map_or(0, |(_, length)| *length);
    let mut lengths: Vec<usize> = one.lists.iter().map(length).collect();
    let same = other.lists.iter().map(length).eq(lengths.iter().copied());
    lengths.sort_unstable();
    lengths.dedup();
    same && lengths.len() > 1
}

/// Returns whether a list contains an item twice.
pub(super) fn repeats(column: &Column) -> bool {
    column.lists.iter().flatten().any(|(items, _)| {
        let mut seen: Vec<&String> = items.iter().collect();
        seen.sort_unstable();
        seen.windows(2).any(|pair| pair[0] == pair[1])
    })
}
