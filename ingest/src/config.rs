//! `dataset.toml`: where the raw logs are, the query that makes samples of them, and what each column is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_datasets::versioned::parse_toml;
use onefold_datasets::{FeatureGroup, Schema, SparseFeature, SparseKind, suggest, units};
use serde::Deserialize;

use crate::{Error, Result};

/// The version of `dataset.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;
/// The name of the group that holds the features which have none.
const UNGROUPED: &str = "ungrouped";

/// A checked `dataset.toml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file this was read from; sources are relative to its directory.
    pub path: PathBuf,
    /// Table name in the query → Parquet file or glob pattern.
    pub sources: BTreeMap<String, PathBuf>,
    /// The SQL query whose rows are the samples.
    pub query: String,
    /// What makes a session.
    pub session: SessionConfig,
    /// The query's column that holds a sample's time.
    pub time: String,
    /// Columns that break ties of time within a session.
    pub order: Vec<String>,
    /// Columns of the query whose values make partitions.
    pub partition_columns: Vec<String>,
    /// Whether partitions are also cut by the session's start.
    pub partition_by: Option<PartitionBy>,
    /// The dataset's schema, in the order of `[features]`.
    pub schema: Schema,
}

/// What makes a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionConfig {
    /// Samples with equal values of these columns.
    Key(Vec<String>),
    /// Samples of one user with no pause longer than the gap.
    Gap {
        /// The column that identifies the user.
        user: String,
        /// The longest pause within a session, in microseconds.
        gap_micros: i64,
    },
}

/// How partitions are cut by time: by the start of the sample's session, so that no session spans two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartitionBy {
    /// `date=YYYY-MM-DD`, UTC.
    Day,
    /// `date=YYYY-MM-DD/hour=HH`, UTC.
    Hour,
}

