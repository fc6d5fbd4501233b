//! Chooses the vocabularies and feature groups of a dataset, after all samples were read and before they are written.

use std::collections::BTreeMap;
use std::mem;
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use datafusion::arrow::util::display::array_value_to_string;
use datafusion::error::DataFusionError;
use datafusion::prelude::SessionContext;
use futures::StreamExt;
use onefold_datasets::{
    FeatureGroup, IdMap, KeptColumn, OriginalKind, Schema, Snapshot, SparseFeature, TextIds, Vocabulary,
    VocabularyCounter, VocabularyFile,
};
use onefold_sql::Query as _;
use onefold_storage::Storage;

use crate::cluster::{ListColumn, SampleStatistics, list_names, same_hash};
use crate::config::Config;
use crate::error::Result;
use crate::groups::{GroupSummary, ObservedFeature, choose_groups};
use crate::ids::{IdForm, scalar_ids};
use crate::reading::Reading;
use crate::remote::cluster_of;
use crate::timeline;

/// The schema and vocabularies for writing the samples.
#[derive(Debug)]
pub(crate) struct OutputPlan {
    pub(crate) schema: Schema,
    /// The list columns of decoded samples, in order.
    pub(crate) lists: Vec<ListColumn>,
    /// The vocabularies to write with the dataset.
    pub(crate) vocabularies: BTreeMap<String, Vocabulary>,
    /// The groups that were chosen from the data, with reasons; empty if `[features]` defines the groups.
    pub(crate) groups: Vec<GroupSummary>,
}

impl OutputPlan {
    /// Returns the plan of a configuration that defines its groups and has no vocabularies.
    pub(crate) fn as_configured(config: &Config, kept: &[KeptColumn]) -> Self {
        Self {
            schema: Schema { kept: kept.to_vec(), ..config.schema.clone() },
            lists: list_columns(config, &BTreeMap::new()),
            vocabularies: BTreeMap::new(),
            groups: Vec::new(),
        }
    }
}

/// Makes the plan from the statistics of the samples. Takes the counts of ids out of the statistics, which frees their
/// memory. If a dataset is appended to (the snapshot `old.1` at `old.0`), its groups and the numbers in its
/// vocabularies are kept, and further features get their own groups.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if a vocabulary of the old dataset cannot be read, or a timeline has more
/// distinct ids than the budget allows.
pub(crate) async fn decide(
    config: &Config,
    reading: &Reading<'_>,
    statistics: &mut SampleStatistics,
    old: Option<(&Path, &Snapshot)>,
) -> Result<OutputPlan> {
    let mut vocabularies = BTreeMap::new();
    let mut id_maps = BTreeMap::new();
    for (name, counter) in config.vocabularies.keys().zip(mem::take(&mut statistics.counters)) {
        let vocabulary = vocabulary(config, reading, name, counter, old).await?;
        id_maps.insert(name.clone(), vocabulary.id_map(reading.ids.texts(name)));
        vocabularies.insert(name.clone(), vocabulary);
    }
    let (schema, groups) = match (old, &statistics.changes) {
        (_, None) => (config.schema.clone(), Vec::new()),
        (Some((_, old)), Some(_)) if keeps_features(&old.schema, config) => {
            extended_groups(&old.schema, chosen_groups(config, statistics))
        }
        _ => chosen_groups(config, statistics),
    };
    let schema = Schema { kept: reading.kept.clone(), ..schema };
    Ok(OutputPlan { schema, lists: list_columns(config, &id_maps), vocabularies, groups })
}

/// Returns the list columns of decoded samples, in order, with the id maps of their vocabularies.
pub(crate) fn list_columns(config: &Config, id_maps: &BTreeMap<String, Arc<IdMap>>) -> Vec<ListColumn> {
    let list = |name: &str| {
        let feature = config.schema.sparse_features().find(|feature| feature.name == name);
        let vocabulary = feature.and_then(|feature| id_maps.get(feature.vocabulary.as_ref()?));
        ListColumn { name: name.to_owned(), vocabulary: vocabulary.map(Arc::clone) }
    };
    list_names(config).map(list).collect()
}

