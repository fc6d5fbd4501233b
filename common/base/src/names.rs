//! Names that a user wrote, compared with the valid names.

use strsim::levenshtein;

use crate::units::abridged;

/// Returns the hint for an unknown name: the nearest valid name, if one is near, and the valid names, or
/// the nearest ones of many.
///
/// ```
/// let hint = onefold_base::names::suggest("histroy", ["history", "user"]);
/// assert_eq!(hint, "did you mean `history`? Known names: `history`, `user`");
/// ```
pub fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let mut nearest = known.clone();
    nearest.sort_by_cached_key(|name| levenshtein(wrong, name));
    let Some(first) = nearest.first() else { return "there are none".to_owned() };
    let quoted = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<String>>();
    let listed = match known.len() {
        0..=MOST_LISTED => quoted(&known),
        _ => abridged(&quoted(&nearest)),
    };
    let listed = listed.join(", ");
    if levenshtein(wrong, first) <= 1 + wrong.len() / 3 {
        format!("did you mean `{first}`? Known names: {listed}")
    } else {
        format!("known names: {listed}")
    }
}

/// The largest number of names that are all listed. Of more names, only the nearest ones are.
const MOST_LISTED: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_are_listed_if_none_is_similar() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }

    #[test]
    fn of_a_thousand_names_the_nearest_are_listed() {
        let names: Vec<String> = (0..1_000).map(|number| format!("table_{number}")).collect();
        let hint = suggest("tabel_7", names.iter().map(String::as_str));
        assert!(hint.starts_with("did you mean `table_7`? Known names: `table_7`, "), "{hint}");
        assert!(hint.ends_with(", … (992 more)") && hint.len() < 200, "{hint}");
    }
}
