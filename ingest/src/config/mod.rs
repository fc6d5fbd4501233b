//! `dataset.toml`: the location of the raw logs, the definition of samples, and the kind of each column. Each
//! section has its own module.

mod columns;
mod delta;
mod features;
mod joins;
mod keep;
mod rows;
mod samples;
mod sources;
mod tables;
mod timelines;
mod times;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use onefold_base::units;
use onefold_base::versioned::parse_toml;
use onefold_datasets::{MOST_BUCKETS, Schema, Sessions, SparseKind, suggest};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

pub use self::columns::Policy;
use self::columns::{once, wrong};
pub use self::delta::{DeltaAppend, DeltaConfig, DeltaVersion};
pub use self::features::VocabularyConfig;
pub use self::joins::{AttributesConfig, Credit, JoinConfig, LabelConfig, MissingAttributes, MissingEvents};
pub use self::samples::{ChecksConfig, Rows, SamplesConfig, SamplingConfig};
pub(crate) use self::sources::credentials_hint;
pub use self::sources::{Compression, Format, MissingColumns, ObjectStores, Quote, Ragged, SourceConfig};
pub use self::timelines::TimelineConfig;
pub use self::times::{EpochUnit, TimeConfig};
use crate::error::{Error, MessageAndHint, Result};

/// The version of `dataset.toml` that this program reads.
const FORMAT_VERSION: u32 = 1;

/// The prefix of the tables, columns and functions that the ETL creates. Users' names must not begin with it.
pub(crate) const RESERVED: &str = "__onefold_";

/// Returns a URL unchanged, and makes a path absolute. Relative paths start at the working directory.
fn from_here(path: &str) -> Result<String> {
    let Some(path) = onefold_storage::absolute_pattern(path)? else { return Ok(path.to_owned()) };
    let path = path.into_os_string().into_string().map_err(|path| {
        let message = format!("`{}` is not UTF-8 text", path.display());
        std::io::Error::new(std::io::ErrorKind::InvalidInput, message)
    })?;
    Ok(path)
}

/// A checked `dataset.toml`.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The path of the file. Paths of sources are relative to its directory.
    pub path: PathBuf,
    /// The sources of files, by the name of their table in the query.
    pub sources: BTreeMap<String, SourceConfig>,
    /// The sources that are defined by a query over the tables of files, by name of their table.
    pub source_queries: BTreeMap<String, String>,
    /// The settings for access to the buckets of remote sources.
    pub object_stores: ObjectStores,
    /// The definition of the samples.
    pub samples: SamplesConfig,
    /// The event log from which labels are computed.
    pub join: Option<JoinConfig>,
    /// Attributes from other sources, valid at the samples' times, in the order of the sections.
    pub attributes: Vec<AttributesConfig>,
    /// Negative down-sampling.
    pub sampling: Option<SamplingConfig>,
    /// The window features that the ETL computes, in the order of the sections.
    pub timelines: Vec<TimelineConfig>,
    /// The rows that are refused or skipped; `None` without `[checks]`.
    pub checks: Option<ChecksConfig>,
    /// The definition of sessions.
    pub session: Sessions,
    /// The time column of the samples.
    pub time: TimeConfig,
    /// Columns that order samples of a session with equal times.
    pub order: Vec<String>,
    /// Columns of the samples whose values define partitions.
    pub partition_columns: Vec<String>,
    /// Whether partitions are also divided by the start of the session.
    pub partition_by: Option<PartitionBy>,
    /// The number of ranges of buckets of a new dataset, if it is configured.
    pub buckets: Option<u32>,
    /// The dataset's schema, in the order of `[features]`.
    pub schema: Schema,
    /// The columns of the samples that the dataset keeps in addition to the features. Their types are known only
    /// from the samples, so [`schema`](Self::schema) does not contain them.
    pub keep: Vec<String>,
    /// The vocabularies that features use.
    pub vocabularies: BTreeMap<String, VocabularyConfig>,
}

/// The division of partitions by time. The start of the sample's session decides, so that a session is in one
/// partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartitionBy {
    /// By day, `date=YYYY-MM-DD`, in UTC.
    Day,
    /// By hour, `date=YYYY-MM-DD/hour=HH`, in UTC.
    Hour,
}

