//! The schema of a dataset: which columns are labels, dense features and sparse features, and which sparse
//! features are deduplicated together.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema as ArrowSchema, SchemaRef, TimeUnit};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The column with the session id of a sample: an `Int64`, see [`session_id`](crate::session_id).
pub const SESSION_COLUMN: &str = "session_id";
/// The column with the time of a sample: a `Timestamp` in microseconds since 1970, UTC.
pub const TIME_COLUMN: &str = "timestamp";

/// The column with the hash of a sample's key, an `Int64`. Data files have it if [the snapshot says
/// so](crate::Snapshot::sample_keys). The hash is [`hash_id`](crate::hash_id) of the texts of the key's
/// values, joined by [`IDENTITY_SEPARATOR`](crate::IDENTITY_SEPARATOR). The column belongs neither to the
/// [`Schema`] nor to digests, and readers skip it. A merge uses it to find samples that the dataset already
/// has.
pub const SAMPLE_KEY_COLUMN: &str = "sample_key";

/// The value of a [delay](delay_label) for samples without an event from which the label is final.
pub const NO_DELAY: f32 = -1.0;

/// Returns the name of the label that contains the delay of `label`: the seconds from the sample to the event from
/// which the value of `label` is final, rounded up, or [`NO_DELAY`]. Before this event, the value of `label` is 0.
pub fn delay_label(label: &str) -> String {
    format!("{label}_delay")
}

/// The names of the Arrow columns of a batch that hold all dense features, all labels, the weights and the
/// times. Each sparse feature and kept column has its own column in a batch and must not have one of these
/// names.
pub const BATCH_COLUMNS: [&str; 4] = ["dense", "labels", "weights", "timestamps"];

/// The columns of a dataset's samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// Label columns, each with one `f32` per sample.
    pub labels: Vec<String>,
    /// The column of sample weights, one `f32` per sample, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// Dense features, one `f32` per sample each.
    pub dense: Vec<String>,
    /// Feature groups with their sparse features.
    pub groups: Vec<FeatureGroup>,
    /// Columns that are kept next to the features, for example to join predictions with other data or to
    /// group samples.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptColumn>,
}

/// A column that the dataset keeps but no model reads: one nullable value per sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptColumn {
    /// The column's name.
    pub name: String,
    /// The type of its values.
    #[serde(rename = "type")]
    pub kind: KeptKind,
}

/// The type of a kept column's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptKind {
    /// `Int64`.
    Integer,
    /// `Utf8`.
    Text,
}

impl KeptKind {
    /// Returns the Arrow type of such a column, in memory and in data files.
    pub fn data_type(self) -> DataType {
        match self {
            Self::Integer => DataType::Int64,
            Self::Text => DataType::Utf8,
        }
    }
}

/// Sparse features that are deduplicated together because they change together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureGroup {
    /// The group's name.
    pub name: String,
    /// Whether rows are deduplicated. `false` for features that change with every sample, for which a search
    /// for duplicates would only cost time.
    pub deduplicated: bool,
    /// The features, in column order.
    pub features: Vec<SparseFeature>,
}

/// A list of `i64` ids per sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SparseFeature {
    /// The column's name.
    pub name: String,
    /// Whether the order of the ids matters.
    pub kind: SparseKind,
    /// The [vocabulary](crate::Snapshot::vocabularies) that assigned these ids; `None` if the ids do not come
    /// from a vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<String>,
    /// How the ids were computed from values of the logs; `None` if they are integers of the logs or come
    /// from a vocabulary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<IdEncoding>,
}

/// How the ids of a sparse feature are computed from values of the logs, if they are neither integers of the
/// logs nor assigned by a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdEncoding {
    /// With [`hash_id`](crate::hash_id).
    Hash,
}

/// Whether the order of a sparse feature's ids matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SparseKind {
    /// A bag of ids.
    Sparse,
    /// A list whose order matters, oldest id first.
    Sequence,
}

impl FeatureGroup {
    /// Returns whether the `folded` layout stores `feature`, which belongs to this group, as a window: the
    /// appended items and, in [a second column](SparseFeature::length_column), the length of the list.
    pub fn folds_to_window(&self, feature: &SparseFeature) -> bool {
        self.deduplicated && feature.kind == SparseKind::Sequence
    }
}

