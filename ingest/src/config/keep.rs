//! `keep`: columns of the samples that the dataset keeps in addition to the features.

use onefold_datasets::{BATCH_COLUMNS, SAMPLE_KEY_COLUMN, SESSION_COLUMN, Schema, TIME_COLUMN};

use super::columns::{once, wrong};
use super::{Partition, kind};
use crate::error::MessageAndHint;

/// Refuses a column that is listed twice, or that is already a feature, a fixed column of datasets, or a partition
/// column.
pub(super) fn check(names: &[String], schema: &Schema, partition: &Partition) -> Result<(), MessageAndHint> {
    once("`keep`", names)?;
    let made: &[&str] = if partition.by.is_some() { &["date", "hour"] } else { &[] };
    for name in names {
        let is = if let Some(kind) = kind(schema, name) {
            format!("is a {} of `[features]`", kind.described())
        } else if [SESSION_COLUMN, TIME_COLUMN, SAMPLE_KEY_COLUMN].contains(&name.as_str()) {
            "is the name of a column that the dataset has in any case".to_owned()
        } else if BATCH_COLUMNS.contains(&name.as_str()) {
            "is the name of a column that batches have in any case".to_owned()
        } else if partition.columns.contains(name) || made.contains(&name.as_str()) {
            "is a partition column, whose value the partition has".to_owned()
        } else {
            continue;
        };
        let hint = format!(
            "remove it from `keep`, or keep a copy of another name, `{name} AS kept_{name}` in `[samples].query`"
        );
        return Err(wrong(format!("`keep` has `{name}`, which {is}"), hint));
    }
    Ok(())
}
