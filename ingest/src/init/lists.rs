//! Lists in texts, and lists that belong to others.

use super::columns::{Column, MOST_ITEMS, Type};

/// How the texts of a column are lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextLists {
    pub(super) separator: char,
    /// Whether brackets enclose every text.
    brackets: bool,
    /// What separates each item from the label behind it, as in `N123-1 N456-0`.
    pub(super) pairs: Option<char>,
}

impl TextLists {
    /// How the texts of a column are lists; `None` if they are not.
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
            // A text with commas or blanks may be a sentence; ids have digits.
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

    /// The SQL expression of the lists of a text column, a quoted name.
    pub(super) fn sql(&self, column: &str) -> String {
        let text = if self.brackets { format!("btrim({column}, '[]')") } else { column.to_owned() };
        format!("split_ids({text}, '{}')", self.separator)
    }

    /// `column` with lists in place of its texts.
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

/// Whether a text may be an item of a list: an id, or, between clear separators, some words.
fn is_name(item: &str, with_blanks: bool) -> bool {
    let may_have = |c: char| c.is_alphanumeric() || "_-.:/#'\"&()+".contains(c) || (with_blanks && c == ' ');
    item.chars().count() <= 64 && item.chars().all(may_have)
}

/// Whether each value, or each item, of `chosen` is in the list of `shown` in its row. Lists of `shown` that are not known
/// whole tell nothing.
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

/// Whether the lists of both columns have the same length in each row, and not all the same.
pub(super) fn are_parallel(one: &Column, other: &Column) -> bool {
    let length = |list: &Option<(Vec<String>, usize)>| list.as_ref().map_or(0, |(_, length)| *length);
    let mut lengths: Vec<usize> = one.lists.iter().map(length).collect();
    let same = other.lists.iter().map(length).eq(lengths.iter().copied());
    lengths.sort_unstable();
    lengths.dedup();
    same && lengths.len() > 1
}

/// Whether an item is in a list twice.
pub(super) fn repeats(column: &Column) -> bool {
    column.lists.iter().flatten().any(|(items, _)| {
        let mut seen: Vec<&String> = items.iter().collect();
        seen.sort_unstable();
        seen.windows(2).any(|pair| pair[0] == pair[1])
    })
}