impl SparseFeature {
    /// Creates a feature whose ids are the integers of the logs.
    pub fn new(name: impl Into<String>, kind: SparseKind) -> Self {
        Self { name: name.into(), kind, vocabulary: None, ids: None }
    }

    /// Returns the name of the column with the lengths of a window in the `folded` layout.
    pub fn length_column(&self) -> String {
        format!("{}.length", self.name)
    }
}

impl Schema {
    /// Returns all sparse features, group by group, in column order.
    pub fn sparse_features(&self) -> impl Iterator<Item = &SparseFeature> {
        self.groups.iter().flat_map(|group| &group.features)
    }

    /// Returns all sparse features with their groups, in column order.
    pub fn grouped_features(&self) -> impl Iterator<Item = (&FeatureGroup, &SparseFeature)> {
        self.groups.iter().flat_map(|group| group.features.iter().map(move |feature| (group, feature)))
    }

    /// Returns the names of the dense features, then of the sparse features, each in column order.
    pub fn feature_names(&self) -> impl Iterator<Item = &str> {
        let sparse = self.sparse_features().map(|feature| feature.name.as_str());
        self.dense.iter().map(String::as_str).chain(sparse)
    }

    /// Returns the names of the `f32` columns: labels, then the weight, then dense features.
    pub fn float_columns(&self) -> impl Iterator<Item = &str> {
        let labels = self.labels.iter().map(String::as_str);
        labels.chain(self.weight.as_deref()).chain(self.dense.iter().map(String::as_str))
    }

    /// Returns the names of the kept columns.
    pub fn kept_names(&self) -> impl Iterator<Item = &str> {
        self.kept.iter().map(|column| column.name.as_str())
    }

    /// Returns the decoded size of a sample in bytes without its lists and kept texts: 8 for the session, the
    /// time, the key and each kept value, 4 for each float.
    pub fn sample_bytes(&self, sample_keys: bool) -> u64 {
        let numbers = 2 + self.kept.len() as u64 + u64::from(sample_keys);
        8 * numbers + 4 * self.float_columns().count() as u64
    }

    /// Returns the names of the dense and sparse features that `older` does not have.
    pub fn further_features(&self, older: &Self) -> Vec<String> {
        let known: HashSet<&str> = older.feature_names().collect();
        self.feature_names().filter(|name| !known.contains(name)).map(str::to_owned).collect()
    }

    /// Returns the columns of a `rows` data file: [`SESSION_COLUMN`], [`TIME_COLUMN`], the [`f32`
    /// columns](Self::float_columns), the [kept](Self::kept) columns, then a `List<Int64>` for each sparse
    /// feature. Only the kept columns are nullable.
    pub fn to_arrow(&self) -> SchemaRef {
        let mut fields = self.sample_fields();
        fields.extend(self.sparse_features().map(|feature| list_field(feature, false)));
        Arc::new(ArrowSchema::new(fields))
    }

    /// Returns the columns of a `folded` data file. They are the columns of [`to_arrow`](Self::to_arrow) in
    /// the same order, with two differences in deduplicated groups: the lists of sparse features are
    /// nullable, and the list column of a sequence feature holds the appended items and is followed by a
    /// nullable `Int32` column, the [length](SparseFeature::length_column). [`folded`](crate::folded) defines
    /// their contents.
    pub fn to_folded_arrow(&self) -> SchemaRef {
        let mut fields = self.sample_fields();
        for (group, feature) in self.grouped_features() {
            let is_window = group.folds_to_window(feature);
            fields.push(list_field(feature, group.deduplicated && !is_window));
            fields.extend(is_window.then(|| Field::new(feature.length_column(), DataType::Int32, true)));
        }
        Arc::new(ArrowSchema::new(fields))
    }

    /// Returns the columns that come first in every layout, each with one value per sample.
    fn sample_fields(&self) -> Vec<Field> {
        let mut fields = vec![
            Field::new(SESSION_COLUMN, DataType::Int64, false),
            Field::new(TIME_COLUMN, DataType::Timestamp(TimeUnit::Microsecond, None), false),
        ];
        fields.extend(self.float_columns().map(|name| Field::new(name, DataType::Float32, false)));
        fields.extend(self.kept.iter().map(|kept| Field::new(&kept.name, kept.kind.data_type(), true)));
        fields
    }

