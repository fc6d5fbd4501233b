//! Finds the files of a version of a Delta Lake table. The log of the table says which files a version has, and the
//! values of their partition columns. The files are then inspected and read like other Parquet files.
//!
//! ```text
//! _delta_log/00000000000000000012.json, checkpoints ─▶ version ─▶ files ─▶ those added since another version
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::datatypes::Field;
use deltalake_core::kernel::LogicalFileView;
use deltalake_core::logstore::{StorageConfig, default_logstore};
use deltalake_core::table::state::DeltaTableState;
use deltalake_core::{DeltaTable, DeltaTableError};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path as Key;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt};
use onefold_base::fault::{Explain as _, Fault, Kind};
use onefold_base::units::count_of;
use onefold_datasets::TableVersion;
use url::Url;

use super::files::{DELTA_LOG, FoundFile, path_of_url};
use super::stores::{SourceStore, Stores};
use super::{FILES_AT_A_TIME, FoundFiles, FoundTable, PATH_HINT};
use crate::config::{DeltaConfig, DeltaVersion, ObjectStores, SourceConfig};
use crate::error::{Error, MessageAndHint, Result};

/// The folder of a table in a store.
struct Place<'a> {
    /// The name of the source.
    source: &'a str,
    /// The path or URL of the folder in messages.
    shown: PathBuf,
    store: Arc<SourceStore>,
    folder: Key,
    /// The URL of the folder, with a slash at the end.
    url: Url,
}

/// The files of a version of a table, by their paths in its folder.
type Files = BTreeMap<String, LogicalFileView>;

/// Finds the files of the table at the path of `source`, which is relative to `base`, in the order of their names.
///
/// # Errors
///
/// [`Error::Fault`] if there is no such table or version, if the version has no files, if a file does not exist, or if
/// the files cannot be read as they are (column mapping, deletion vectors, files of other tables). If only added files
/// are to be read: if no file was added, or if a file of the earlier version was removed.
pub(super) async fn find(
    base: &Path,
    (name, source, delta): (&str, &SourceConfig, &DeltaConfig),
    stores: (&mut Stores, &ObjectStores),
) -> Result<(FoundFiles, FoundTable)> {
    let path = source.paths.first().map_or("", String::as_str);
    let place = Place::open(base, name, path, stores)?;
    place.check_log().await?;
    let loaded = place.load(delta.version).await;
    let table = loaded.map_err(|error| place.unreadable(delta.version, &error))?;
    let state = table.snapshot().map_err(|error| place.unreadable(delta.version, &error))?;
    place.check_time(state, delta.version)?;
    place.check_columns(state)?;
    let version = TableVersion { table: state.metadata().id().to_owned(), version: state.version() };
    let mut files = place.files(state)?;
    match &delta.since {
        Some(known) => place.only_added(&mut files, known, &version).await?,
        None if files.is_empty() => {
            let message = format!("version {} of the table has no files", version.version);
            return Err(place.wrong((message, "choose a version that has rows".to_owned())));
        }
        None => {}
    }
    let partitions = state.metadata().partition_columns();
    let found = stream::iter(files).map(|(path, file)| place.found(path, file, partitions));
    let mut found: Vec<FoundFile> = found.buffered(FILES_AT_A_TIME).try_collect().await?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found.iter().for_each(|file| place.store.found(&file.meta));
    let found = found.into_iter().map(|file| (file, Arc::clone(&place.store))).collect();
    Ok((found, described(state, version)))
}

/// Returns the version of a table and its columns.
fn described(state: &DeltaTableState, version: TableVersion) -> FoundTable {
    let schema = state.snapshot().arrow_schema();
    let partitions = state.metadata().partition_columns();
    let (mut partition_columns, mut columns) = (Vec::new(), Vec::new());
    for field in schema.fields() {
        let (name, data_type) = (field.name().clone(), field.data_type().clone());
        match partitions.contains(&name) {
            true => partition_columns.push((name, data_type)),
            false => columns.push(Field::new(name, data_type, true)),
        }
    }
    FoundTable { version, partition_columns, columns }
}

