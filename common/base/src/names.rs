//! Names that a user wrote, compared with the valid names.

use strsim::levenshtein;

/// Returns the hint for an unknown name: the nearest valid name, if one is near, and all valid names.
///
/// ```
/// let hint = onefold_base::names::suggest("histroy", ["history", "user"]);
/// assert_eq!(hint, "did you mean `history`? Known names: `history`, `user`");
/// ```
pub fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let listed = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let nearest = known.iter().min_by_key(|name| levenshtein(wrong, name));
    match nearest {
        None => "there are none".to_owned(),
        Some(name) if levenshtein(wrong, name) <= 1 + wrong.len() / 3 => {
            format!("did you mean `{name}`? Known names: {listed}")
        }
        Some(_) => format!("known names: {listed}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_are_listed_if_none_is_similar() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }
}
