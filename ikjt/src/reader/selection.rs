//! The columns of a dataset that a reader's options select.

use onefold_base::fault::{option, text};
use onefold_datasets::{FeatureGroup, KeptColumn, KeptKind, SESSION_COLUMN, Schema, suggest};

use crate::error::{Error, Result};

/// Returns the kept columns `wanted`, in this order.
pub(super) fn kept_columns(schema: &Schema, wanted: &[String]) -> Result<Vec<KeptColumn>> {
    let session = KeptColumn { name: SESSION_COLUMN.to_owned(), kind: KeptKind::Integer };
    let known = || schema.kept.iter().chain([&session]);
    let mut columns: Vec<KeptColumn> = Vec::with_capacity(wanted.len());
    for name in wanted {
        let Some(column) = known().find(|column| column.name == *name) else {
            let hint = suggest(name, known().map(|column| column.name.as_str()));
            return Err(Error::options(format!("the dataset keeps no column `{name}`"), hint));
        };
        if columns.contains(column) {
            let message = text![option("kept"), format!(" names the column `{name}` twice")];
            return Err(Error::options(message, "name every column once"));
        }
        columns.push(column.clone());
    }
    Ok(columns)
}

/// Returns `schema` with only the sparse features `wanted`.
pub(super) fn project(schema: &Schema, wanted: Option<&[String]>) -> Result<Schema> {
    let Some(wanted) = wanted else { return Ok(schema.clone()) };
    for name in wanted {
        if !schema.sparse_features().any(|feature| feature.name == *name) {
            return Err(Error::options(
                format!("the dataset has no sparse feature `{name}`"),
                suggest(name, schema.sparse_features().map(|feature| feature.name.as_str())),
            ));
        }
    }
    let keep = |group: &FeatureGroup| {
        let features: Vec<_> = group.features.iter().filter(|f| wanted.contains(&f.name)).cloned().collect();
        (!features.is_empty()).then(|| FeatureGroup { features, ..group.clone() })
    };
    Ok(Schema { groups: schema.groups.iter().filter_map(keep).collect(), ..schema.clone() })
}
