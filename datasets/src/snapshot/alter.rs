//! Commits that drop or rename features without changing a data file.

use std::time::SystemTime;

use onefold_storage::Storage;

use super::commit::{create, utc};
use super::{Commit, Layout, Operation, Snapshot, latest_head, not_a_dataset};
use crate::{Error, Result, suggest};

/// Drops dense and sparse features of the dataset in `storage`, and the vocabularies that no other feature
/// uses. Older snapshots keep them. Returns the new snapshot without its partitions.
///
/// # Errors
///
/// [`Error::Fault`] if the dataset does not have one of these features, or would have no features left;
/// [`Error::NotADataset`], [`Error::Snapshot`] and [`Error::Storage`] if it cannot be read or written.
pub fn drop_features(storage: &Storage, names: &[String]) -> Result<Snapshot> {
    let drop = |snapshot: &mut Snapshot| names.iter().try_for_each(|name| drop_feature(snapshot, name));
    alter(storage, drop, "keep at least one feature")
}

/// Renames a dense or sparse feature of the dataset in `storage`. Its vocabulary is renamed too if it has the
/// feature's name and no other feature uses it. Older snapshots keep the old name. Returns the new snapshot
/// without its partitions.
///
/// # Errors
///
/// [`Error::Fault`] if the dataset does not have the feature, or if no feature can have the new name;
/// [`Error::NotADataset`], [`Error::Snapshot`] and [`Error::Storage`] if it cannot be read or written.
pub fn rename_feature(storage: &Storage, old: &str, new: &str) -> Result<Snapshot> {
    alter(storage, |snapshot| rename(snapshot, old, new), NEW_NAME)
}

/// The hint for a name that a feature cannot get.
const NEW_NAME: &str = "give a name that no column of the dataset has";

/// Applies `edit` to the newest snapshot and commits the result. If another writer commits first, `edit` is
/// applied to that writer's snapshot instead. `hint` is for a schema that no dataset can have.
fn alter(storage: &Storage, edit: impl Fn(&mut Snapshot) -> Result<()>, hint: &str) -> Result<Snapshot> {
    loop {
        let mut next = latest_head(storage)?.ok_or_else(|| not_a_dataset(storage))?;
        next.snapshot += 1;
        next.committed = utc(SystemTime::now());
        next.operation = Operation { kind: Commit::Alter, partitions: Vec::new(), samples_gained: 0 };
        edit(&mut next)?;
        next.schema.validate().map_err(|error| match error {
            Error::Fault(fault) => Error::schema(fault.message, hint),
            error => error,
        })?;
        if create(storage, &next)? {
            return Ok(next);
        }
    }
}

/// Returns the columns of a feature in the dataset's files.
fn columns_of_feature(snapshot: &Snapshot, name: &str) -> Result<Vec<String>> {
    let schema = &snapshot.schema;
    let mut columns = vec![name.to_owned()];
    if schema.dense.iter().any(|dense| dense == name) {
        return Ok(columns);
    }
    let Some((group, feature)) = schema.grouped_features().find(|(_, feature)| feature.name == name) else {
        let hint = suggest(name, schema.feature_names());
        let is_other = schema.to_arrow().field_with_name(name).is_ok();
        let message = match is_other {
            true => format!(
                "the column `{name}` of the dataset is no feature, so it can be neither dropped nor renamed"
            ),
            false => format!("the dataset has no feature `{name}`"),
        };
        return Err(Error::schema(message, hint));
    };
    if snapshot.layout == Layout::Folded && group.folds_to_window(feature) {
        columns.push(feature.length_column());
    }
    Ok(columns)
}

fn drop_feature(snapshot: &mut Snapshot, name: &str) -> Result<()> {
    let columns = columns_of_feature(snapshot, name)?;
    let schema = &mut snapshot.schema;
    schema.dense.retain(|dense| dense != name);
    schema.groups.iter_mut().for_each(|group| group.features.retain(|feature| feature.name != name));
    schema.groups.retain(|group| !group.features.is_empty());
    snapshot.features_since.remove(name);
    snapshot.statistics.features.remove(name);
    let schema = &snapshot.schema;
    snapshot.vocabularies.retain(|vocabulary, _| {
        schema.sparse_features().any(|feature| feature.vocabulary.as_ref() == Some(vocabulary))
    });
    for entry in &mut snapshot.manifests {
        entry.changes.drop_feature(name, &columns);
    }
    Ok(())
}

fn rename(snapshot: &mut Snapshot, old: &str, new: &str) -> Result<()> {
    let columns = columns_of_feature(snapshot, old)?;
    if old == new {
        return Err(Error::schema(format!("`{new}` is the present name of the feature"), NEW_NAME));
    }
    let schema = &mut snapshot.schema;
    schema.dense.iter_mut().filter(|dense| *dense == old).for_each(|dense| *dense = new.to_owned());
    let uses = schema.sparse_features().filter(|feature| feature.vocabulary.as_deref() == Some(old)).count();
    let features = schema.groups.iter_mut().flat_map(|group| &mut group.features);
    for feature in features.filter(|feature| feature.name == old) {
        feature.name = new.to_owned();
        let is_own = uses == 1 && feature.vocabulary.as_deref() == Some(old);
        if is_own && !snapshot.vocabularies.contains_key(new) {
            feature.vocabulary = Some(new.to_owned());
            let file = snapshot.vocabularies.remove(old);
            snapshot.vocabularies.extend(file.map(|file| (new.to_owned(), file)));
        }
    }
    if let Some(since) = snapshot.features_since.remove(old) {
        snapshot.features_since.insert(new.to_owned(), since);
    }
    if let Some(statistics) = snapshot.statistics.features.remove(old) {
        snapshot.statistics.features.insert(new.to_owned(), statistics);
    }
    let renamed = |column: &String| format!("{new}{}", column.strip_prefix(old).unwrap_or_default());
    let columns: Vec<(String, String)> =
        columns.into_iter().map(|column| (renamed(&column), column)).collect();
    for entry in &mut snapshot.manifests {
        entry.changes.rename_feature((old, new), &columns);
    }
    Ok(())
}