    /// Checks that a dataset can have this schema.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if there is no label or no feature, a column or group name is empty or used twice, a
    /// group is empty, or a column has a reserved name: [`SESSION_COLUMN`], [`TIME_COLUMN`], the name of a
    /// window's length column, or, for a kept column, [`SAMPLE_KEY_COLUMN`].
    pub fn validate(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| Err(Error::schema(message, hint));
        if self.labels.is_empty() {
            return wrong("the schema has no label".to_owned(), "give one column `kind = \"label\"`");
        }
        let mut names = HashSet::from([SESSION_COLUMN, TIME_COLUMN]);
        let sparse = self.sparse_features().map(|feature| feature.name.as_str());
        for name in self.float_columns().chain(sparse) {
            if name.is_empty() || !names.insert(name) {
                let message = format!("the column name `{name}` is empty, reserved or used twice");
                return wrong(message, "give the column another name with `AS` in the query");
            }
        }
        if names.len() == 2 + self.labels.len() + usize::from(self.weight.is_some()) {
            return wrong("the schema has no feature".to_owned(), "declare one under `[features]`");
        }
        for name in self.kept_names() {
            if name.is_empty() || name == SAMPLE_KEY_COLUMN || !names.insert(name) {
                let message = format!("the kept column's name `{name}` is empty, reserved or used twice");
                return wrong(message, "give the column another name with `AS` in the query");
            }
        }
        let mut separate =
            self.sparse_features().map(|feature| feature.name.as_str()).chain(self.kept_names());
        if let Some(name) = separate.find(|name| BATCH_COLUMNS.contains(name)) {
            let message = format!("the column name `{name}` is reserved: batches have a column of that name");
            return wrong(message, "give the column another name with `AS` in the query");
        }
        let windows = self.grouped_features().filter(|(group, feature)| group.folds_to_window(feature));
        for (_, feature) in windows {
            let length = feature.length_column();
            if names.contains(length.as_str()) {
                let message =
                    format!("the column name `{length}` is reserved for the lengths of `{}`", feature.name);
                return wrong(message, "give the column another name with `AS` in the query");
            }
        }
        let mut groups = HashSet::new();
        for group in &self.groups {
            if group.name.is_empty() || group.features.is_empty() || !groups.insert(&group.name) {
                let message =
                    format!("the feature group `{}` is unnamed, empty or declared twice", group.name);
                return wrong(message, "give every group a name of its own and at least one feature");
            }
        }
        Ok(())
    }
}

fn list_field(feature: &SparseFeature, nullable: bool) -> Field {
    Field::new(&feature.name, DataType::List(item_field()), nullable)
}

/// Returns `columns`, followed by [`SAMPLE_KEY_COLUMN`] if `sample_keys` is true.
pub(crate) fn with_sample_keys(columns: SchemaRef, sample_keys: bool) -> SchemaRef {
    if !sample_keys {
        return columns;
    }
    let key = Arc::new(Field::new(SAMPLE_KEY_COLUMN, DataType::Int64, false));
    Arc::new(ArrowSchema::new(columns.fields().iter().cloned().chain([key]).collect::<Vec<_>>()))
}

