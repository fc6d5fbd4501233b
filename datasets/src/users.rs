//! Identifies the samples of given users in a dataset.
//!
//! A dataset has no user column. It has session ids, which are [hashes](crate::session_id) of the user (or
//! the session key), the values of the partition columns, and the start of the session. For a known user,
//! these ids can be computed again. The 16 high bits of the id select the candidate sessions, and a session
//! belongs to the user if its full id equals the computed one. If session ids do not identify users, a
//! kept column does.

use std::collections::{HashMap, HashSet};

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::Int64Type;
use onefold_base::fault::{option, text};
use onefold_storage::Storage;

use crate::identity::{identity_bits, identity_bits_of_session};
use crate::snapshot::RowStatistics;
use crate::{
    Error, FeatureStatistics, IDENTITY_SEPARATOR, IdEncoding, KeptColumn, ManifestEntry, PartitionColumn,
    PartitionKey, PartitionType, Result, RowGroup, Sessions, Snapshot, SparseFeature, Vocabulary,
    bucket_of_identity, session_id, suggest,
};

/// A list of users as read from a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserKeys {
    /// The names of the columns; `None` for a single column without a name.
    pub columns: Option<Vec<String>>,
    /// The values of each user, formatted like `CAST(… AS VARCHAR)`; `None` for a missing value. The shape
    /// is `[users][columns]`.
    pub rows: Vec<Vec<Option<String>>>,
}

/// The users to find in a dataset.
#[derive(Debug)]
pub(crate) struct Users {
    /// The values of the session key's columns, or of the kept column, for each distinct user.
    keys: Vec<Vec<String>>,
    /// The way in which users are identified.
    pub(crate) told: Told,
    /// The users by their values of the [column](Self::column). It is empty if there is no such column.
    pub(crate) by_text: HashMap<String, usize>,
}

/// The way in which users are identified.
#[derive(Debug)]
pub(crate) enum Told {
    /// By session ids.
    BySessions(BySessions),
    /// By a kept column.
    ByColumn(KeptColumn),
}

/// Identifies users by session ids.
#[derive(Debug)]
pub(crate) struct BySessions {
    /// The columns of the session key, or the user column.
    columns: Vec<String>,
    /// The users, by the high bits of their session ids.
    by_bits: HashMap<u64, Vec<usize>>,
    /// Whether each bucket can contain sessions of a user.
    buckets: Vec<bool>,
    /// The possible numbers of trailing partition columns that are computed from the start of a session.
    /// There can be several, because the snapshot does not record whether a column `date` comes from the
    /// logs.
    made: Vec<usize>,
}

/// The feature that identifies users, its vocabulary if it has one, and the users by their ids.
pub(crate) type UsersFeature<'s> = (&'s SparseFeature, Option<Vocabulary>, HashMap<i64, usize>);

impl Users {
    /// Prepares the search for the users of `keys` in a dataset. `column` is the kept column that
    /// identifies users, if session ids do not.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the dataset cannot identify users in this way, or if `keys` lacks the required
    /// columns.
    pub(crate) fn new(snapshot: &Snapshot, keys: &UserKeys, column: Option<&str>) -> Result<Self> {
        if let Some(name) = column {
            let known = snapshot.schema.kept.iter();
            let Some(kept) = known.clone().find(|kept| kept.name == name) else {
                let hint = format!(
                    "build the dataset with `keep = [\"{name}\"]`, or name one of its kept columns: {}",
                    suggest(name, known.map(|kept| kept.name.as_str()))
                );
                return Err(Error::schema(format!("the dataset keeps no column `{name}`"), hint));
            };
            return Ok(Self::told(values_of(keys, &[name.to_owned()])?, Told::ByColumn(kept.clone())));
        }
        let columns = match &snapshot.sessions {
            Some(Sessions::Key(columns)) => columns.clone(),
            Some(Sessions::Gap { user, .. }) => vec![user.clone()],
            None => {
                let message = "the dataset does not say what its sessions were made from";
                return Err(Error::schema(message, "build it anew with `onefold-ingest build`"));
            }
        };
        let keys = values_of(keys, &columns)?;
        let mut by_bits: HashMap<u64, Vec<usize>> = HashMap::new();
        let mut buckets = vec![false; snapshot.buckets as usize];
        for (user, key) in keys.iter().enumerate() {
            let identity = joined(key.iter().map(String::as_str));
            by_bits.entry(identity_bits(&identity)).or_default().push(user);
            buckets[bucket_of_identity(&identity, snapshot.buckets) as usize] = true;
        }
        let made = made_columns(&snapshot.partition_columns);
        Ok(Self::told(keys, Told::BySessions(BySessions { columns, by_bits, buckets, made })))
    }

