//! Names that a user wrote, compared with the valid names.

use strsim::levenshtein;

use crate::units::{SHOWN, abridged};

/// Returns the hint for an unknown name: the nearest valid name, if one is near, and all valid names, or the nearest
/// ones if there are many.
///
/// ```
/// let hint = onefold_base::names::suggest("histroy", ["history", "user"]);
/// assert_eq!(hint, "did you mean `history`? Known names: `history`, `user`");
/// ```
pub fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let mut known: Vec<&str> = known.into_iter().collect();
    let nearest = known.iter().copied().min_by_key(|name| levenshtein(wrong, name));
    if known.len() > SHOWN {
        known.sort_by_cached_key(|name| levenshtein(wrong, name));
    }
    let listed: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
    let listed = abridged(&listed).join(", ");
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
    fn far_names_are_listed_without_a_guess() {
        assert_eq!(suggest("zzzz", ["user", "history"]), "known names: `user`, `history`");
    }

    #[test]
    fn of_many_names_the_nearest_are_listed() {
        let names: Vec<String> = (0..100).map(|number| format!("feature_{number}")).collect();
        let hint = suggest("feature_990", names.iter().map(String::as_str));
        assert!(
            hint.starts_with("did you mean `feature_90`? Known names: `feature_90`, `feature_99`, "),
            "{hint}"
        );
        assert!(hint.ends_with(", … (92 more)"), "{hint}");
    }
}
