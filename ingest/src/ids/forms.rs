//! Chooses the form in which the ids of each feature are read, before any row is read.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Schema as ArrowSchema};
use datafusion::prelude::SessionContext;
use onefold_datasets::{CountBudget, IdEncoding, OriginalKind, SparseFeature, TextIds};

use super::{IdForm, IdType, timeline_function};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::remote::cluster_of;

/// The forms of the ids of all features, and the texts that are collected while ids are read.
#[derive(Debug, Clone, Default)]
pub(crate) struct FeatureIds {
    forms: BTreeMap<String, IdForm>,
    /// The texts of the vocabularies whose originals are texts.
    texts: BTreeMap<String, Arc<TextIds>>,
}

impl FeatureIds {
    /// Chooses the forms by the column types of the sources and of the `rows` that become samples, and registers the
    /// functions that timelines call with `context`. `kinds` are the kinds of the vocabularies of a dataset that is
    /// appended to.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a vocabulary of the dataset has integers, and a feature that uses it has other ids.
    pub(crate) async fn plan(
        config: &Config,
        context: &SessionContext,
        rows: &ArrowSchema,
        kinds: &BTreeMap<String, OriginalKind>,
        budget: &CountBudget,
    ) -> Result<Self> {
        let types = types(config, context, rows).await?;
        let mut ids = Self::default();
        for name in config.vocabularies.keys() {
            let has_it = |feature: &&SparseFeature| feature.vocabulary.as_ref() == Some(name);
            let features: Vec<&SparseFeature> = config.schema.sparse_features().filter(has_it).collect();
            let id_type = |feature: &SparseFeature| types.get(&feature.name).and_then(IdType::of_column);
            if kinds.get(name) == Some(&OriginalKind::Integer) {
                let is_other = |id: IdType| matches!(id, IdType::Text | IdType::Binary | IdType::Boolean);
                match features.iter().find(|feature| id_type(feature).is_some_and(is_other)) {
                    None => continue,
                    Some(feature) => return Err(other_kind(name, feature, &types[&feature.name])),
                }
            }
            let is_integer =
                |feature: &&SparseFeature| id_type(feature).is_none_or(|id_type| id_type == IdType::Integer);
            if kinds.get(name) == Some(&OriginalKind::Text) || !features.iter().all(is_integer) {
                let texts = Arc::new(TextIds::new(name, budget));
                ids.texts.insert(name.clone(), Arc::clone(&texts));
                let forms = features.iter().map(|feature| feature.name.clone());
                ids.forms.extend(forms.map(|feature| (feature, IdForm::Texts(Arc::clone(&texts)))));
            }
        }
        for feature in config.schema.sparse_features() {
            if feature.ids == Some(IdEncoding::Hash) {
                ids.forms.insert(feature.name.clone(), IdForm::Hashes);
            }
        }
        let is_on_cluster = cluster_of(&context.copied_config()).is_some();
        for (i, timeline) in config.timelines.iter().enumerate() {
            for (j, (feature, column)) in timeline.columns.iter().enumerate() {
                let form = match ids.of(feature) {
                    // Other machines call this function, and this process does not share its texts with them.
                    IdForm::Texts(_) if is_on_cluster => IdForm::TextHashes,
                    form => form,
                };
                context.register_udf(timeline_function(i, j, column, form));
            }
        }
        Ok(ids)
    }

    /// Returns the form of a feature's ids.
    pub(crate) fn of(&self, feature: &str) -> IdForm {
        self.forms.get(feature).cloned().unwrap_or_default()
    }

    /// Returns the texts of a vocabulary whose originals are texts.
    pub(crate) fn texts(&self, vocabulary: &str) -> Option<&TextIds> {
        self.texts.get(vocabulary).map(Arc::as_ref)
    }

    /// Returns a shared reference to these texts, for a caller that adds texts.
    pub(crate) fn shared_texts(&self, vocabulary: &str) -> Option<Arc<TextIds>> {
        self.texts.get(vocabulary).cloned()
    }

    /// Returns whether a feature's ids are the integers of the log, or their ranks in a vocabulary.
    pub(crate) fn are_integers(&self, feature: &str) -> bool {
        matches!(self.of(feature), IdForm::Integers)
    }
}

/// Returns the types of the columns that features are made from. Unknown columns are omitted, because other checks
/// report them.
async fn types(
    config: &Config,
    context: &SessionContext,
    rows: &ArrowSchema,
) -> Result<BTreeMap<String, DataType>> {
    let mut types = BTreeMap::new();
    let mut add = |columns: &ArrowSchema, feature: &String, column: &str| {
        if let Ok(field) = columns.field_with_name(column) {
            types.entry(feature.clone()).or_insert_with(|| field.data_type().clone());
        }
    };
    let attributes = config.attributes.iter().map(|attributes| (&attributes.source, &attributes.columns));
    let timelines = config.timelines.iter().map(|timeline| (&timeline.source, &timeline.columns));
    for (source, columns) in timelines.chain(attributes) {
        let table = context.table(source.as_str()).await?;
        for (feature, column) in columns {
            add(table.schema().as_arrow(), feature, column);
        }
    }
    for feature in config.schema.sparse_features() {
        add(rows, &feature.name, &feature.name);
    }
    Ok(types)
}

/// Returns the error for a feature that does not fit the vocabulary of the dataset.
fn other_kind(vocabulary: &str, feature: &SparseFeature, data_type: &DataType) -> Error {
    let message = format!(
        "its type is {data_type}, but the originals of the dataset's vocabulary `{vocabulary}` are integers"
    );
    let name = &feature.name;
    let hint = format!(
        "if the ids are numbers, write `CAST({name} AS BIGINT)` (`BIGINT[]` for lists) in the query; otherwise build a new \
         dataset"
    );
    Error::column(name, message, hint)
}