    fn told(keys: Vec<Vec<String>>, told: Told) -> Self {
        let mut users = Self { keys, told, by_text: HashMap::new() };
        if users.column().is_some() {
            let numbered = users.keys.iter().enumerate();
            users.by_text = numbered.filter_map(|(user, key)| Some((key.first()?.clone(), user))).collect();
        }
        users
    }

    /// Returns the number of users.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the text that represents a user in messages.
    pub(crate) fn shown(&self, user: usize) -> String {
        self.keys[user].join(", ")
    }

    /// Returns the column that alone identifies a user, if there is one. The dataset may have a feature
    /// with this name.
    pub(crate) fn column(&self) -> Option<&str> {
        match &self.told {
            Told::ByColumn(column) => Some(&column.name),
            Told::BySessions(BySessions { columns, .. }) => match columns.as_slice() {
                [column] => Some(column),
                _ => None,
            },
        }
    }

    /// Returns whether a row group can have samples of one of the users.
    pub(crate) fn may_be_in(&self, row_group: &RowGroup) -> bool {
        match &self.told {
            Told::ByColumn(..) => true,
            Told::BySessions(BySessions { buckets, .. }) => {
                let inside = buckets.iter().skip(row_group.bucket as usize);
                let number = row_group.last_bucket().saturating_sub(row_group.bucket) as usize + 1;
                inside.take(number).any(|is_of_user| *is_of_user)
            }
        }
    }

    /// Returns the feature of a snapshot that is the users' [column](Self::column), its vocabulary if it has
    /// one, and the users by their ids.
    pub(crate) fn feature<'s>(
        &self,
        storage: &Storage,
        snapshot: &'s Snapshot,
    ) -> Result<Option<UsersFeature<'s>>> {
        let mut features = snapshot.schema.sparse_features();
        let Some(feature) = features.find(|feature| self.column() == Some(feature.name.as_str())) else {
            return Ok(None);
        };
        let vocabulary = match &feature.vocabulary {
            None => None,
            Some(name) => {
                let Some(file) = snapshot.vocabularies.get(name) else { return Ok(None) };
                Some(Vocabulary::read(storage, file)?)
            }
        };
        let id = |key: &String| match (&vocabulary, feature.ids) {
            (Some(vocabulary), _) => Some(vocabulary.id_of_key(key)).filter(|id| *id > 0),
            (None, Some(IdEncoding::Hash)) => Some(crate::hash_id(key.as_bytes())),
            (None, None) => key.parse::<i64>().ok(),
        };
        let ids = self.keys.iter().enumerate();
        let ids = ids.filter_map(|(user, key)| Some((id(key.first()?)?, user))).collect();
        Ok(Some((feature, vocabulary, ids)))
    }

    /// Returns the row groups of a manifest whose statistics have an id of a user as the smallest or
    /// largest id of a feature, each with a message. This includes row groups that no longer belong to any
    /// snapshot.
    pub(crate) fn in_manifest(
        &self,
        storage: &Storage,
        snapshot: &Snapshot,
        entry: &ManifestEntry,
        (feature, ids): (&SparseFeature, &HashMap<i64, usize>),
    ) -> Result<Vec<(usize, String)>> {
        let mut found = Vec::new();
        let place = snapshot.schema.sparse_features().position(|other| other.name == feature.name);
        let Some(place) = place.filter(|_| !ids.is_empty() && !entry.changes.lacks(&feature.name)) else {
            return Ok(found);
        };
        let mut statistics = RowStatistics::open(storage, entry, &snapshot.schema)?;
        for number in 0..statistics.len() {
            let of_row_group = statistics.get(number, false)?;
            let messages = self.in_statistics(of_row_group.features[place], ids);
            found.extend(messages.into_iter().map(|message| (number, message)));
        }
        Ok(found)
    }

    /// Returns a message for each end of the id range, smallest and largest, that is an id of a user.
    pub(crate) fn in_statistics(
        &self,
        statistics: FeatureStatistics,
        ids: &HashMap<i64, usize>,
    ) -> Vec<String> {
        let ends = [("smallest", statistics.min_id), ("largest", statistics.max_id)];
        let user = |(what, id): (&str, Option<i64>)| {
            let user = ids.get(&id?)?;
            Some(format!("its {what} id is that of user `{}`", self.shown(*user)))
        };
        ends.into_iter().filter_map(user).collect()
    }
}