/// The kind of a column of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureKind {
    /// A target of the model: a number or boolean.
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

impl FeatureKind {
    /// Returns the name of the kind in messages.
    pub(crate) fn described(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Weight => "weight",
            Self::Dense => "dense feature",
            Self::Sparse => "sparse feature",
            Self::Sequence => "sequence",
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Checked by [`parse_toml`].
    #[serde(rename = "format_version")]
    _format_version: u32,
    #[serde(default)]
    keep: Vec<String>,
    sources: toml::Table,
    #[serde(default)]
    object_stores: toml::Table,
    samples: samples::SamplesSection,
    join: Option<joins::JoinSection>,
    #[serde(default)]
    attributes: Vec<joins::AttributesSection>,
    sampling: Option<samples::SamplingSection>,
    #[serde(default)]
    timelines: Vec<timelines::TimelineSection>,
    checks: Option<samples::ChecksSection>,
    session: Option<Session>,
    #[serde(default)]
    partition: Partition,
    #[serde(default)]
    dataset: Dataset,
    features: toml::Table,
    #[serde(default)]
    vocabularies: BTreeMap<String, VocabularyConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dataset {
    buckets: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Session {
    #[serde(default)]
    key: Vec<String>,
    user: Option<String>,
    gap: Option<String>,
    time: Option<toml::Value>,
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

impl Config {
    /// Reads and checks a `dataset.toml`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be read; [`Error::Fault`], with line or key, if it is not TOML, has an unknown
    /// key or another version, defines sessions not at all or twice, or has invalid features.
    pub fn load(path: &Path) -> Result<Self> {
        Self::parse(path, &fs_err::read_to_string(path)?)
    }

    /// Replaces the paths of the only source by these files, folders, patterns or URLs. Relative paths start at the
    /// working directory.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if there are several sources; [`Error::Io`] if there is no working directory, or its path
    /// is not UTF-8 text.
    pub fn set_input(&mut self, paths: &[String]) -> Result<()> {
        let mut sources = self.sources.values_mut();
        let (Some(source), None) = (sources.next(), sources.next()) else {
            let names: Vec<&str> = self.sources.keys().map(String::as_str).collect();
            return Err(Error::config(
                &self.path,
                format!(
                    "an input replaces the files of the only source, and there are several: {}",
                    names.join(", ")
                ),
                "name the files in the configuration",
            ));
        };
        if source.delta.is_some() {
            return Err(Error::config(
                &self.path,
                "an input cannot replace a Delta Lake table",
                "choose the version of the table in the configuration, or name a source of files there",
            ));
        }
        source.paths = paths.iter().map(|path| from_here(path)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Makes a source read the files at `path` (a file, folder, pattern or URL), with defaults for all other
    /// settings. A relative path starts at the working directory.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if no source of files has this name; [`Error::Io`] if there is no working directory, or its
    /// path is not UTF-8 text.
    pub fn set_source(&mut self, name: &str, path: &str) -> Result<()> {
        let Some(source) = self.sources.get_mut(name) else {
            let hint = suggest(name, self.sources.keys().map(String::as_str));
            return Err(Error::config(&self.path, format!("`[sources]` names no files `{name}`"), hint));
        };
        *source = SourceConfig::new(from_here(path)?);
        Ok(())
    }

    /// Returns a hash of everything that determines the samples and how they are stored. It does not depend on the
    /// path of this file, the paths of the sources' files, or the settings of object stores. It is stable only
    /// within one version of this program.
    pub(crate) fn hash(&self) -> String {
        let mut config = self.clone();
        config.path = PathBuf::new();
        config.object_stores = ObjectStores::default();
        config.sources.values_mut().for_each(|source| source.paths.clear());
        format!("{:032x}", xxh3_128(format!("{} {config:?}", env!("CARGO_PKG_VERSION")).as_bytes()))
    }

    /// Checks the text of a `dataset.toml` that is (or would be) at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`], as for [`load`](Self::load).
    pub fn parse(path: &Path, text: &str) -> Result<Self> {
        Self::checked(path, text).map_err(|(message, hint)| Error::config(path, message, hint))
    }

    fn checked(path: &Path, text: &str) -> Result<Self, MessageAndHint> {
        let file: File = parse_toml(text, FORMAT_VERSION, "the manual's page `dataset.toml` lists all keys")?;
        let (sources, source_queries) = sources::parse_sources(&file.sources)?;
        let names: Vec<&str> = sources.keys().chain(source_queries.keys()).map(String::as_str).collect();
        let reserved = names.iter().find(|name| name.starts_with(RESERVED));
        if let Some(name) = reserved {
            let message = format!("`[sources].{name}`: names that begin with `{RESERVED}` are reserved");
            return Err(wrong(message, "rename the source"));
        }
        let object_stores = sources::parse_object_stores(&file.object_stores)?;
        let (schema, vocabularies) = features::schema(&file.features, file.vocabularies)?;
        schema
            .validate()
            .map_err(|error| wrong(format!("`[features]`: {}", first_line(&error)), "see `[features]`"))?;
        check_partition(&file.partition)?;
        keep::check(&file.keep, &schema, &file.partition)?;
        let samples = file.samples.check(&names)?;
        let rows = samples.by_rows.then(|| rows::time(&samples, &sources)).transpose()?;
        let session = match &rows {
            Some(rows) => rows::sessions(file.session.as_ref(), rows),
            None => session(file.session.as_ref()).map_err(|message| {
                let hint = "write `key = [\"session_id\"]`, or `user = \"user_id\"` with `gap = \"30m\"`";
                wrong(message, hint)
            }),
        }?;
        let join = file.join.map(|join| join.check(&names)).transpose()?;
        let attributes =
            sections("attributes", file.attributes, |place, section| section.check(place, &names))?;
        let sampling = file.sampling.map(|sampling| sampling.check(&samples, schema.weight.as_deref()));
        let sampling = sampling.transpose()?;
        let timelines = sections("timelines", file.timelines, |place, section| {
            section.check(place, &names, join.as_ref(), rows.as_ref(), |name| kind(&schema, name))
        });
        if file.dataset.buckets.is_some_and(|buckets| !(1..=MOST_BUCKETS).contains(&buckets)) {
            let message = "`[dataset].buckets` is not a number of ranges of buckets that a dataset can have";
            return Err(wrong(message, format!("write 1 to {MOST_BUCKETS}")));
        }
        let (time, order) = file.session.map(|session| (session.time, session.order)).unwrap_or_default();
        let time = match (rows, time) {
            (Some(rows), _) => rows,
            (None, Some(time)) => TimeConfig::parse("`[session].time`", time)?,
            (None, None) => {
                let hint = "name the column of the samples' times, as `time = \"timestamp\"`; if the log has only an order of \
                            rows, write `order = \"rows\"` under `[samples]`";
                return Err(wrong("`[session]` has no `time`", hint));
            }
        };
        let config = Self {
            path: path.to_owned(),
            sources,
            source_queries,
            object_stores,
            samples,
            join,
            attributes,
            sampling,
            timelines: timelines?,
            checks: file.checks.map(samples::ChecksSection::check).transpose()?,
            session,
            time,
            order,
            partition_columns: file.partition.columns,
            partition_by: file.partition.by,
            buckets: file.dataset.buckets,
            schema,
            keep: file.keep,
            vocabularies,
        };
        rows::check(&config)?;
        Ok(config)
    }

    /// Returns the columns that identify a session within a partition. If sessions end with a gap, this is the user
    /// column only.
    pub fn session_columns(&self) -> Vec<&str> {
        match &self.session {
            Sessions::Key(columns) => columns.iter().map(String::as_str).collect(),
            Sessions::Gap { user, .. } => vec![user],
        }
    }

    /// Returns the kind of every feature column, in the order of the dataset's columns.
    pub fn feature_columns(&self) -> impl Iterator<Item = (&str, FeatureKind)> {
        feature_columns(&self.schema)
    }

    /// Returns the columns that `[join]` and `[[attributes]]` add to the samples.
    pub(crate) fn joined_columns(&self) -> impl Iterator<Item = &String> {
        let labels = self.join.iter().flat_map(|join| &join.labels).map(|(name, _)| name);
        let attributes = self.attributes.iter().flat_map(|attributes| &attributes.columns);
        labels.chain(attributes.map(|(name, _)| name))
    }

    /// Returns the index of the timeline that produces the feature `name`, and the index of its column in that
    /// timeline; `None` if the feature is a column of the samples.
    pub fn timeline_of(&self, name: &str) -> Option<(usize, usize)> {
        let place =
            |timeline: &TimelineConfig| timeline.columns.iter().position(|(feature, _)| feature == name);
        self.timelines.iter().enumerate().find_map(|(i, timeline)| Some((i, place(timeline)?)))
    }
}

fn feature_columns(schema: &Schema) -> impl Iterator<Item = (&str, FeatureKind)> {
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

fn kind(schema: &Schema, name: &str) -> Option<FeatureKind> {
    feature_columns(schema).find(|(feature, _)| *feature == name).map(|(_, kind)| kind)
}

/// Checks all sections with one name. Messages identify a section by its number.
fn sections<S, C>(
    name: &str,
    sections: Vec<S>,
    check: impl Fn(&str, S) -> Result<C, MessageAndHint>,
) -> Result<Vec<C>, MessageAndHint> {
    let numbered = sections.into_iter().enumerate();
    numbered.map(|(i, section)| check(&format!("`[[{name}]]` {}", i + 1), section)).collect()
}

fn first_line(error: &onefold_datasets::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn session(section: Option<&Session>) -> Result<Sessions, String> {
    let section = section.ok_or("there is no `[session]`")?;
    match (section.key.as_slice(), &section.user, &section.gap) {
        ([_, ..], None, None) => Ok(Sessions::Key(section.key.clone())),
        ([], Some(user), Some(gap)) => {
            let gap_micros =
                units::parse_duration_micros(gap).map_err(|error| format!("`[session].gap`: {error}"))?;
            Ok(Sessions::Gap { user: user.clone(), gap_micros })
        }
        ([], None, None) => Err("`[session]` has neither `key` nor `user` and `gap`".to_owned()),
        ([], _, _) => Err("`[session]` has one of `user` and `gap` without the other".to_owned()),
        _ => Err("`[session]` has both `key` and `user` or `gap`".to_owned()),
    }
}

/// Refuses columns that are listed twice, and columns with the name of a column that `by` makes.
fn check_partition(section: &Partition) -> Result<(), MessageAndHint> {
    once("`[partition].columns`", &section.columns)?;
    let made = section.columns.iter().find(|name| ["date", "hour"].contains(&name.as_str()));
    match (section.by, made) {
        (Some(_), Some(name)) => {
            let message = format!(
                "`[partition].columns` has `{name}`, and `by` makes partition columns `date` and `hour` of the sessions' start"
            );
            let hint =
                format!("remove `by` to partition by the log's `{name}`, or remove `{name}` from `columns`");
            Err((message, hint))
        }
        _ => Ok(()),
    }
}

/// Returns the error for a column that the configuration names and the samples do not have.
pub(crate) fn missing_column(config: &Config, place: &str, column: &str, known: &[&str]) -> Error {
    let lacking = match &config.samples.rows {
        Rows::Query(_) => "the query does not give".to_owned(),
        Rows::Source(source) => format!("neither `{source}` nor another step gives"),
    };
    Error::config(
        &config.path,
        format!("{place} names the column `{column}`, which {lacking}"),
        suggest(column, known.iter().copied()),
    )
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
        assert_eq!(config.session, Sessions::Gap { user: "user_id".into(), gap_micros: 1_800_000_000 });
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
        let query = |source: &str| refused("features = \"features/*.parquet\"", source);
        assert!(query("f = { query = \"SELECT 1\" }").contains("`[sources]` has queries, but no files"));
        assert!(query("f = { query = \" \" }").contains("`[sources].f.query` is not a text"));
        assert!(query("f = { query = \"SELECT 1\", path = \"x\" }").contains("a `query` and also `path`"));
        assert!(refused("[\"split\"]", "[\"split\", \"split\"]").contains("`split` twice"));
        assert!(refused("[\"split\"]", "[\"date\"]").contains("`[partition].columns` has `date`"));
        assert!(refused("[\"split\"]", "[\"hour\"]").contains("remove `by`"));
        let source = refused("features = \"features", "__onefold_rows = \"features");
        assert!(source.contains("`[sources].__onefold_rows`") && source.contains("reserved"), "{source}");
    }
}
