//! `[features]` and `[vocabularies]`: the kind of each column, and the mapping from ids of the logs to ids of the
//! dataset.

use std::collections::{BTreeMap, BTreeSet};

use onefold_datasets::{FeatureGroup, IdEncoding, Schema, SparseFeature, SparseKind, suggest};
use serde::Deserialize;

use super::FeatureKind;
use crate::error::MessageAndHint;

/// The name of the group of features without a `group`.
const UNGROUPED: &str = "ungrouped";
/// The value of `vocabulary` for a feature with a vocabulary of its own. It is also the only value of `order`.
const FREQUENCY: &str = "frequency";

/// Options of a vocabulary. It maps ids to their rank by frequency, which starts at 1, and omitted
/// ids to 0.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabularyConfig {
    /// Ids with fewer occurrences over all samples are left out.
    #[serde(default = "once")]
    pub min_count: u64,
    /// Checked by [`Vocabularies::new`].
    #[serde(default)]
    order: Option<String>,
}

fn once() -> u64 {
    1
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Feature {
    kind: FeatureKind,
    group: Option<String>,
    vocabulary: Option<String>,
    ids: Option<IdEncoding>,
    min_count: Option<u64>,
}

/// The vocabularies of `[vocabularies]` and of single features, and the names of those that features use.
struct Vocabularies {
    declared: BTreeMap<String, VocabularyConfig>,
    used: BTreeSet<String>,
}

impl Vocabularies {
    fn new(declared: BTreeMap<String, VocabularyConfig>) -> Result<Self, MessageAndHint> {
        for (name, vocabulary) in &declared {
            if vocabulary.order.as_ref().is_some_and(|order| order != FREQUENCY) {
                let message = format!("`[vocabularies.{name}]`: `order` must be `{FREQUENCY}`");
                return Err((message, "correct it, or leave it out".to_owned()));
            }
            if name == FREQUENCY || name.is_empty() {
                let message = format!("`[vocabularies]`: the name `{name}` is reserved");
                return Err((message, "call it after its ids, as `[vocabularies.items]`".to_owned()));
            }
        }
        Ok(Self { declared, used: BTreeSet::new() })
    }

    /// Returns the vocabulary of a feature: either the one that it names, or its own.
    fn of_feature(&mut self, name: &str, feature: &Feature) -> Result<Option<String>, MessageAndHint> {
        let wrong =
            |message: &str, hint: &str| Err((format!("`[features].{name}`: {message}"), hint.to_owned()));
        let has_ids = matches!(feature.kind, FeatureKind::Sparse | FeatureKind::Sequence);
        if feature.ids.is_some() && !has_ids {
            return wrong(
                "only sparse and sequence features have `ids`",
                "remove `ids`, or correct the `kind`",
            );
        }
        if feature.ids.is_some() && feature.vocabulary.is_some() {
            let hint = "keep `vocabulary` for numbers by frequency, which can be undone, or `ids = \"hash\"` for hashes";
            return wrong("a feature has either `ids` or a `vocabulary`", hint);
        }
        let Some(vocabulary) = &feature.vocabulary else {
            return match feature.min_count {
                None => Ok(None),
                Some(_) => wrong("`min_count` needs a `vocabulary`", "add `vocabulary = \"frequency\"`"),
            };
        };
        if !has_ids {
            return wrong("only sparse and sequence features have a `vocabulary`", "remove the `vocabulary`");
        }
        if vocabulary != FREQUENCY {
            if feature.min_count.is_some() {
                let hint = format!("write it under `[vocabularies.{vocabulary}]`");
                return wrong("`min_count` belongs to the shared vocabulary", &hint);
            }
            if !self.declared.contains_key(vocabulary) {
                let known = self.declared.keys().map(String::as_str).chain([FREQUENCY]);
                return wrong(
                    &format!("there is no `[vocabularies.{vocabulary}]`"),
                    &suggest(vocabulary, known),
                );
            }
            self.used.insert(vocabulary.clone());
            return Ok(Some(vocabulary.clone()));
        }
        if self.declared.contains_key(name) {
            let hint = format!("write `vocabulary = \"{name}\"` to share that one, or rename it");
            return wrong(&format!("there is also a `[vocabularies.{name}]`"), &hint);
        }
        self.used.insert(name.to_owned());
        let own = VocabularyConfig { min_count: feature.min_count.unwrap_or(1), order: None };
        self.declared.insert(name.to_owned(), own);
        Ok(Some(name.to_owned()))
    }

    /// Returns all vocabularies; an error if no feature uses one of them.
    fn used(self) -> Result<BTreeMap<String, VocabularyConfig>, MessageAndHint> {
        if let Some(unused) = self.declared.keys().find(|name| !self.used.contains(*name)) {
            let message = format!("`[vocabularies.{unused}]`: no feature uses it");
            return Err((message, format!("write `vocabulary = \"{unused}\"` at a feature, or remove it")));
        }
        Ok(self.declared)
    }
}

/// Builds the schema of `[features]`, and the vocabularies that features use. `declared` has the vocabularies of
/// `[vocabularies]`.
pub(super) fn schema(
    features: &toml::Table,
    declared: BTreeMap<String, VocabularyConfig>,
) -> Result<(Schema, BTreeMap<String, VocabularyConfig>), MessageAndHint> {
    let mut vocabularies = Vocabularies::new(declared)?;
    let mut schema = Schema { labels: vec![], weight: None, dense: vec![], kept: Vec::new(), groups: vec![] };
    let mut ungrouped = Vec::new();
    for (name, value) in features {
        let feature: Feature = value.clone().try_into().map_err(|error: toml::de::Error| {
            let hint = "kinds are `label`, `weight`, `dense`, `sparse`, `sequence`; a sparse feature is written as `{ kind = \"sparse\", group \
                        = \"user\" }`, with `ids = \"hash\"` or `vocabulary = \"frequency\"` where its ids are texts";
            (format!("`[features].{name}`: {}", error.message()), hint.to_owned())
        })?;
        let vocabulary = vocabularies.of_feature(name, &feature)?;
        let sparse = |kind| SparseFeature {
            vocabulary: vocabulary.clone(),
            ids: feature.ids,
            ..SparseFeature::new(name, kind)
        };
        let sparse = match feature.kind {
            FeatureKind::Sparse => sparse(SparseKind::Sparse),
            FeatureKind::Sequence => sparse(SparseKind::Sequence),
            _ if feature.group.is_some() => {
                let message =
                    format!("`[features].{name}`: only sparse and sequence features have a `group`");
                return Err((message, "remove the `group`".to_owned()));
            }
            FeatureKind::Label => {
                schema.labels.push(name.clone());
                continue;
            }
            FeatureKind::Dense => {
                schema.dense.push(name.clone());
                continue;
            }
            FeatureKind::Weight => {
                if let Some(other) = schema.weight.replace(name.clone()) {
                    let message = format!("`[features]`: both `{other}` and `{name}` are the weight");
                    return Err((message, "a dataset has one weight column".to_owned()));
                }
                continue;
            }
        };
        match feature.group {
            None => ungrouped.push(sparse),
            Some(group) if group == UNGROUPED => {
                let message = format!("`[features].{name}`: the group name `{UNGROUPED}` is reserved");
                return Err((message, "leave `group` out for features that are not deduplicated".to_owned()));
            }
            Some(group) => match schema.groups.iter_mut().find(|known| known.name == group) {
                Some(known) => known.features.push(sparse),
                None => schema.groups.push(FeatureGroup {
                    name: group,
                    deduplicated: true,
                    features: vec![sparse],
                }),
            },
        }
    }
    if !ungrouped.is_empty() {
        schema.groups.push(FeatureGroup {
            name: UNGROUPED.to_owned(),
            deduplicated: false,
            features: ungrouped,
        });
    }
    Ok((schema, vocabularies.used()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(features: &str) -> Result<(Schema, BTreeMap<String, VocabularyConfig>), MessageAndHint> {
        schema(&toml::from_str(features).unwrap(), BTreeMap::new())
    }

    #[test]
    fn ids_are_hashed_or_numbered_and_not_both() {
        let text = "a = { kind = \"sparse\", ids = \"hash\" }\nb = { kind = \"sequence\", group = \"b\" }";
        let (schema, vocabularies) = of(text).unwrap();
        let ids: Vec<_> = schema.sparse_features().map(|feature| (&*feature.name, feature.ids)).collect();
        assert_eq!(ids, [("b", None), ("a", Some(IdEncoding::Hash))]);
        assert!(vocabularies.is_empty());
        for (feature, part) in [
            (
                "{ kind = \"sparse\", ids = \"hash\", vocabulary = \"frequency\" }",
                "either `ids` or a `vocabulary`",
            ),
            ("{ kind = \"label\", ids = \"hash\" }", "only sparse and sequence features have `ids`"),
            ("{ kind = \"sparse\", ids = \"md5\" }", "`hash`"),
            ("{ kind = \"sparse\", ids = \"hash\", min_count = 3 }", "`min_count` needs a `vocabulary`"),
        ] {
            let (message, hint) = of(&format!("a = {feature}")).unwrap_err();
            assert!(message.starts_with("`[features].a`: ") && message.contains(part), "{message}");
            assert!(!hint.is_empty());
        }
    }
}