impl<'a> Place<'a> {
    /// Connects to the store of a path or URL.
    fn open(
        base: &Path,
        source: &'a str,
        path: &str,
        (stores, settings): (&mut Stores, &ObjectStores),
    ) -> Result<Self> {
        let wrong =
            |shown: &Path, (message, hint): MessageAndHint| Error::source(source, shown, message, hint);
        let given = Path::new(path);
        let (store, folder, shown) = if path.contains("://") && !path.starts_with("file://") {
            let opened = stores.open(path, settings);
            let (store, folder) = opened.map_err(|error| wrong(given, error))?;
            (store, folder.trim_matches('/').to_owned(), given.to_owned())
        } else {
            let local = match path.starts_with("file://") {
                true => path_of_url(path).map_err(|error| wrong(given, error))?,
                false => path.to_owned(),
            };
            let shown = base.join(local);
            let whole = fs_err::canonicalize(&shown)
                .map_err(|_| wrong(&shown, ("there is no such folder".to_owned(), PATH_HINT.to_owned())))?;
            let folder = Key::from_absolute_path(whole);
            let folder = folder.map_err(|error| wrong(&shown, (error.to_string(), PATH_HINT.to_owned())))?;
            (Arc::clone(&stores.local), folder.to_string(), shown)
        };
        let invalid = |error: &dyn std::fmt::Display| {
            wrong(&shown, (format!("its location cannot be read: {error}"), PATH_HINT.to_owned()))
        };
        let root = if store.is_local() { "file:///".to_owned() } else { format!("{}/", store.url) };
        let mut url = Url::parse(&root).map_err(|error| invalid(&error))?;
        // URLs of stores have segments.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(folder.split('/').filter(|part| !part.is_empty())).push("");
        }
        let folder = Key::parse(&folder).map_err(|error| invalid(&error))?;
        Ok(Self { source, shown, store, folder, url })
    }

    /// Returns the error for the table.
    fn wrong(&self, (message, hint): MessageAndHint) -> Error {
        Error::source(self.source, &self.shown, message, hint)
    }

    /// Returns the error for a request to the store that failed.
    fn unanswered(&self, error: &object_store::Error) -> Error {
        Fault { kind: Kind::Storage, ..self.wrong(self.store.explain(error)).fault() }.into()
    }

    /// Returns the error for a version that cannot be loaded.
    fn unreadable(&self, version: DeltaVersion, error: &DeltaTableError) -> Error {
        if let DeltaTableError::ObjectStore { source } = error {
            return self.unanswered(source);
        }
        let what = match version {
            DeltaVersion::Newest => "its log cannot be read".to_owned(),
            DeltaVersion::Number(number) => format!("its version {number} cannot be read"),
            DeltaVersion::At(time) => format!("its version at {time} cannot be read"),
        };
        let hint = "choose a version whose log is there (the table keeps it for `delta.logRetentionDuration`), and a table that \
                    needs no feature which this program does not have";
        self.wrong((format!("{what}: {}", first_line(error)), hint.to_owned()))
    }

    /// Returns the key of a path in the folder.
    fn key(&self, path: &str) -> Result<Key> {
        let key = Key::parse(format!("{}/{path}", self.folder).trim_start_matches('/'));
        key.map_err(|error| {
            let hint = "write a copy of the table, whose files get other names";
            self.wrong((format!("the name of its file `{path}` cannot be read: {error}"), hint.to_owned()))
        })
    }

    /// Checks that the folder has the log of a table.
    async fn check_log(&self) -> Result<()> {
        let mut listed = self.store.probe().list(Some(&self.key(DELTA_LOG)?));
        match listed.next().await {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(self.unanswered(&error)),
            None => {
                let message = format!("it is not a Delta Lake table: it has no folder `{DELTA_LOG}`");
                let hint = "correct `delta` under `[sources]`, or write `path` for plain files";
                Err(self.wrong((message, hint.to_owned())))
            }
        }
    }

    /// Loads a version of the table. The store of the source sends the requests, with its settings and credentials.
    async fn load(&self, version: DeltaVersion) -> Result<DeltaTable, DeltaTableError> {
        let whole = self.store.client();
        let own: Arc<dyn ObjectStore> = Arc::new(PrefixStore::new(Arc::clone(&whole), self.folder.clone()));
        let log = default_logstore(own, whole, &self.url, &StorageConfig::default());
        let mut table = DeltaTable::new(log);
        match version {
            DeltaVersion::Newest => table.load().await?,
            DeltaVersion::Number(number) => table.load_version(number).await?,
            DeltaVersion::At(time) => table.load_with_datetime(time).await?,
        }
        Ok(table)
    }

    /// Refuses a version that was committed after the wanted time: the first one is loaded if no version is older.
    fn check_time(&self, state: &DeltaTableState, wanted: DeltaVersion) -> Result<()> {
        let (DeltaVersion::At(time), Some(committed)) = (wanted, state.version_timestamp(state.version()))
        else {
            return Ok(());
        };
        if committed <= time.timestamp_millis() {
            return Ok(());
        }
        let message = format!("no version whose log is there was committed at or before {time}");
        Err(self.wrong((message, "choose a later `timestamp`, or a `version`".to_owned())))
    }

    /// Refuses a table whose columns have other names in its files.
    fn check_columns(&self, state: &DeltaTableState) -> Result<()> {
        let mode = state.metadata().configuration().get("delta.columnMapping.mode");
        let Some(mode) = mode.filter(|mode| *mode != "none") else { return Ok(()) };
        let message = format!(
            "its files have other names of columns than the table (`delta.columnMapping.mode` is \"{mode}\"), which is not \
             supported"
        );
        let hint = "remove the column mapping (`ALTER TABLE … DROP FEATURE columnMapping`), or write a copy of the table \
                    without it";
        Err(self.wrong((message, hint.to_owned())))
    }

    /// Returns the files of a version.
    fn files(&self, state: &DeltaTableState) -> Result<Files> {
        let mut files = Files::new();
        for file in state.log_data() {
            let path = file.path().into_owned();
            if file.deletion_vector_descriptor().is_some() {
                let message = format!("its file `{path}` has a deletion vector, which is not supported");
                let hint = "rewrite files with deleted rows (`REORG TABLE … APPLY (PURGE)`), and read the version after it";
                return Err(self.wrong((message, hint.to_owned())));
            }
            if path.contains("://") || path.starts_with('/') {
                let message = format!(
                    "its file `{path}` is in another folder (a shallow clone), which is not supported"
                );
                let hint = "read the table that was cloned, or write a deep copy";
                return Err(self.wrong((message, hint.to_owned())));
            }
            files.insert(path, file);
        }
        Ok(files)
    }

    /// Keeps only those of the files of `version` that were added since version `known`.
    async fn only_added(
        &self,
        files: &mut Files,
        known: &TableVersion,
        version: &TableVersion,
    ) -> Result<()> {
        let (read, now) = (known.version, version.version);
        let whole = || format!("write `append = \"all\"` in `[sources].{}`", self.source);
        if known.table != version.table || read > now {
            let message = match known.table == version.table {
                true => {
                    format!("the dataset has the rows of version {read}, which is newer than version {now}")
                }
                false => format!("it is not the table whose version {read} the dataset has"),
            };
            let hint = format!("correct the path or the version; {}, to read the whole version", whole());
            return Err(self.wrong((message, hint)));
        }
        let loaded = self.load(DeltaVersion::Number(read)).await;
        let old = loaded.and_then(|table| {
            let files = table.snapshot()?.log_data().into_iter();
            Ok(files.map(|file| file.path().into_owned()).collect::<BTreeSet<String>>())
        });
        let old = old.map_err(|error| {
            let error = first_line(&error);
            let message =
                format!("version {read}, whose rows the dataset has, cannot be read any more: {error}");
            self.wrong((message, format!("{}, which reads the whole version {now}", whole())))
        })?;
        let gone: Vec<&String> = old.iter().filter(|path| !files.contains_key(*path)).collect();
        if let Some(first) = gone.first() {
            let message = format!(
                "version {now} does not have {} of version {read} any more, such as `{first}`, so rows that the dataset has were \
                 changed, deleted or moved",
                count_of(gone.len() as u64, "file"),
            );
            let hint = format!(
                "{}, which reads the whole version and replaces the partitions, or build the dataset anew; append before \
                 `OPTIMIZE` moves rows to other files",
                whole()
            );
            return Err(self.wrong((message, hint)));
        }
        files.retain(|path, _| !old.contains(path));
        if files.is_empty() {
            let message = format!(
                "version {now} adds no file to version {read}, whose rows the dataset has, so there is nothing to append"
            );
            return Err(self.wrong((message, "append when the table has more rows".to_owned())));
        }
        Ok(())
    }

    /// Finds the object of a file of the table.
    async fn found(&self, path: String, file: LogicalFileView, partitions: &[String]) -> Result<FoundFile> {
        let name = self.shown.join(&path);
        let wrong = |message: String| {
            let hint = "choose a newer version: `VACUUM` removes the files of old ones";
            Error::source(self.source, &name, message, hint.to_owned())
        };
        let store = self.store.client();
        let meta = store.head(&self.key(&path)?).await.map_err(|error| match error {
            object_store::Error::NotFound { .. } => {
                wrong("the log of the table lists it, and it does not exist".to_owned())
            }
            error => self.unanswered(&error),
        })?;
        if u64::try_from(file.size()) != Ok(meta.size) {
            let (has, listed) = (meta.size, file.size());
            return Err(wrong(format!("it has {has} bytes, and the log of the table states {listed}")));
        }
        let mut values = file.partition_values_map();
        let folders = partitions.iter().map(|column| {
            // The log writes an empty text for null, too.
            let value = values.remove(column).flatten().filter(|value| !value.is_empty());
            (column.clone(), value)
        });
        Ok(FoundFile { folders: folders.collect(), name, meta })
    }
}

/// Returns the first line of an error, without the backtrace that may follow it.
fn first_line(error: &DeltaTableError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