/// Returns the Arrow field of the ids in a list.
pub(crate) fn item_field() -> FieldRef {
    Arc::new(Field::new("element", DataType::Int64, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        let feature = |name: &str| SparseFeature::new(name, SparseKind::Sparse);
        Schema {
            labels: vec!["clicked".into()],
            weight: None,
            dense: vec!["age".into()],
            kept: Vec::new(),
            groups: vec![FeatureGroup {
                name: "user".into(),
                deduplicated: true,
                features: vec![feature("user_id")],
            }],
        }
    }

    #[test]
    fn arrow_columns_are_in_declared_order() {
        let arrow = schema().to_arrow();
        let names: Vec<_> = arrow.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!(names, ["session_id", "timestamp", "clicked", "age", "user_id"]);
        assert!(arrow.fields().iter().all(|field| !field.is_nullable()));
    }

    #[test]
    fn folded_columns_are_in_the_same_order_with_lengths_after_their_windows() {
        let mut schema = schema();
        let feature = |name: &str, kind| SparseFeature::new(name, kind);
        schema.groups[0].features.push(feature("history", SparseKind::Sequence));
        schema.groups.push(FeatureGroup {
            name: "item".into(),
            deduplicated: false,
            features: vec![feature("item", SparseKind::Sparse), feature("words", SparseKind::Sequence)],
        });
        let arrow = schema.to_folded_arrow();
        let columns: Vec<_> = arrow.fields().iter().map(|f| (f.name().as_str(), f.is_nullable())).collect();
        let start = [("session_id", false), ("timestamp", false), ("clicked", false), ("age", false)];
        assert_eq!(columns[..4], start);
        let user = [("user_id", true), ("history", false), ("history.length", true)];
        assert_eq!(columns[4..7], user);
        assert_eq!(columns[7..], [("item", false), ("words", false)]);
        assert_eq!(arrow.field(6).data_type(), &DataType::Int32);
        assert_eq!(arrow.field(5), schema.to_arrow().field(5));
    }

    #[test]
    fn names_of_length_columns_are_refused_where_there_is_a_window() {
        let mut schema = schema();
        schema.dense[0] = "user_id.length".into();
        assert!(schema.validate().is_ok());
        schema.groups[0].features[0].kind = SparseKind::Sequence;
        let error = schema.validate().unwrap_err().to_string();
        assert!(error.contains("`user_id.length` is reserved for the lengths of `user_id`"), "{error}");
        schema.groups[0].deduplicated = false;
        assert!(schema.validate().is_ok());
    }

    #[test]
    fn reserved_and_repeated_names_are_refused() {
        let mut reserved = schema();
        reserved.dense[0] = SESSION_COLUMN.into();
        assert!(
            reserved
                .validate()
                .unwrap_err()
                .to_string()
                .contains("`session_id` is empty, reserved or used twice")
        );
        let mut twice = schema();
        twice.dense[0] = "user_id".into();
        assert!(twice.validate().is_err());
        assert!(schema().validate().is_ok());
    }

    /// In a batch, dense features and labels do not have separate columns, so they may have these names.
    #[test]
    fn names_of_batches_are_refused_where_they_would_be_columns() {
        for name in BATCH_COLUMNS {
            let mut sparse = schema();
            sparse.groups[0].features[0].name = name.into();
            let mut kept = schema();
            kept.kept = vec![KeptColumn { name: name.into(), kind: KeptKind::Integer }];
            for refused in [sparse, kept] {
                let error = refused.validate().unwrap_err().to_string();
                assert!(error.contains(&format!("`{name}` is reserved: batches have")), "{error}");
            }
            let mut matrices = schema();
            (matrices.labels[0], matrices.dense[0]) = (name.into(), format!("{name}_"));
            assert!(matrices.validate().is_ok());
            (matrices.labels[0], matrices.dense[0]) = ("clicked".into(), name.into());
            assert!(matrices.validate().is_ok());
        }
    }

    #[test]
    fn kept_columns_have_names_of_their_own_and_are_no_features() {
        let mut schema = schema();
        let column = |name: &str, kind| KeptColumn { name: name.into(), kind };
        schema.kept = vec![column("request", KeptKind::Integer), column("country", KeptKind::Text)];
        assert!(schema.validate().is_ok());
        let arrow = schema.to_arrow();
        let names: Vec<_> = arrow.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!(names, ["session_id", "timestamp", "clicked", "age", "request", "country", "user_id"]);
        assert!(arrow.fields()[4..6].iter().all(|field| field.is_nullable()));
        let text = serde_json::to_string(&schema.kept).unwrap();
        assert_eq!(text, r#"[{"name":"request","type":"integer"},{"name":"country","type":"text"}]"#);
        for name in ["", SESSION_COLUMN, SAMPLE_KEY_COLUMN, "age", "request"] {
            schema.kept[1].name = name.into();
            let error = schema.validate().unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}` is empty, reserved or used twice")), "{error}");
        }
        schema.kept.pop();
        (schema.dense, schema.groups) = (vec![], vec![]);
        assert!(schema.validate().unwrap_err().to_string().starts_with("the schema has no feature"));
        assert!(!serde_json::to_string(&super::tests::schema()).unwrap().contains("kept"));
    }

    #[test]
    fn a_schema_needs_a_label_and_a_feature() {
        let mut unlabelled = schema();
        unlabelled.labels.clear();
        assert!(unlabelled.validate().unwrap_err().to_string().starts_with("the schema has no label"));
        let mut bare = schema();
        bare.dense.clear();
        bare.groups.clear();
        assert!(bare.validate().unwrap_err().to_string().starts_with("the schema has no feature"));
    }
}