/// Returns whether a schema has the columns of the configuration. Groups and the types of kept columns may differ.
pub(crate) fn has_features(schema: &Schema, config: &Config) -> bool {
    if !schema.kept_names().eq(config.keep.iter().map(String::as_str)) {
        return false;
    }
    let features = |schema: &Schema| {
        let mut all: Vec<SparseFeature> = schema.sparse_features().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        (schema.labels.clone(), schema.weight.clone(), schema.dense.clone(), all)
    };
    features(schema) == features(&config.schema)
}

/// Returns whether a configuration has all sparse features of a schema. It may have more.
pub(crate) fn keeps_features(schema: &Schema, config: &Config) -> bool {
    let configured: Vec<&SparseFeature> = config.schema.sparse_features().collect();
    schema.sparse_features().all(|feature| configured.contains(&feature))
}

/// Returns the schema `new` with the groups of the schema `old`. Further features of `new` get their own groups, except
/// that features which are not deduplicated may join an existing group that is not deduplicated.
pub(crate) fn extended(old: &Schema, new: &Schema) -> Schema {
    let further = new.further_features(old);
    let mut groups = old.groups.clone();
    for group in &new.groups {
        let features = group.features.iter().filter(|feature| further.contains(&feature.name));
        let features: Vec<SparseFeature> = features.cloned().collect();
        if features.is_empty() {
            continue;
        }
        let is_same = |known: &FeatureGroup| known.name == group.name && !known.deduplicated;
        if !group.deduplicated
            && let Some(known) = groups.iter_mut().find(|known| is_same(known))
        {
            known.features.extend(features);
            continue;
        }
        let numbered = (2..).map(|number| format!("{}_{number}", group.name));
        let mut names = std::iter::once(group.name.clone()).chain(numbered);
        let is_free = |name: &String| groups.iter().all(|known| known.name != *name);
        let name = names.find(is_free).unwrap_or_default();
        groups.push(FeatureGroup { name, features, ..group.clone() });
    }
    Schema { groups, ..new.clone() }
}

/// Returns the schema `old` extended by the groups that the data suggests for further features.
fn extended_groups(
    old: &Schema,
    (chosen, mut summaries): (Schema, Vec<GroupSummary>),
) -> (Schema, Vec<GroupSummary>) {
    let (further, schema) = (chosen.further_features(old), extended(old, &chosen));
    for summary in &mut summaries {
        summary.features.retain(|feature| further.contains(feature));
        let group = schema.groups.iter().find(|group| {
            group.features.iter().any(|feature| summary.features.first() == Some(&feature.name))
        });
        summary.name = group.map(|group| group.name.clone()).unwrap_or_default();
    }
    summaries.retain(|summary| !summary.features.is_empty());
    (schema, summaries)
}

/// Returns whether the originals of each vocabulary of a dataset are integers or texts.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if the file of a vocabulary cannot be read.
pub(crate) fn vocabulary_kinds(
    directory: &Path,
    snapshot: &Snapshot,
) -> Result<BTreeMap<String, OriginalKind>> {
    let storage = Storage::open(directory)?;
    let kind =
        |(name, file): (&String, &VocabularyFile)| Ok((name.clone(), Vocabulary::read_kind(&storage, file)?));
    snapshot.vocabularies.iter().map(kind).collect()
}

/// Returns the vocabulary `name`. A vocabulary of an old dataset is extended: its ids keep their numbers and counts, so
/// that building a partition again changes nothing. `counter` holds the counts of the samples' lists; the counts of
/// timelines are added.
async fn vocabulary(
    config: &Config,
    reading: &Reading<'_>,
    name: &str,
    mut counter: VocabularyCounter,
    old: Option<(&Path, &Snapshot)>,
) -> Result<Vocabulary> {
    count_timelines(config, reading, name, &mut counter).await?;
    let min_count = config.vocabularies[name].min_count;
    let known = match old.filter(|(_, old)| old.vocabularies.contains_key(name)) {
        Some((root, old)) => Some(Vocabulary::load(root, old, name)?),
        None => None,
    };
    let Some(texts) = reading.ids.texts(name) else {
        let mut vocabulary = known.unwrap_or_else(|| Vocabulary::from_counts([], min_count));
        let new: Vec<_> = counter.counts().filter(|(id, _)| vocabulary.id(*id) == 0).collect();
        vocabulary.extend(new, min_count);
        return Ok(vocabulary);
    };
    let texts = texts.lock();
    let counts = counter.counts().filter_map(|(number, count)| Some((texts.text(number)?, count)));
    let mut vocabulary = known.unwrap_or_else(|| Vocabulary::from_text_counts([], min_count));
    let new: Vec<_> = counts.filter(|(text, _)| vocabulary.id_of_text(text) == 0).collect();
    vocabulary.extend_texts(new, min_count);
    Ok(vocabulary)
}

