//! The module `delta` of a program that is compiled without the feature `delta`: it refuses tables.

use std::path::Path;

use super::stores::Stores;
use super::{FoundFiles, FoundTable};
use crate::config::{DeltaConfig, ObjectStores, SourceConfig};
use crate::error::{Error, Result};

/// Refuses a table.
///
/// # Errors
///
/// Always [`Error::Fault`], which names programs that read tables.
pub(super) async fn find(
    _: &Path,
    (name, source, _): (&str, &SourceConfig, &DeltaConfig),
    _: (&mut Stores, &ObjectStores),
) -> Result<(FoundFiles, FoundTable)> {
    let path = source.paths.first().map_or("", String::as_str);
    let message = "this program was built without the feature `delta`, which reads Delta Lake tables";
    let hint = "use a released program or the wheel `onefold`, which have it, or build with `cargo build --release --features \
                onefold-ingest/delta`";
    Err(Error::source(name, Path::new(path), message.to_owned(), hint.to_owned()))
}
