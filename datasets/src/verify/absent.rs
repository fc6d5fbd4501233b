//! Checks that a dataset contains no data of given users.
//!
//! ```text
//! snapshots      the totals of all existing snapshots
//! manifests      the statistics of all row groups, including row groups that belong to no snapshot any more
//! data files     session ids, and the kept column and the feature with the name of the users' column
//! vocabularies   the originals of this feature
//! ```

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use arrow::array::Array;
use onefold_base::progress::Reporter;
use onefold_storage::Storage;
use serde::Serialize;

use super::MOST_PROBLEMS;
use super::files::unnamed_files;
use crate::forget::sessions::Search;
use crate::names::snapshot_path;
use crate::scan::OpenFiles;
use crate::snapshot::{numbers, unless_removed};
use crate::users::{Told, UserKeys, Users, text_of};
use crate::{FileSet, Partition, Problem, Result, Snapshot, SparseFeature};

/// The result of [`absent()`]: the searched data, and the places where data of the users was found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Absence {
    /// The numbers of the searched snapshots.
    pub snapshots: Vec<u64>,
    /// The number of distinct users in the list.
    pub users: usize,
    /// The number of samples in the files that were read, each file counted once.
    pub samples: u64,
    /// The number of places with data of the users.
    pub places_found: usize,
    /// The first [`MOST_PROBLEMS`] of these places.
    pub places: Vec<Problem>,
    /// The files that no snapshot lists. They were not read.
    pub files_not_read: Vec<String>,
    /// The duration in seconds.
    pub wall_seconds: f64,
}

/// Searches for users in the snapshot `at` of the dataset in `storage`, or in all existing snapshots.
/// `column` is the kept column that identifies users, if session ids do not.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the newest snapshot cannot identify users in this way;
/// otherwise the errors of [`verify`](super::verify()). A damaged file is also an error, because it cannot
/// be searched.
pub fn absent(
    storage: &Storage,
    keys: &UserKeys,
    column: Option<&str>,
    at: Option<u64>,
    reporter: &dyn Reporter,
) -> Result<Absence> {
    let started = Instant::now();
    let newest = Snapshot::load_from(storage, at)?;
    let mut absence = Absence { users: Users::new(&newest, keys, column)?.len(), ..Absence::default() };
    let older = match at {
        Some(_) => Vec::new(),
        None => numbers(storage, None)?.into_iter().filter(|number| *number < newest.snapshot).collect(),
    };
    if at.is_none() {
        absence.files_not_read =
            unnamed_files(storage, &newest)?.into_iter().map(|problem| problem.path).collect();
    }
    let mut work = Work { storage, keys, column, reporter, read: HashSet::new() };
    reporter.begin("looking", None, "samples");
    let looked = older
        .into_iter()
        .try_for_each(|number| unless_removed(storage, number, work.older(number, &mut absence)))
        .and_then(|()| {
            let users = Users::new(&newest, keys, column)?;
            unless_removed(storage, newest.snapshot, work.look(&newest, &users, &mut absence))
        });
    reporter.end();
    looked?;
    absence.wall_seconds = started.elapsed().as_secs_f64();
    Ok(absence)
}

/// The state that the searches of all snapshots share.
struct Work<'a> {
    storage: &'a Storage,
    keys: &'a UserKeys,
    column: Option<&'a str>,
    reporter: &'a dyn Reporter,
    /// The paths of manifests and vocabularies, and the names of file sets, that were read.
    read: HashSet<String>,
}

impl Work<'_> {
    /// Searches an older snapshot. If it cannot identify users, this is recorded as a place.
    fn older(&mut self, number: u64, absence: &mut Absence) -> Result<()> {
        let snapshot = Snapshot::load_from(self.storage, Some(number))?;
        match Users::new(&snapshot, self.keys, self.column) {
            Ok(users) => self.look(&snapshot, &users, absence),
            Err(error) => {
                absence.add(Problem::new(snapshot_path(number), error.to_string()));
                absence.snapshots.push(number);
                Ok(())
            }
        }
    }

    fn look(&mut self, snapshot: &Snapshot, users: &Users, absence: &mut Absence) -> Result<()> {
        let search = Search { storage: self.storage, snapshot, users, reporter: self.reporter };
        search.look(&mut self.read, absence)?;
        absence.snapshots.push(snapshot.snapshot);
        Ok(())
    }
}

impl Absence {
    fn add_all(&mut self, places: impl IntoIterator<Item = Problem>) {
        places.into_iter().for_each(|place| self.add(place));
    }

    fn add(&mut self, place: Problem) {
        self.places_found += 1;
        if self.places.len() < MOST_PROBLEMS {
            self.places.push(place);
        }
    }
}

/// The feature that identifies users, and the users by their ids.
type OfFeature<'a> = (&'a SparseFeature, HashMap<i64, usize>);

