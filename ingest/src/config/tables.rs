//! Delta Lake tables among the sources: the files that an append reads, and versions that are fixed.

use std::collections::BTreeMap;

use onefold_datasets::TableVersion;

use super::{Config, DeltaAppend, DeltaVersion, Rows};
use crate::error::{Error, Result};

impl Config {
    /// Returns whether a source is a Delta Lake table.
    pub(crate) fn has_tables(&self) -> bool {
        self.sources.values().any(|source| source.delta.is_some())
    }

    /// Returns whether only the files that were added to a table are read.
    pub(crate) fn reads_added_files(&self) -> bool {
        let mut tables = self.sources.values().filter_map(|source| source.delta.as_ref());
        tables.any(|delta| delta.since.is_some())
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
    /// [`Error::Fault`] if windows or numbers need the rows that the append does not read.
    pub(crate) fn since_versions(&self, known: &BTreeMap<String, TableVersion>) -> Result<Self> {
        let gives_samples = |name: &String| matches!(&self.samples.rows, Rows::Source(rows) if rows == name);
        let mut config = self.clone();
        for (name, source) in &mut config.sources {
            let (Some(delta), Some(version)) = (&mut source.delta, known.get(name)) else { continue };
            let by_role = if gives_samples(name) { DeltaAppend::Added } else { DeltaAppend::All };
            if delta.append.unwrap_or(by_role) == DeltaAppend::All {
                continue;
            }
            if let Some(what) = self.needs_all_rows(name, source.file_number.is_some()) {
                let message = format!(
                    "{what} all rows of `{name}`, of which an append reads those that were added since version {}",
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

    /// Returns what needs all rows of the table `name`, with a verb; `None` if its added rows can be read alone. Queries
    /// are taken to read all tables.
    fn needs_all_rows(&self, name: &str, has_file_numbers: bool) -> Option<String> {
        let reads = |source: &String| source == name || self.source_queries.contains_key(source);
        match self.timelines.iter().position(|timeline| reads(&timeline.source)) {
            Some(place) => Some(format!("`[[timelines]]` {} needs", place + 1)),
            None if self.samples.by_rows => Some("`order = \"rows\"` needs".to_owned()),
            None => has_file_numbers.then(|| "`file_number` counts".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Returns a configuration whose samples are the rows of the table `log`, with these keys and lines.
    fn config(keys: &str, more: &str) -> Config {
        let text = format!(
            "format_version = 1\n[sources]\nlog = {{ delta = \"log\"{keys} }}\nitems = {{ delta = \"items\" }}\n\
             plain = \"a.csv\"\n[samples]\nsource = \"log\"\n[session]\nkey = [\"s\"]\ntime = \"t\"\n\
             [features]\nlabel = {{ kind = \"label\" }}\nseen = {{ kind = \"sequence\" }}\n{more}"
        );
        Config::parse(Path::new("dataset.toml"), &text).unwrap()
    }

    fn known() -> BTreeMap<String, TableVersion> {
        let version =
            |name: &str, version| (name.to_owned(), TableVersion { table: name.to_owned(), version });
        BTreeMap::from([version("log", 3), version("items", 4)])
    }

    fn since(config: &Config) -> Vec<Option<u64>> {
        let tables = config.sources.values().filter_map(|source| source.delta.as_ref());
        tables.map(|delta| delta.since.as_ref().map(|since| since.version)).collect()
    }

    #[test]
    fn an_append_reads_added_files_of_the_samples_and_whole_other_tables() {
        let config = config("", "");
        assert!(config.has_tables());
        // The sources are in the order of their names.
        assert_eq!(since(&config), [None, None]);
        let added = config.since_versions(&known()).unwrap();
        assert_eq!(since(&added), [None, Some(3)]);
        assert!(added.reads_added_files() && !config.reads_added_files());
        assert_eq!(since(&config.since_versions(&BTreeMap::new()).unwrap()), [None, None]);
        let whole = super::tests::config(", append = \"all\"", "").since_versions(&known()).unwrap();
        assert_eq!(since(&whole), [None, None]);
    }

    #[test]
    fn windows_need_the_whole_table() {
        let timeline = "[[timelines]]\nsource = \"log\"\non = [\"s\"]\ntime = \"t\"\nlength = 5\ncolumns = { seen = \"item\" }\n";
        let error = config("", timeline).since_versions(&known()).unwrap_err().to_string();
        assert!(error.contains("`[[timelines]]` 1 needs all rows of `log`"), "{error}");
        assert!(error.contains("append = \"all\""), "{error}");
        assert!(config(", append = \"all\"", timeline).since_versions(&known()).is_ok());
    }

    #[test]
    fn numbers_of_files_need_the_whole_table() {
        let error = config(", file_number = \"n\"", "").since_versions(&known()).unwrap_err().to_string();
        assert!(error.contains("`file_number` counts all rows of `log`"), "{error}");
    }

    #[test]
    fn versions_can_be_fixed() {
        let newest = config(", version = 1", "");
        assert_eq!(newest.newest_table(), Some("items"));
        let fixed = newest.at_versions(&known());
        assert_eq!(fixed.newest_table(), None);
        assert_eq!(fixed.sources["log"].delta.as_ref().unwrap().version, DeltaVersion::Number(3));
    }
}
