//! Checks which samples can be appended to a dataset: samples with the same columns, or with additional
//! features.

use crate::{FeatureGroup, Schema, SparseFeature, SparseKind};

/// The hint for samples that do not fit the dataset.
pub(crate) const SAME_CONFIGURATION: &str =
    "append with the configuration that the dataset was built with, or build the dataset anew";

/// Returns the reason why samples of schema `new` cannot be appended to a dataset of schema `old`, and a
/// hint. Returns `None` if they can: their columns are the same, or they have additional features.
pub(crate) fn misfit(old: &Schema, new: &Schema) -> Option<(String, String)> {
    if let Some((name, old, new)) = changed_kind(old, new) {
        let message = format!("the dataset has `{name}` as {old}, the samples have it as {new}");
        let hint = "give the column another name with `AS` in the query, or build the dataset anew";
        return Some((message, hint.to_owned()));
    }
    let quoted = |names: &[String]| format!("`{}`", names.join("`, `"));
    let removed = old.further_features(new);
    if !removed.is_empty() {
        let message = format!("the samples do not have its features {}", quoted(&removed));
        let hint = format!(
            "declare them under `[features]`, or drop them with `onefold-ingest drop-features DATASET {}`",
            removed.join(" ")
        );
        return Some((message, hint));
    }
    let different = |what: &str| Some((format!("the {what} are others"), SAME_CONFIGURATION.to_owned()));
    if old.labels != new.labels || old.weight != new.weight {
        return different("labels or the weight");
    }
    if old.kept != new.kept {
        return different("kept columns (`keep`)");
    }
    let added = new.further_features(old);
    let before = without(new, &added);
    let numbered = |schema: &Schema| {
        let mut all: Vec<SparseFeature> = schema.sparse_features().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    };
    if numbered(old) != numbered(&before) {
        return different("vocabularies of features, or their `ids`,");
    }
    match before == *old {
        true => None,
        false => different("groups of features, or their order,"),
    }
}

/// Returns the schema without some features.
fn without(schema: &Schema, features: &[String]) -> Schema {
    let keep = |group: &FeatureGroup| {
        let left = group.features.iter().filter(|feature| !features.contains(&feature.name));
        let left = FeatureGroup { features: left.cloned().collect(), ..group.clone() };
        (!left.features.is_empty()).then_some(left)
    };
    Schema {
        dense: schema.dense.iter().filter(|name| !features.contains(name)).cloned().collect(),
        groups: schema.groups.iter().filter_map(keep).collect(),
        ..schema.clone()
    }
}

/// Returns the first column that has another kind in `new`, with its old and new kind.
fn changed_kind<'s>(old: &'s Schema, new: &Schema) -> Option<(&'s str, &'static str, &'static str)> {
    let sparse = old.sparse_features().map(|feature| feature.name.as_str());
    let mut names = old.float_columns().chain(old.kept_names()).chain(sparse);
    names.find_map(|name| {
        let (old, new) = (kind(old, name)?, kind(new, name)?);
        (old != new).then_some((name, old, new))
    })
}

/// Describes the kind of a column.
fn kind(schema: &Schema, name: &str) -> Option<&'static str> {
    if schema.labels.iter().any(|label| label == name) {
        return Some("a label");
    }
    if schema.weight.as_deref() == Some(name) {
        return Some("the weight");
    }
    if schema.dense.iter().any(|dense| dense == name) {
        return Some("a dense feature");
    }
    if schema.kept_names().any(|kept| kept == name) {
        return Some("a kept column");
    }
    let feature = schema.sparse_features().find(|feature| feature.name == name)?;
    Some(match feature.kind {
        SparseKind::Sparse => "a sparse feature",
        SparseKind::Sequence => "a sequence feature",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folded::samples::schema;

    fn refused(edit: impl FnOnce(&mut Schema)) -> String {
        let mut new = schema();
        edit(&mut new);
        misfit(&schema(), &new).unwrap().0
    }

    #[test]
    fn added_features_may_be_anywhere_in_the_schema() {
        assert_eq!(misfit(&schema(), &schema()), None);
        let mut new = schema();
        new.dense.push("age".into());
        new.groups[0].features.insert(1, SparseFeature::new("site", SparseKind::Sequence));
        let features = vec![SparseFeature::new("shop", SparseKind::Sparse)];
        new.groups.insert(0, FeatureGroup { name: "shop".into(), deduplicated: true, features });
        assert_eq!(new.further_features(&schema()), ["age", "shop", "site"]);
        assert_eq!(misfit(&schema(), &new), None);
    }

    #[test]
    fn other_changes_of_the_schema_are_refused_by_name() {
        let message = refused(|new| {
            new.groups.pop();
        });
        assert_eq!(message, "the samples do not have its features `item`");
        let message = refused(|new| new.groups[0].features[0].kind = SparseKind::Sequence);
        assert_eq!(
            message,
            "the dataset has `city` as a sparse feature, the samples have it as a sequence feature"
        );
        let message = refused(|new| {
            new.groups.pop();
            new.dense.push("item".into());
        });
        assert!(message.ends_with("the samples have it as a dense feature"), "{message}");
        let message = refused(|new| new.groups[0].features[0].vocabulary = Some("cities".into()));
        assert_eq!(message, "the vocabularies of features, or their `ids`, are others");
        let message = refused(|new| new.groups[0].features.swap(0, 1));
        assert_eq!(message, "the groups of features, or their order, are others");
        assert_eq!(refused(|new| new.labels.push("bought".into())), "the labels or the weight are others");
    }
}
