//! The schema of a dataset: which columns are labels, dense features and sparse features, and which
//! sparse features are deduplicated together.

use std::collections::HashSet;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, TimeUnit};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The column that holds a sample's session: an `Int64`, counted from 0 within a partition.
pub const SESSION_COLUMN: &str = "session_id";
/// The column that holds a sample's time: a `Timestamp` in microseconds since 1970, UTC.
pub const TIME_COLUMN: &str = "timestamp";

/// What the samples of a dataset consist of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// Label columns, one `f32` a sample each.
    pub labels: Vec<String>,
    /// The column of sample weights, if there is one: one `f32` a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// Dense features, one `f32` a sample each.
    pub dense: Vec<String>,
    /// Sparse features by feature group.
    pub groups: Vec<FeatureGroup>,
}

/// Sparse features that are deduplicated together because they change together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureGroup {
    /// The group's name.
    pub name: String,
    /// Whether rows are deduplicated. `false` for features that change with every sample, where looking
    /// for duplicates would only cost.
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

impl Schema {
    /// All sparse features, by group and then column order.
    pub fn sparse_features(&self) -> impl Iterator<Item = &SparseFeature> {
        self.groups.iter().flat_map(|group| &group.features)
    }

    /// The `f32` columns: labels, then the weight, then dense features.
    pub fn float_columns(&self) -> impl Iterator<Item = &str> {
        let labels = self.labels.iter().map(String::as_str);
        labels.chain(self.weight.as_deref()).chain(self.dense.iter().map(String::as_str))
    }

    /// The columns of a `rows` data file: [`SESSION_COLUMN`], [`TIME_COLUMN`], the [`f32`
    /// columns](Self::float_columns), then a `List<Int64>` for every sparse feature. None is nullable.
    pub fn to_arrow(&self) -> SchemaRef {
        let mut fields = vec![
            Field::new(SESSION_COLUMN, DataType::Int64, false),
            Field::new(TIME_COLUMN, DataType::Timestamp(TimeUnit::Microsecond, None), false),
        ];
        fields.extend(self.float_columns().map(|name| Field::new(name, DataType::Float32, false)));
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        fields.extend(
            self.sparse_features()
                .map(|feature| Field::new(&feature.name, DataType::List(Arc::clone(&item)), false)),
        );
        Arc::new(ArrowSchema::new(fields))
    }

    /// Checks that a dataset can have this schema.
    ///
    /// # Errors
    ///
    /// [`Error::Schema`] if there is no label or no feature, a column or group name is used twice or is
    /// empty, a group is empty, or a column has one of the two reserved names.
    pub fn validate(&self) -> Result<()> {
        let wrong = |message: String, hint: &str| Err(Error::Schema { message, hint: hint.to_owned() });
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

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        let feature = |name: &str| SparseFeature { name: name.into(), kind: SparseKind::Sparse };
        Schema {
            labels: vec!["clicked".into()],
            weight: None,
            dense: vec!["age".into()],
            groups: vec![FeatureGroup {
                name: "user".into(),
                deduplicated: true,
                features: vec![feature("user_id")],
            }],
        }
    }

    #[test]
    fn arrow_columns_stand_in_declared_order() {
        let arrow = schema().to_arrow();
        let names: Vec<_> = arrow.fields().iter().map(|field| field.name().as_str()).collect();
        assert_eq!(names, ["session_id", "timestamp", "clicked", "age", "user_id"]);
        assert!(arrow.fields().iter().all(|field| !field.is_nullable()));
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
