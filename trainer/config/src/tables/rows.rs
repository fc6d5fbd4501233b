//! The number of rows of a table, and the mapping from ids to rows.

use std::collections::BTreeMap;

use onefold_datasets::{IdEncoding, Schema, Snapshot, SparseFeature};
use serde::{Deserialize, Serialize};

use super::{EmbeddingConfig, IdPolicy, TableOverride};

/// The default number of rows of tables with hashed ids.
pub const HASHED_ROWS: u64 = 1_000_000;
/// The limit up to which ids without a vocabulary get one row each by default. More ids are hashed, since most
/// numbers of such a large range usually do not occur.
pub const MOST_ROWS: u64 = 1_000_000;

/// The setting `rows`: a number, or `"vocabulary"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// A fixed number of rows.
    Number(u64),
    /// One row for every known id of the dataset, plus spare rows for ids that are added later.
    Vocabulary,
}

impl Serialize for Rows {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(rows) => serializer.serialize_u64(*rows),
            Self::Vocabulary => serializer.serialize_str("vocabulary"),
        }
    }
}

impl<'de> Deserialize<'de> for Rows {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Rows;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number of rows, or \"vocabulary\"")
            }

            fn visit_u64<E>(self, rows: u64) -> Result<Rows, E> {
                Ok(Rows::Number(rows))
            }

            fn visit_i64<E: serde::de::Error>(self, rows: i64) -> Result<Rows, E> {
                let wrong = || E::invalid_value(serde::de::Unexpected::Signed(rows), &self);
                u64::try_from(rows).map(Rows::Number).map_err(|_| wrong())
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Rows, E> {
                match text {
                    "vocabulary" => Ok(Rows::Vocabulary),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// The number of ids of a sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdCount {
    /// The ids are in `0..count`.
    pub count: u64,
    /// Whether a vocabulary numbers the ids.
    pub numbered: bool,
}

/// The known ids of a dataset, and the table sizes of a model whose training continues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KnownIds {
    /// The number of ids by feature. Features with hashed or negative ids are left out.
    pub counts: BTreeMap<String, IdCount>,
    /// The rows of existing tables by feature. A table keeps its size as long as it has enough rows.
    pub rows: BTreeMap<String, u64>,
}

impl KnownIds {
    /// Returns the number of ids of each feature of a dataset, from its vocabulary or from the statistics of
    /// the samples.
    pub fn of_snapshot(snapshot: &Snapshot) -> Self {
        let count = |feature: &SparseFeature| {
            let count = match (&feature.vocabulary, feature.ids) {
                // The ids of a vocabulary start at 1; id 0 is for unknown values.
                (Some(name), _) => snapshot.vocabularies.get(name)?.entries + 1,
                (None, Some(IdEncoding::Hash)) => return None,
                (None, None) => {
                    let ids = snapshot.statistics.features.get(&feature.name)?;
                    match (ids.min_id, ids.max_id) {
                        (Some(least), Some(most)) if least >= 0 => {
                            u64::try_from(most).ok()?.checked_add(1)?
                        }
                        (None, None) => 1,
                        _ => return None,
                    }
                }
            };
            Some(IdCount { count, numbered: feature.vocabulary.is_some() })
        };
        let features = snapshot.schema.sparse_features();
        let counts = features.filter_map(|feature| Some((feature.name.clone(), count(feature)?))).collect();
        Self { counts, rows: BTreeMap::new() }
    }
}

/// Returns, by feature, the number of ids of its table: the maximum over all features that share the table.
/// Tables with a feature whose ids are unknown are left out.
pub(super) fn counts_of_tables(
    overrides: &BTreeMap<String, TableOverride>,
    schema: &Schema,
    counts: &BTreeMap<String, IdCount>,
) -> BTreeMap<String, IdCount> {
    let table_of = |name: &str| {
        let own = overrides.get(name).and_then(|own| own.table.clone());
        own.unwrap_or_else(|| name.to_owned())
    };
    let names = || schema.sparse_features().map(|feature| feature.name.as_str());
    let of_table = |table: &str| {
        let sharing = names().filter(|name| table_of(name) == table);
        let none = IdCount { count: 0, numbered: true };
        sharing.map(|name| counts.get(name)).try_fold(none, |all, own| {
            let own = own?;
            Some(IdCount { count: all.count.max(own.count), numbered: all.numbered && own.numbered })
        })
    };
    names().filter_map(|name| Some((name.to_owned(), of_table(&table_of(name))?))).collect()
}

/// Returns the number of rows of a feature's table and the mapping from ids to rows. `known` is the number of
/// the feature's ids, if known, and `present` the number of rows of the existing table, if any.
pub(super) fn resolve_rows(
    embedding: &EmbeddingConfig,
    own: &TableOverride,
    (known, present): (Option<IdCount>, Option<u64>),
) -> Result<(u64, IdPolicy), (String, &'static str)> {
    let (rows, ids) = (own.rows.or(embedding.rows), own.ids.or(embedding.ids));
    let with_headroom = |count: u64| match present {
        Some(rows) if rows >= count => rows,
        _ => (count as f64 * (1.0 + embedding.headroom)).ceil() as u64,
    };
    match (rows, ids, known) {
        (Some(Rows::Number(rows)), ids, _) => Ok((rows, ids.unwrap_or_default())),
        (None, Some(IdPolicy::Hashed), _) => Ok((HASHED_ROWS, IdPolicy::Hashed)),
        (None, None, Some(IdCount { count, numbered })) if numbered || count <= MOST_ROWS => {
            Ok((with_headroom(count), IdPolicy::Checked))
        }
        (None, None, _) => Ok((HASHED_ROWS, IdPolicy::Hashed)),
        (Some(Rows::Vocabulary), Some(IdPolicy::Hashed), _) => Err((
            "has `rows = \"vocabulary\"` and `ids = \"hashed\"`".to_owned(),
            "give the number of rows that ids are hashed into, or `ids = \"checked\"`",
        )),
        (Some(Rows::Vocabulary) | None, _, Some(known)) => Ok((with_headroom(known.count), IdPolicy::Checked)),
        (Some(Rows::Vocabulary) | None, _, None) => Err((
            "has ids whose number the dataset does not know: hashes, negative ids, or ids that preprocessing gives"
                .to_owned(),
            "give the number of `rows`, with `ids = \"hashed\"` if there may be more ids",
        )),
    }
}
