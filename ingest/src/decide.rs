//! What is decided between reading and writing, when every sample was seen once: vocabularies and feature groups.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use onefold_datasets::{
    CountBudget, FeatureGroup, Manifest, Schema, SparseFeature, Vocabulary, VocabularyCounter,
};
use serde::Serialize;

use crate::cluster::{Facts, ListColumn, list_names};
use crate::groups::{ObservedFeature, choose_groups};
use crate::{Config, Result, timeline};

/// What the samples are written as.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) schema: Schema,
    /// The list columns of what is unfolded, in order.
    pub(crate) lists: Vec<ListColumn>,
    /// Vocabularies to be written with the dataset.
    pub(crate) vocabularies: BTreeMap<String, Arc<Vocabulary>>,
    /// Why groups were chosen, if they were.
    pub(crate) groups: Vec<GroupSummary>,
}

/// A feature group that was chosen from the data.
#[derive(Debug, Clone, Serialize)]
pub struct GroupSummary {
    /// The group's name.
    pub name: String,
    /// Whether it is deduplicated.
    pub deduplicated: bool,
    /// Its features.
    pub features: Vec<String>,
    /// The dedupe factor expected in batches of whole sessions.
    pub dedupe_factor: f64,
    /// Why it was chosen.
    pub why: String,
}

/// Decides from what was counted. What a dataset that is appended to (`old`, in `root`) has decided stays.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if a vocabulary of the old dataset cannot be read, or a timeline has more distinct
/// ids than may be counted.
pub(crate) async fn decide(
    config: &Config,
    context: &SessionContext,
    facts: &Facts,
    old: Option<(&Path, &Manifest)>,
    budget: &CountBudget,
) -> Result<Decided> {
    let vocabularies = vocabularies(config, context, facts, old, budget).await?;
    let (schema, groups) = match (old, &facts.changes) {
        (_, None) => (config.schema.clone(), Vec::new()),
        (Some((_, old)), Some(_)) if has_features(&old.schema, config) => (old.schema.clone(), Vec::new()),
        _ => found_groups(config, facts),
    };
    let feature = |name: &str| config.schema.sparse_features().find(|feature| feature.name == name);
    let lists = list_names(config).map(|name| {
        let vocabulary = feature(name).and_then(|feature| feature.vocabulary.as_ref());
        let vocabulary = vocabulary.and_then(|name| vocabularies.get(name)).map(Arc::clone);
        ListColumn { name: name.to_owned(), vocabulary }
    });
    Ok(Decided { schema, lists: lists.collect(), vocabularies, groups })
}

/// Whether a schema has the configuration's columns, whatever their groups.
pub(crate) fn has_features(schema: &Schema, config: &Config) -> bool {
    let features = |schema: &Schema| {
        let mut all: Vec<SparseFeature> = schema.sparse_features().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        (schema.labels.clone(), schema.weight.clone(), schema.dense.clone(), all)
    };
    features(schema) == features(&config.schema)
}

/// The vocabularies that features name. Those of an old dataset are extended: an id that has a number keeps it, and its
/// count, so that building a partition again changes nothing.
async fn vocabularies(
    config: &Config,
    context: &SessionContext,
    facts: &Facts,
    old: Option<(&Path, &Manifest)>,
    budget: &CountBudget,
) -> Result<BTreeMap<String, Arc<Vocabulary>>> {
    let mut all = BTreeMap::new();
    for ((name, vocabulary), counted) in config.vocabularies.iter().zip(&facts.counters) {
        let mut counter = VocabularyCounter::new(name, budget);
        for (id, count) in counted.counts() {
            counter.add(id, count)?;
        }
        count_timelines(config, context, name, &mut counter).await?;
        let made = match old.filter(|(_, old)| old.vocabularies.contains_key(name)) {
            None => Vocabulary::from_counts(counter.counts(), vocabulary.min_count),
            Some((root, old)) => {
                let mut known = Vocabulary::load(root, old, name)?;
                let new: Vec<_> = counter.counts().filter(|(id, _)| known.id(*id) == 0).collect();
                known.extend(new, vocabulary.min_count);
                known
            }
        };
        all.insert(name.clone(), Arc::new(made));
    }
    Ok(all)
}

/// Counts the ids that timelines give to features of the vocabulary `name`: as often as they are in the timeline.
async fn count_timelines(
    config: &Config,
    context: &SessionContext,
    name: &str,
    counter: &mut VocabularyCounter,
) -> Result<()> {
    let has_it = |feature: &str| {
        let mut features = config.schema.sparse_features();
        features.any(|f| f.name == feature && f.vocabulary.as_deref() == Some(name))
    };
    for (number, timeline) in config.timelines.iter().enumerate() {
        for (column, _) in timeline.columns.iter().enumerate().filter(|(_, (feature, _))| has_it(feature)) {
            let mut rows = context.sql(&timeline::counts_sql(number, column)).await?.execute_stream().await?;
            while let Some(rows) = rows.next().await.transpose()? {
                let (ids, counts) =
                    (rows.column(0).as_primitive::<Int64Type>(), rows.column(1).as_primitive::<Int64Type>());
                for (id, count) in ids.values().iter().zip(counts.values()) {
                    counter.add(*id, count.unsigned_abs())?;
                }
            }
        }
    }
    Ok(())
}

/// The schema with the groups that the data suggests.
fn found_groups(config: &Config, facts: &Facts) -> (Schema, Vec<GroupSummary>) {
    let Some(changes) = &facts.changes else { return (config.schema.clone(), Vec::new()) };
    let names = list_names(config).zip(&facts.values);
    let observed: Vec<ObservedFeature> = names
        .filter_map(|(name, [values, window_values])| {
            let feature = config.schema.sparse_features().find(|feature| feature.name == name)?.clone();
            Some(ObservedFeature { feature, values: *values, window_values: *window_values })
        })
        .collect();
    let chosen = choose_groups(&observed, changes);
    let groups = chosen.iter().map(|group| FeatureGroup {
        name: group.name.clone(),
        deduplicated: group.deduplicated,
        features: group.features.iter().map(|i| observed[*i].feature.clone()).collect(),
    });
    let schema = Schema { groups: groups.collect(), ..config.schema.clone() };
    let summaries = chosen.into_iter().map(|group| GroupSummary {
        name: group.name,
        deduplicated: group.deduplicated,
        features: group.features.iter().map(|i| observed[*i].feature.name.clone()).collect(),
        dedupe_factor: group.dedupe_factor,
        why: group.why,
    });
    (schema, summaries.collect())
}
