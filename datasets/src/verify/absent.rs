//! Proves that a dataset has nothing of some users.
//!
//! ```text
//! snapshots      all that exist: their totals, and what they name
//! manifests      the statistics of all row groups, also of those that no snapshot counts any more
//! data files     ids of sessions, the kept column and the feature that have the name of the users' column
//! vocabularies   the originals of that feature
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
use crate::snapshot::numbers;
use crate::users::{Told, UserKeys, Users, text_of};
use crate::{FileSet, Partition, Problem, Result, Snapshot, SparseFeature};

/// What was looked at, and what was found of the users.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Absence {
    /// Numbers of the snapshots that were read.
    pub snapshots: Vec<u64>,
    /// Users of the list, each counted once.
    pub users: usize,
    /// Samples of the files that were read, each counted once.
    pub samples: u64,
    /// In how many places something of the users was found.
    pub places_found: usize,
    /// The first [`MOST_PROBLEMS`] of them.
    pub places: Vec<Problem>,
    /// Files that no snapshot names, which were not read.
    pub files_not_read: Vec<String>,
    /// Time that it took.
    pub wall_seconds: f64,
}

/// Looks for users in the snapshot `at` of the dataset in `storage`, or in all that exist. `column` is the kept column
/// that tells users, if sessions do not.
///
/// # Errors
///
/// [`Error::Fault`](crate::Error::Fault) if the newest snapshot cannot tell users so, and as
/// [`verify`](super::verify()); a damaged file is an error, because nothing can be said of it.
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
        .try_for_each(|number| work.older(number, &mut absence))
        .and_then(|()| work.look(&newest, &Users::new(&newest, keys, column)?, &mut absence));
    reporter.end();
    looked?;
    absence.wall_seconds = started.elapsed().as_secs_f64();
    Ok(absence)
}

/// What the snapshots have in common.
struct Work<'a> {
    storage: &'a Storage,
    keys: &'a UserKeys,
    column: Option<&'a str>,
    reporter: &'a dyn Reporter,
    /// Paths of what was read.
    read: HashSet<String>,
}

impl Work<'_> {
    /// Looks at a snapshot that may not tell users as the newest one does.
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
        let looking = Looking { storage: self.storage, snapshot, users, reporter: self.reporter };
        looking.look(&mut self.read, absence)?;
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

/// Looks for users in a snapshot.
struct Looking<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    users: &'a Users,
    reporter: &'a dyn Reporter,
}

/// The users' feature, and the users by its ids.
type OfFeature<'a> = (&'a SparseFeature, HashMap<i64, usize>);

impl Looking<'_> {
    /// Looks at all that was not `read` before, by path.
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

    /// The users' feature, if there is one. Looks at its vocabulary.
    fn feature(&self, read: &mut HashSet<String>, absence: &mut Absence) -> Result<Option<OfFeature<'_>>> {
        let Some((feature, ids)) = self.users.feature(self.storage, self.snapshot)? else { return Ok(None) };
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

    /// Looks at the ids of sessions in a range.
    fn sessions(
        &self,
        partition: &Partition,
        sets: &[FileSet],
        read: &HashSet<String>,
        absence: &mut Absence,
    ) -> Result<()> {
        let Self { storage, snapshot, users, reporter } = *self;
        // Where a kept column tells users, it is looked at with the other columns.
        if matches!(users.told(), Told::ByColumn(..)) {
            return Ok(());
        }
        let found = Search { storage, snapshot, users, reporter }.in_range(&partition.key, sets)?;
        let mut names: Vec<String> = found.users.iter().map(|user| users.shown(*user)).collect();
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

    /// Looks at the columns of a set that have the name of the users' column.
    fn columns(&self, set: &FileSet, feature: Option<&OfFeature<'_>>, absence: &mut Absence) -> Result<()> {
        let mut kept = self.snapshot.schema.kept.iter();
        let kept = kept.find(|kept| self.users.column() == Some(kept.name.as_str()));
        if feature.is_none_or(|(_, ids)| ids.is_empty()) && kept.is_none() {
            return Ok(());
        }
        let files = OpenFiles::open(self.storage, self.snapshot, set)?;
        let by_text = self.users.by_text();
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
                let user_of = |row| by_text.get(text_of(&values, row)?.as_str()).copied();
                let found = (0..values.len()).find_map(|row| Some((row, user_of(row)?)));
                absence.add_all(found.map(|(row, user)| place(row_group, &column.name, user).in_row(row)));
            }
            self.reporter.go_on()?;
        }
        Ok(())
    }
}

/// What a set is known by: its files, some of which may have been added to those of an older snapshot.
fn name_of(set: &FileSet) -> String {
    let paths: Vec<&str> = set.files.iter().map(|file| file.path.as_str()).collect();
    paths.join("\n")
}

/// Users that are named for a range.
const MOST_NAMES: usize = 5;
