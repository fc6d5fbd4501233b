//! The features that exist while steps are bound to a schema, and their places in a batch.

use onefold_datasets::{
    BATCH_COLUMNS, FeatureGroup, SESSION_COLUMN, Schema, SparseFeature, SparseKind, TIME_COLUMN, suggest,
};

use super::problem::{Checked, Problem};

/// The name of the group of features that are generated from dense features and times.
const PER_SAMPLE: &str = "per_sample";
/// The name of the sample weights that sampling creates.
const WEIGHT: &str = "sample_weight";

/// The place of a sparse feature: the index of its group, and its index in the group. Steps do not change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SparseAt {
    pub(super) group: usize,
    pub(super) feature: usize,
}

/// The place of a dense or sparse feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Column {
    Dense(usize),
    Sparse(SparseAt),
}

/// The kinds of features that an operator accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kinds {
    Dense,
    Sparse,
    Either,
}

/// How a group is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Input,
    /// Generated, with one row per sample.
    PerSample,
    /// Generated, with one row per distinct pair of rows of these two groups.
    Pair(usize, usize),
}

/// The features that exist after the steps bound so far.
#[derive(Debug, Clone)]
pub(super) struct FeatureLayout {
    /// The schema. Some of its groups may have no features yet.
    schema: Schema,
    /// How each group is created.
    origins: Vec<Origin>,
}

impl FeatureLayout {
    pub(super) fn new(schema: &Schema) -> Self {
        Self { schema: schema.clone(), origins: vec![Origin::Input; schema.groups.len()] }
    }

    /// Returns the name and the origin of each group.
    pub(super) fn groups(&self) -> impl Iterator<Item = (&str, Origin)> {
        let names = self.schema.groups.iter().map(|group| group.name.as_str());
        names.zip(self.origins.iter().copied())
    }

    /// Returns the schema, without groups that have no features.
    pub(super) fn to_schema(&self) -> Schema {
        let mut schema = self.schema.clone();
        schema.groups.retain(|group| !group.features.is_empty());
        schema
    }

    fn columns(&self) -> impl Iterator<Item = (&str, Column)> {
        let dense = self.schema.dense.iter().enumerate().map(|(i, name)| (name.as_str(), Column::Dense(i)));
        let sparse = self.schema.groups.iter().enumerate().flat_map(|(group, layout)| {
            layout.features.iter().enumerate().map(move |(feature, sparse)| {
                (sparse.name.as_str(), Column::Sparse(SparseAt { group, feature }))
            })
        });
        dense.chain(sparse)
    }

    /// Returns the features that `inputs` (names and globs) select, each one once.
    pub(super) fn select(&self, inputs: &[String], kinds: Kinds) -> Checked<Vec<Column>> {
        let mut selected = Vec::new();
        for input in inputs {
            let columns = match self.columns().any(|(name, _)| name == input) || !input.contains('*') {
                true => vec![self.find(input, kinds)?],
                false => self.matching(input, kinds)?,
            };
            for column in columns {
                if !selected.contains(&column) {
                    selected.push(column);
                }
            }
        }
        Ok(selected)
    }

    /// Returns the feature `name`.
    pub(super) fn find(&self, name: &str, kinds: Kinds) -> Checked<Column> {
        if let Some((_, column)) = self.columns().find(|(known, _)| *known == name) {
            return match kinds.take(column) {
                true => Ok(column),
                false => Err(Problem::new(
                    format!(
                        "`{name}` is a {} feature, but the operator takes {}",
                        kind(column),
                        kinds.name()
                    ),
                    self.suggest(name, kinds),
                )),
            };
        }
        let other = match name {
            _ if self.schema.labels.iter().any(|label| label == name) => "a label",
            _ if self.schema.weight.as_deref() == Some(name) => "the sample weight",
            _ => {
                let message = format!("there is no feature `{name}`");
                return Err(Problem::new(message, self.suggest(name, kinds)));
            }
        };
        Err(Problem::new(format!("`{name}` is {other}, not a feature"), self.suggest(name, kinds)))
    }

    /// Returns the features that a glob matches.
    fn matching(&self, glob: &str, kinds: Kinds) -> Checked<Vec<Column>> {
        let matches = |(name, column): &(&str, Column)| kinds.take(*column) && matches_glob(glob, name);
        let found: Vec<Column> = self.columns().filter(matches).map(|(_, column)| column).collect();
        if found.is_empty() {
            let message =
                format!("`{glob}` matches no feature of those that the operator takes: {}", kinds.name());
            return Err(Problem::new(message, self.suggest(glob, kinds)));
        }
        Ok(found)
    }

    fn suggest(&self, name: &str, kinds: Kinds) -> String {
        let known = self.columns().filter(|(_, column)| kinds.take(*column));
        suggest(name, known.map(|(name, _)| name))
    }

    /// Returns the index of the label `name`.
    pub(super) fn label(&self, name: &str) -> Checked<usize> {
        self.schema.labels.iter().position(|label| label == name).ok_or_else(|| {
            let hint = suggest(name, self.schema.labels.iter().map(String::as_str));
            Problem::new(format!("there is no label `{name}`"), hint)
        })
    }

    /// Returns the kind of a sparse feature.
    pub(super) fn kind(&self, at: SparseAt) -> SparseKind {
        self.schema.groups[at.group].features[at.feature].kind
    }