/// What a column of the query is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureKind {
    /// What the model learns to predict: a number or boolean.
    Label,
    /// The sample's weight: a number.
    Weight,
    /// A number.
    Dense,
    /// An id or a list of ids.
    Sparse,
    /// A list of ids whose order matters, oldest first.
    Sequence,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Looked at by [`parse_toml`].
    #[serde(rename = "format_version")]
    _format_version: u32,
    sources: BTreeMap<String, PathBuf>,
    samples: Samples,
    session: Session,
    #[serde(default)]
    partition: Partition,
    features: toml::Table,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Samples {
    query: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Session {
    #[serde(default)]
    key: Vec<String>,
    user: Option<String>,
    gap: Option<String>,
    time: String,
    #[serde(default)]
    order: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Partition {
    #[serde(default)]
    columns: Vec<String>,
    by: Option<PartitionBy>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Feature {
    kind: FeatureKind,
    group: Option<String>,
}

impl Config {
    /// Reads and checks a `dataset.toml`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be read; [`Error::Config`], with line or key, if it is not TOML, has an
    /// unknown key, another version, no or two definitions of a session, or features that no dataset can have.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Checks the text of a `dataset.toml` that is (or would be) at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`], as [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        let wrong = |message: String, hint: &str| Error::Config {
            path: path.to_owned(),
            message,
            hint: hint.to_owned(),
        };
        let file: File = parse_toml(text, FORMAT_VERSION, "the README shows a whole `dataset.toml`")
            .map_err(|(message, hint)| wrong(message, &hint))?;
        if file.sources.is_empty() {
            return Err(wrong(
                "`[sources]` is empty".to_owned(),
                "name at least one Parquet file, as `events = \"events.parquet\"`",
            ));
        }
        let schema = schema(&file.features).map_err(|(message, hint)| wrong(message, &hint))?;
        schema
            .validate()
            .map_err(|error| wrong(format!("`[features]`: {}", first_line(&error)), "see `[features]`"))?;
        let session = session(&file.session).map_err(|message| {
            wrong(message, "write `key = [\"session_id\"]`, or `user = \"user_id\"` with `gap = \"30m\"`")
        })?;
        Ok(Self {
            path: path.to_owned(),
            sources: file.sources,
            query: file.samples.query,
            session,
            time: file.session.time,
            order: file.session.order,
            partition_columns: file.partition.columns,
            partition_by: file.partition.by,
            schema,
        })
    }

    /// The columns that identify a session within a partition and, for a gap, the user alone.
    pub fn session_columns(&self) -> Vec<&str> {
        match &self.session {
            SessionConfig::Key(columns) => columns.iter().map(String::as_str).collect(),
            SessionConfig::Gap { user, .. } => vec![user],
        }
    }

    /// The kind of every feature column, in the dataset's column order.
    pub fn feature_columns(&self) -> impl Iterator<Item = (&str, FeatureKind)> {
        let schema = &self.schema;
        let labels = schema.labels.iter().map(|name| (name.as_str(), FeatureKind::Label));
        let weight = schema.weight.iter().map(|name| (name.as_str(), FeatureKind::Weight));
        let dense = schema.dense.iter().map(|name| (name.as_str(), FeatureKind::Dense));
        let sparse = schema.sparse_features().map(|feature| {
            let kind = match feature.kind {
                SparseKind::Sparse => FeatureKind::Sparse,
                SparseKind::Sequence => FeatureKind::Sequence,
            };
            (feature.name.as_str(), kind)
        });
        labels.chain(weight).chain(dense).chain(sparse)
    }
}

fn first_line(error: &onefold_datasets::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn session(section: &Session) -> Result<SessionConfig, String> {
    match (section.key.as_slice(), &section.user, &section.gap) {
        ([_, ..], None, None) => Ok(SessionConfig::Key(section.key.clone())),
        ([], Some(user), Some(gap)) => {
            let gap_micros =
                units::parse_duration_micros(gap).map_err(|error| format!("`[session].gap`: {error}"))?;
            Ok(SessionConfig::Gap { user: user.clone(), gap_micros })
        }
        ([], None, None) => Err("`[session]` says nothing about what makes a session".to_owned()),
        ([], _, _) => Err("`[session]` has one of `user` and `gap` without the other".to_owned()),
        _ => Err("`[session]` has both `key` and `user` or `gap`".to_owned()),
    }
}

/// Builds the schema of `[features]`; an error is a message and a hint.
fn schema(features: &toml::Table) -> Result<Schema, (String, String)> {
    let mut schema = Schema { labels: vec![], weight: None, dense: vec![], groups: vec![] };
    let mut ungrouped = Vec::new();
    for (name, value) in features {
        let feature: Feature = value.clone().try_into().map_err(|error: toml::de::Error| {
            let hint = "kinds are `label`, `weight`, `dense`, `sparse`, `sequence`; write `{ kind = \"sparse\", group = \"user\" }`";
            (format!("`[features].{name}`: {}", error.message()), hint.to_owned())
        })?;
        let sparse = |kind| SparseFeature { name: name.clone(), kind };
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
    Ok(schema)
}

/// The error for a column that configuration names and the query lacks.
pub(crate) fn missing_column(config: &Config, place: &str, column: &str, known: &[&str]) -> Error {
    Error::Config {
        path: config.path.clone(),
        message: format!("{place} names the column `{column}`, which the query does not give"),
        hint: suggest(column, known.iter().copied()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"
format_version = 1
[sources]
features = "features/*.parquet"
[samples]
query = "SELECT * FROM features"
[session]
user = "user_id"
gap = "30m"
time = "timestamp"
order = ["request_id"]
[partition]
columns = ["split"]
by = "hour"
[features]
label = { kind = "label" }
item_id = { kind = "sparse" }
age = { kind = "dense" }
user_id = { kind = "sparse", group = "user" }
history = { kind = "sequence", group = "history" }
zip = { kind = "sparse", group = "user" }
"#;

    fn parse(text: &str) -> Result<Config> {
        Config::parse(Path::new("dataset.toml"), text)
    }

    fn refused(from: &str, to: &str) -> String {
        assert!(WHOLE.contains(from));
        parse(&WHOLE.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn groups_keep_the_order_in_which_they_are_written() {
        let config = parse(WHOLE).unwrap();
        let columns: Vec<_> = config.feature_columns().map(|(name, _)| name).collect();
        assert_eq!(columns, ["label", "age", "user_id", "zip", "history", "item_id"]);
        let groups: Vec<_> = config.schema.groups.iter().map(|g| (g.name.as_str(), g.deduplicated)).collect();
        assert_eq!(groups, [("user", true), ("history", true), ("ungrouped", false)]);
        assert_eq!(config.session, SessionConfig::Gap { user: "user_id".into(), gap_micros: 1_800_000_000 });
        assert_eq!(config.partition_by, Some(PartitionBy::Hour));
    }

    #[test]
    fn every_mistake_names_its_place() {
        assert!(refused("format_version = 1", "format_version = 7").contains("`format_version` is 7"));
        assert!(refused("kind = \"dense\"", "kind = \"dens\"").contains("`[features].age`"));
        assert!(refused("gap = \"30m\"", "gap = \"half an hour\"").contains("`[session].gap`"));
        assert!(refused("gap = \"30m\"\n", "").contains("without the other"));
        assert!(refused("gap = \"30m\"", "key = [\"a\"]").contains("has both"));
        assert!(refused("[partition]", "[partitions]").contains("partitions"));
        assert!(refused("label = { kind = \"label\" }", "").contains("no label"));
        assert!(
            refused("age = { kind = \"dense\" }", "age = { kind = \"dense\", group = \"g\" }")
                .contains("only sparse")
        );
        assert!(refused("features = \"features/*.parquet\"", "").contains("`[sources]` is empty"));
    }
}
