//! Names groups.

use std::collections::BTreeSet;

/// The name of the group of the features that are not deduplicated.
pub(super) const UNGROUPED: &str = "ungrouped";

/// Returns a name for each group of `features`: the name of its only feature, the words that all of its names begin
/// with, or else the name of its first feature. Groups with equal names get a letter appended.
pub(super) fn group_names(features: &[&str], groups: &[Vec<usize>]) -> Vec<String> {
    let stem = |group: &Vec<usize>| {
        let names: Vec<&str> = group.iter().map(|feature| features[*feature]).collect();
        let common = if names.len() > 1 { common_words(&names) } else { "" };
        if common.is_empty() { names[0].to_owned() } else { common.to_owned() }
    };
    let stems: Vec<String> = groups.iter().map(stem).collect();
    let mut used = BTreeSet::from([UNGROUPED.to_owned()]);
    let mut named = |stem: &String| {
        let alone = stems.iter().filter(|other| *other == stem).count() == 1;
        let lettered = (0..).map(|number| format!("{stem}_{}", letters(number)));
        let names = alone.then(|| stem.clone()).into_iter().chain(lettered);
        let name = { names }.find(|name| !used.contains(name)).unwrap_or_default();
        used.insert(name.clone());
        name
    };
    stems.iter().map(&mut named).collect()
}

/// Returns the words that all names begin with. A word ends before a character that is not a letter.
fn common_words<'a>(names: &[&'a str]) -> &'a str {
    let first = names[0];
    let is_boundary = |end: usize| {
        let follows = |name: &&str| !name[end..].starts_with(char::is_alphabetic);
        names.iter().all(follows) || !first[..end].ends_with(char::is_alphabetic)
    };
    let is_common = |end: usize| names.iter().all(|name| name.starts_with(&first[..end]));
    let ends = first.char_indices().map(|(start, _)| start).chain([first.len()]);
    let end = ends.take_while(|end| is_common(*end)).filter(|end| is_boundary(*end)).last().unwrap_or(0);
    first[..end].trim_end_matches(|c: char| !c.is_alphabetic())
}

/// Returns `a`, `b`, … `z`, `aa`, `ab`, … for the numbers from 0.
fn letters(number: usize) -> String {
    let last = char::from(b'a' + (number % 26) as u8);
    match number / 26 {
        0 => last.to_string(),
        more => format!("{}{last}", letters(more - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_named_by_the_common_words_of_their_features() {
        let features: Vec<&str> = [
            "user_00",
            "user_1",
            "age",
            "age_group",
            "useragent",
            "username",
            "clicked_items",
            "clicked_categories",
        ]
        .into_iter()
        .chain(["user_2", "user_a", "ungrouped", "größe", "größer"])
        .collect();
        let groups = [
            vec![0, 1],
            vec![2, 3],
            vec![4, 5],
            vec![6, 7],
            vec![8, 0],
            vec![9],
            vec![10],
            vec![11, 12],
            vec![2, 6],
        ];
        let names = group_names(&features, &groups);
        let expected = [
            "user_a",
            "age_a",
            "useragent",
            "clicked",
            "user_b",
            "user_a_a",
            "ungrouped_a",
            "größe",
            "age_b",
        ];
        assert_eq!(names, expected);
        assert_eq!((letters(25), letters(26), letters(27 * 26)), ("z".into(), "aa".into(), "aaa".into()));
    }
}