    fn check_new(&self, name: &str) -> Checked<()> {
        let used = [SESSION_COLUMN, TIME_COLUMN].contains(&name)
            || self.schema.labels.iter().chain(&self.schema.weight).any(|column| column == name)
            || self.schema.kept.iter().any(|column| column.name == name)
            || self.columns().any(|(column, _)| column == name);
        if used || name.is_empty() {
            let message = format!("the name `{name}` is empty, reserved or already used");
            return Err(Problem::new(message, "give the generated feature a name of its own in `output`"));
        }
        Ok(())
    }

    pub(super) fn add_dense(&mut self, name: &str) -> Checked<usize> {
        self.check_new(name)?;
        self.schema.dense.push(name.to_owned());
        Ok(self.schema.dense.len() - 1)
    }

    pub(super) fn add_sparse(&mut self, group: usize, name: &str, kind: SparseKind) -> Checked<SparseAt> {
        self.check_new(name)?;
        if BATCH_COLUMNS.contains(&name) {
            let message = format!("the name `{name}` is reserved: batches have a column of that name");
            return Err(Problem::new(message, "give the generated feature another name in `output`"));
        }
        let own = &self.schema.groups[group].name;
        let others = self.schema.groups.iter().enumerate().filter(|(i, _)| *i != group);
        if others.map(|(_, other)| other).any(|other| other.name == *own && !other.features.is_empty()) {
            let message =
                format!("the feature group `{own}` exists already, and generated features need that name");
            return Err(Problem::new(
                message,
                "give the group of the dataset another name in `dataset.toml`",
            ));
        }
        let features = &mut self.schema.groups[group].features;
        features.push(SparseFeature::new(name, kind));
        Ok(SparseAt { group, feature: features.len() - 1 })
    }

    /// Returns the group of generated features with one row per sample, and adds it if it does not exist.
    pub(super) fn per_sample(&mut self) -> usize {
        self.group(Origin::PerSample, |_| PER_SAMPLE.to_owned())
    }

    /// Returns the group of features generated from these two groups, in either order, and adds it if it does not
    /// exist.
    pub(super) fn pair(&mut self, left: usize, right: usize) -> usize {
        if left == right {
            return left;
        }
        if let Some(same) = self.origins.iter().position(|origin| *origin == Origin::Pair(right, left)) {
            return same;
        }
        self.group(Origin::Pair(left, right), |layout| {
            let part = |group: usize| match (layout.origins[group], &layout.schema.groups[group].name) {
                (Origin::Pair(..), name) => format!("({name})"),
                (_, name) => name.clone(),
            };
            format!("{}+{}", part(left), part(right))
        })
    }

    fn group(&mut self, origin: Origin, name: impl Fn(&Self) -> String) -> usize {
        if let Some(known) = self.origins.iter().position(|known| *known == origin) {
            return known;
        }
        let (name, groups) = (name(self), &mut self.schema.groups);
        let deduplicated = match origin {
            Origin::Pair(left, right) => groups[left].deduplicated && groups[right].deduplicated,
            _ => false,
        };
        groups.push(FeatureGroup { name, deduplicated, features: Vec::new() });
        self.origins.push(origin);
        self.origins.len() - 1
    }

    /// Adds sample weights if there are none.
    pub(super) fn add_weight(&mut self) -> Checked<()> {
        if self.schema.weight.is_none() {
            self.check_new(WEIGHT).map_err(|_| {
                Problem::new(
                    format!("the weights of the samples need the name `{WEIGHT}`, which is already used"),
                    "write `correct_weights = false`, or rename the column in `dataset.toml`",
                )
            })?;
            self.schema.weight = Some(WEIGHT.to_owned());
        }
        Ok(())
    }
}

impl Kinds {
    fn take(self, column: Column) -> bool {
        matches!(
            (self, column),
            (Self::Either, _) | (Self::Dense, Column::Dense(_)) | (Self::Sparse, Column::Sparse(_))
        )
    }

    fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense features",
            Self::Sparse => "sparse features",
            Self::Either => "dense and sparse features",
        }
    }
}

fn kind(column: Column) -> &'static str {
    match column {
        Column::Dense(_) => "dense",
        Column::Sparse(_) => "sparse",
    }
}

/// Returns whether `name` matches `glob`, in which each `*` matches any text.
fn matches_glob(glob: &str, name: &str) -> bool {
    let mut parts = glob.split('*');
    let Some(mut rest) = parts.next().and_then(|start| name.strip_prefix(start)) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(end) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(place) => rest = &rest[place + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_any_text() {
        let matches = [
            ("*", ""),
            ("*", "a"),
            ("user_*", "user_"),
            ("user_*", "user_id"),
            ("*_id", "item_id"),
            ("a*b*c", "abc"),
            ("a*b*c", "axbxbc"),
            ("ab", "ab"),
            ("**", "x"),
            ("a*a", "aa"),
        ];
        for (glob, name) in matches {
            assert!(matches_glob(glob, name), "{glob} {name}");
        }
        for (glob, name) in
            [("user_*", "users"), ("*_id", "id"), ("a*b*c", "acb"), ("ab", "abc"), ("a*a", "a")]
        {
            assert!(!matches_glob(glob, name), "{glob} {name}");
        }
    }
}
