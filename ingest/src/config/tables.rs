//! Delta Lake tables among the sources: the files that an append reads, and versions that are fixed.

use std::collections::BTreeMap;

use onefold_datasets::TableVersion;

use super::{Config, DeltaAppend, DeltaVersion, Rows};
use crate::{Error, Result};

impl Config {
    /// Returns whether a source is a Delta Lake table.
    pub(crate) fn has_tables(&self) -> bool {
        self.sources.values().any(|source| source.delta.is_some())
    }

    /// Returns the name of a table whose newest version is read, if there is one.
    pub(crate) fn newest_table(&self) -> Option<&str> {
        let is_newest = |name: &&String| {
            self.sources[*name].delta.as_ref().is_some_and(|delta| delta.version == DeltaVersion::Newest)
        };
        self.sources.keys().find(is_newest).map(String::as_str)
    }

    /// Returns the configuration with these versions of its tables.
    pub(crate) fn at_versions(&self, versions: &BTreeMap<String, TableVersion>) -> Self {
        let mut config = self.clone();
        for (name, source) in &mut config.sources {
            if let (Some(delta), Some(read)) = (&mut source.delta, versions.get(name)) {
                delta.version = DeltaVersion::Number(read.version);
            }
        }
        config
    }

    /// Returns the configuration of an append to a dataset with the rows of the versions `known`. Of a table that gives
    /// the samples, it reads the files that were added since, unless the configuration says otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if windows need the rows that the append does not read.
    pub(crate) fn since_versions(&self, known: &BTreeMap<String, TableVersion>) -> Result<Self> {
        let gives_samples = |name: &String| matches!(&self.samples.rows, Rows::Source(rows) if rows == name);
        let mut config = self.clone();
        for (name, source) in &mut config.sources {
            let (Some(delta), Some(version)) = (&mut source.delta, known.get(name)) else { continue };
            let by_role = if gives_samples(name) { DeltaAppend::Added } else { DeltaAppend::All };
            if delta.append.unwrap_or(by_role) == DeltaAppend::All {
                continue;
            }
            if let Some(place) = self.timelines.iter().position(|timeline| timeline.source == *name) {
                let message = format!(
                    "`[[timelines]]` {} needs all rows of `{name}`, of which an append reads those that were added since version {}",
                    place + 1,
                    version.version
                );
                let hint =
                    format!("write `append = \"all\"` in `[sources].{name}`, which reads the whole table");
                return Err(Error::config(&self.path, message, hint));
            }
            delta.since = Some(version.clone());
        }
        Ok(config)
    }
}