impl BySessions {
    /// Returns whether a session can belong to a user, judged by the high bits of its id.
    pub(crate) fn may_be(&self, session: i64) -> bool {
        self.by_bits.contains_key(&identity_bits_of_session(session))
    }

    /// Returns the user of a session that starts at `start` in a partition, if it belongs to one of
    /// `users`.
    pub(crate) fn find(
        &self,
        users: &Users,
        partition: &PartitionKey,
        session: i64,
        start: i64,
    ) -> Option<usize> {
        let candidates = self.by_bits.get(&identity_bits_of_session(session))?;
        candidates.iter().copied().find(|user| {
            let key = &users.keys[*user];
            self.made.iter().any(|made| self.session(key, partition, *made, start) == Some(session))
        })
    }

    /// Computes the session id for a user and a start time, if the last `made` partition columns are
    /// computed from the start. Returns `None` if the partition has another value of one of the session
    /// key's columns.
    fn session(&self, key: &[String], partition: &PartitionKey, made: usize, start: i64) -> Option<i64> {
        let values = partition.columns();
        let values = &values[..values.len().saturating_sub(made)];
        let mut parts: Vec<&str> = values.iter().map(|(_, value)| value.as_str()).collect();
        for (column, value) in self.columns.iter().zip(key) {
            match values.iter().find(|(name, _)| name == column) {
                None => parts.push(value),
                Some((_, of_partition)) if of_partition == value => {}
                Some(_) => return None,
            }
        }
        let start = start.to_string();
        let instance = joined(parts.into_iter().chain([start.as_str()]));
        Some(session_id(&joined(key.iter().map(String::as_str)), &instance))
    }
}

/// Returns the value of a kept column in a row as text; `None` for a null.
pub(crate) fn text_of(values: &ArrayRef, row: usize) -> Option<String> {
    if values.is_null(row) {
        return None;
    }
    Some(match values.as_string_opt::<i32>() {
        Some(texts) => texts.value(row).to_owned(),
        None => values.as_primitive_opt::<Int64Type>()?.value(row).to_string(),
    })
}

/// Joins texts in the form that [`session_id`] takes.
fn joined<'t>(texts: impl Iterator<Item = &'t str>) -> String {
    let texts: Vec<&str> = texts.collect();
    texts.join(IDENTITY_SEPARATOR.to_string().as_str())
}

/// Returns the possible numbers of trailing partition columns that are computed from the start of sessions.
fn made_columns(columns: &[PartitionColumn]) -> Vec<usize> {
    let is = |column: &PartitionColumn, name: &str, kind: PartitionType| {
        column.name == name && column.kind == kind
    };
    match columns {
        [.., date, hour]
            if is(date, "date", PartitionType::Date) && is(hour, "hour", PartitionType::Integer) =>
        {
            vec![2, 0]
        }
        [.., date] if is(date, "date", PartitionType::Date) => vec![1, 0],
        _ => vec![0],
    }
}

/// Returns the values of the `wanted` columns for each distinct user.
fn values_of(keys: &UserKeys, wanted: &[String]) -> Result<Vec<Vec<String>>> {
    let quoted = wanted.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let hint = |start: &str| {
        let kept = "), which a dataset has with `keep` in `dataset.toml`";
        text![start, ", or tell users by a kept column (", option("column"), kept]
    };
    let places = match &keys.columns {
        None if wanted.len() == 1 => vec![0],
        None => {
            let message =
                format!("sessions of the dataset are those of the columns {quoted}, not of one column");
            return Err(Error::schema(message, hint("give a CSV or Parquet file with these columns")));
        }
        Some(names) => {
            let place = |name: &String| names.iter().position(|known| known == name);
            let places: Option<Vec<usize>> = wanted.iter().map(place).collect();
            places.ok_or_else(|| {
                let message = format!(
                    "the dataset tells users by {quoted}, but the list of users has the columns `{}`",
                    names.join("`, `")
                );
                Error::schema(message, hint("give the list these columns"))
            })?
        }
    };
    let (mut seen, mut values) = (HashSet::new(), Vec::new());
    for (number, row) in keys.rows.iter().enumerate() {
        let key: Option<Vec<String>> = places.iter().map(|place| row.get(*place)?.clone()).collect();
        let Some(key) = key else {
            let message = format!("user {} of the list has no value of {quoted}", number + 1);
            return Err(Error::schema(message, "leave the user out, or give the value"));
        };
        if seen.insert(key.clone()) {
            values.push(key);
        }
    }
    Ok(values)
}