/// The search of one snapshot.
impl Search<'_> {
    /// Searches everything that is not in `read` yet, and adds it to `read`.
    fn look(&self, read: &mut HashSet<String>, absence: &mut Absence) -> Result<()> {
        let feature = self.feature(read, absence)?;
        if let Some((feature, ids)) = &feature {
            let total = self.snapshot.statistics.features.get(&feature.name).copied().unwrap_or_default();
            let path = snapshot_path(self.snapshot.snapshot);
            let found = self.users.in_statistics(total, ids).into_iter();
            absence.add_all(found.map(|message| Problem::new(&path, message).in_column(&feature.name)));
            for entry in &self.snapshot.manifests {
                if read.insert(entry.path.clone()) {
                    let found =
                        self.users.in_manifest(self.storage, self.snapshot, entry, (*feature, ids))?;
                    absence.add_all(found.into_iter().map(|(row, message)| {
                        Problem::new(&entry.path, message).in_column(&feature.name).in_row(row)
                    }));
                }
            }
        }
        for partition in &self.snapshot.partitions {
            for sets in partition.ranges(self.snapshot.division()) {
                if sets.iter().all(|set| read.contains(&name_of(set))) {
                    continue;
                }
                self.sessions(partition, sets, read, absence)?;
                for set in sets.iter().filter(|set| !read.contains(&name_of(set))) {
                    self.columns(set, feature.as_ref(), absence)?;
                    absence.samples += set.samples;
                }
                read.extend(sets.iter().map(name_of));
            }
        }
        Ok(())
    }

    /// Returns the feature that identifies users, if there is one. Also searches its vocabulary.
    fn feature(&self, read: &mut HashSet<String>, absence: &mut Absence) -> Result<Option<OfFeature<'_>>> {
        let Some((feature, _, ids)) = self.users.feature(self.storage, self.snapshot)? else {
            return Ok(None);
        };
        let vocabulary = feature.vocabulary.as_ref();
        if let Some(file) = vocabulary.and_then(|name| self.snapshot.vocabularies.get(name))
            && read.insert(file.path.clone())
        {
            let mut known: Vec<(&i64, &usize)> = ids.iter().collect();
            known.sort_unstable();
            for (id, user) in known {
                let message = format!("id {id} is that of user `{}`", self.users.shown(*user));
                absence.add(Problem::new(&file.path, message));
            }
        }
        Ok(Some((feature, ids)))
    }

    /// Searches the session ids of a range of buckets.
    fn sessions(
        &self,
        partition: &Partition,
        sets: &[FileSet],
        read: &HashSet<String>,
        absence: &mut Absence,
    ) -> Result<()> {
        // If a kept column identifies users, `columns` searches it.
        if matches!(self.users.told, Told::ByColumn(_)) {
            return Ok(());
        }
        let found = self.in_range(&partition.key, sets)?;
        let mut names: Vec<String> = found.users.iter().map(|user| self.users.shown(*user)).collect();
        names.sort();
        let more = if names.len() > MOST_NAMES { ", …" } else { "" };
        names.truncate(MOST_NAMES);
        for (set, samples) in sets.iter().zip(&found.samples) {
            if *samples > 0 && !read.contains(&name_of(set)) {
                let message =
                    format!("{samples} samples are of sessions of users (`{}`{more})", names.join("`, `"));
                absence.add(Problem::new(set.path(), message));
            }
        }
        Ok(())
    }

    /// Searches the columns of a set that have the name of the users' column.
    fn columns(&self, set: &FileSet, feature: Option<&OfFeature<'_>>, absence: &mut Absence) -> Result<()> {
        let mut kept = self.snapshot.schema.kept.iter();
        let kept = kept.find(|kept| self.users.column() == Some(kept.name.as_str()));
        if feature.is_none_or(|(_, ids)| ids.is_empty()) && kept.is_none() {
            return Ok(());
        }
        let files = OpenFiles::open(self.storage, self.snapshot, set)?;
        let place = |row_group: usize, column: &str, user: usize| {
            let message = format!("it has values of user `{}`", self.users.shown(user));
            Problem::new(set.path(), message).in_row_group(row_group).in_column(column)
        };
        for row_group in 0..files.row_groups() {
            if let Some((feature, ids)) = feature
                && !ids.is_empty()
            {
                let stored = files.stored_ids(row_group, &feature.name)?;
                let user = stored.iter().find_map(|id| ids.get(id));
                absence.add_all(user.map(|user| place(row_group, &feature.name, *user)));
            }
            if let Some(column) = kept {
                let values = files.kept(row_group, column)?;
                let user_of = |row| self.users.by_text.get(text_of(&values, row)?.as_str()).copied();
                let found = (0..values.len()).find_map(|row| Some((row, user_of(row)?)));
                absence.add_all(found.map(|(row, user)| place(row_group, &column.name, user).in_row(row)));
            }
            self.reporter.go_on()?;
        }
        Ok(())
    }
}

/// Returns the name of a set in `read`: the paths of all its files, because a newer snapshot may have added
/// files to the same set.
fn name_of(set: &FileSet) -> String {
    let paths: Vec<&str> = set.files.iter().map(|file| file.path.as_str()).collect();
    paths.join("\n")
}

/// The largest number of users that the message about a range lists.
const MOST_NAMES: usize = 5;