/// Returns the timeline columns that use the vocabulary `name`, as the number of the timeline and the position of the
/// column in it.
fn timeline_columns<'c>(config: &'c Config, name: &'c str) -> impl Iterator<Item = (usize, usize)> + 'c {
    let has_it = move |feature: &str| {
        let mut features = config.schema.sparse_features();
        features.any(|f| f.name == feature && f.vocabulary.as_deref() == Some(name))
    };
    config.timelines.iter().enumerate().flat_map(move |(number, timeline)| {
        let columns = timeline.columns.iter().enumerate().filter(move |(_, (feature, _))| has_it(feature));
        columns.map(move |(column, _)| (number, column))
    })
}

/// Counts the ids of timeline columns that use the vocabulary `name`, once per occurrence in the timeline.
async fn count_timelines(
    config: &Config,
    reading: &Reading<'_>,
    name: &str,
    counter: &mut VocabularyCounter,
) -> Result<()> {
    let context = &reading.context;
    for (number, column) in timeline_columns(config, name) {
        if let Some(texts) = reading.ids.shared_texts(name)
            && cluster_of(&context.copied_config()).is_some()
        {
            add_texts(config, context, (number, column), &texts).await?;
        }
        let mut rows = context.query(&timeline::counts_sql(number, column)).await?.execute_stream().await?;
        while let Some(rows) = rows.next().await.transpose()? {
            let (ids, counts) =
                (rows.column(0).as_primitive::<Int64Type>(), rows.column(1).as_primitive::<Int64Type>());
            for (id, count) in ids.values().iter().zip(counts.values()) {
                counter.add(*id, count.unsigned_abs())?;
            }
        }
    }
    Ok(())
}

/// Adds the texts of a timeline column to `texts`, and checks their ids. Other machines have converted these texts to
/// ids.
async fn add_texts(
    config: &Config,
    context: &SessionContext,
    (number, column): (usize, usize),
    texts: &Arc<TextIds>,
) -> Result<()> {
    let timeline = &config.timelines[number];
    let shown = &timeline.columns[column].1;
    let form = IdForm::Texts(Arc::clone(texts));
    let sql = timeline::texts_sql(number, timeline, column);
    let mut rows = context.query(&sql).await?.execute_stream().await?;
    while let Some(rows) = rows.next().await.transpose()? {
        let (ids, values) = (rows.column(0).as_primitive::<Int64Type>(), rows.column(1));
        let numbers = scalar_ids(shown, values, &form)?;
        if let Some(row) = (0..rows.num_rows()).find(|row| numbers.value(*row) != ids.value(*row)) {
            let text = array_value_to_string(values, row).map_err(DataFusionError::from)?;
            return Err(same_hash(texts.name(), &text));
        }
    }
    Ok(())
}

/// Returns the schema with the groups that the data suggests, and a summary of each group.
fn chosen_groups(config: &Config, statistics: &SampleStatistics) -> (Schema, Vec<GroupSummary>) {
    let Some(changes) = &statistics.changes else { return (config.schema.clone(), Vec::new()) };
    let names = list_names(config).zip(&statistics.values);
    let observed: Vec<ObservedFeature> = names
        .filter_map(|(name, [values, window_values])| {
            let feature = config.schema.sparse_features().find(|feature| feature.name == name)?.clone();
            Some(ObservedFeature { feature, values: *values, window_values: *window_values })
        })
        .collect();
    let chosen = choose_groups(&observed, changes);
    let groups = chosen.iter().map(|group| {
        let features = observed.iter().map(|observed| &observed.feature);
        FeatureGroup {
            name: group.name.clone(),
            deduplicated: group.deduplicated,
            features: features.filter(|feature| group.features.contains(&feature.name)).cloned().collect(),
        }
    });
    (Schema { groups: groups.collect(), ..config.schema.clone() }, chosen)
}
