//! The data files of an epoch, which are opened before they are needed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::TryRecvError;

use arrow::datatypes::FieldRef;
use onefold_datasets::{
    ColumnChanges, FileSet, Layout, SESSION_COLUMN, Schema, Snapshot, TIME_COLUMN, unless_removed,
};
use onefold_storage::Storage;

use super::budget::Account;
use super::file::{OpenFiles, WantedColumns};
use super::known::KnownFiles;
use super::options::ReaderOptions;
use super::promise::{Promise, ended, promise, promise_beside};
use super::workers::Workers;
use crate::error::Result;

/// A set of files that the reader's options select.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) set: FileSet,
    /// The columns of the dataset that the files lack.
    pub(super) lacking: Vec<FieldRef>,
    /// The index of its partition among the selected partitions.
    pub(super) partition: usize,
    /// The index of its first sample among the chosen samples of the dataset.
    pub(super) first: u64,
}

/// Returns the files of the partitions that the reader's options select, in the order of the snapshot.
pub(super) fn choose(snapshot: &Snapshot, options: &ReaderOptions) -> Result<Vec<Chosen>> {
    let mut files = Vec::new();
    let mut first = 0_u64;
    // Consecutive sets of files usually lack the same columns, so the last result is reused.
    let mut last: Option<(&ColumnChanges, Vec<FieldRef>)> = None;
    for (partition, chosen) in snapshot.select(&options.partitions)?.into_iter().enumerate() {
        for set in &chosen.files {
            let lacking = match &last {
                Some((changes, lacking)) if **changes == set.changes => lacking.clone(),
                _ => snapshot.lacking(set),
            };
            last = Some((&set.changes, lacking.clone()));
            files.push(Chosen { set: set.clone(), lacking, partition, first });
            first = first.saturating_add(set.samples);
        }
    }
    Ok(files)
}

/// The chosen files in their storage. A file number identifies a set of files, and refers to all files of the set.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) storage: Storage,
    pub(super) files: Arc<Vec<Chosen>>,
    pub(super) columns: WantedColumns,
    pub(super) verify: bool,
    known: Arc<KnownFiles>,
    /// The number of the snapshot.
    snapshot: u64,
}

impl Files {
    /// Creates the access to the `chosen` files of a snapshot, for reading the columns of `schema`.
    pub(super) fn new(
        storage: Storage,
        chosen: Arc<Vec<Chosen>>,
        (snapshot, schema): (&Snapshot, &Schema),
        (options, verify): (&ReaderOptions, bool),
        workers: &Workers,
    ) -> Self {
        let all = match snapshot.layout {
            Layout::Rows => snapshot.schema.to_arrow(),
            Layout::Folded => snapshot.schema.to_folded_arrow(),
        };
        let mut extra = Vec::new();
        if options.shuffle.is_some() || options.kept.iter().any(|name| name == SESSION_COLUMN) {
            extra.push(SESSION_COLUMN);
        }
        if options.timestamps {
            extra.push(TIME_COLUMN);
        }
        Self {
            files: chosen,
            columns: WantedColumns::new(all, schema, &extra),
            verify,
            known: workers.known_files(&storage, &snapshot.dataset),
            snapshot: snapshot.snapshot,
            storage,
        }
    }

    /// Opens the files of a set.
    pub(super) fn open(&self, file: usize) -> Result<Arc<OpenFiles>> {
        let Chosen { set, lacking, .. } = &self.files[file];
        let files = OpenFiles::open(&self.storage, (set, &lacking[..]), &self.columns, &self.known);
        unless_removed(&self.storage, self.snapshot, files.map(Arc::new))
    }

    /// Returns whether the files of a set can be opened without reading their footers from storage.
    fn are_known(&self, file: usize) -> bool {
        let mut files = self.columns.files_to_read(&self.files[file].set);
        files.all(|(_, file)| self.known.has_footer(&file.path))
    }
}

/// Opens files ahead of their use, in the order of their first use.
#[derive(Debug)]
pub(super) struct Opener {
    files: Arc<Files>,
    /// The files that are not opened yet, in the order of their first use.
    upcoming: VecDeque<usize>,
    /// The files that were opened, or are being opened.
    begun: HashSet<usize>,
    /// The files that other threads are opening.
    opening: HashMap<usize, Promise<Arc<OpenFiles>>>,
    /// The maximal number of files that are opened ahead.
    ahead: usize,
    workers: Workers,
    account: Arc<Account>,
}

impl Opener {
    /// Creates an opener of the files `upcoming` that opens at most `ahead` files ahead of their use, with the threads
    /// of `workers` and until `account` is closed.
    pub(super) fn new(
        files: Arc<Files>,
        upcoming: VecDeque<usize>,
        ahead: usize,
        (workers, account): (&Workers, &Arc<Account>),
    ) -> Self {
        let (workers, account) = (workers.clone(), Arc::clone(account));
        Self { files, upcoming, begun: HashSet::new(), opening: HashMap::new(), ahead, workers, account }
    }

    /// Returns an open set of files, or `None` if it is still being opened and `wait` is false.
    pub(super) fn file(&mut self, file: usize, wait: bool) -> Result<Option<Arc<OpenFiles>>> {
        if !self.opening.contains_key(&file) {
            if self.files.are_known(file) {
                self.begun.insert(file);
                self.open_ahead()?;
                return self.files.open(file).map(Some);
            }
            self.begin(file)?;
        }
        self.open_ahead()?;
        let Some(promise) = self.opening.get(&file) else { return Ok(None) };
        let opened = match wait {
            true => promise.recv().map_err(|_| ended()),
            false => match promise.try_recv() {
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => Err(ended()),
                Ok(opened) => Ok(opened),
            },
        };
        self.opening.remove(&file);
        opened?.map(Some)
    }

    fn open_ahead(&mut self) -> Result<()> {
        while self.opening.len() < self.ahead
            && let Some(file) = self.upcoming.pop_front()
        {
            if !self.begun.contains(&file) && !self.files.are_known(file) {
                self.begin(file)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, file: usize) -> Result<()> {
        self.begun.insert(file);
        let (files, account) = (Arc::clone(&self.files), Arc::clone(&self.account));
        let open = move || {
            account.check_open()?;
            files.open(file)
        };
        let promise = match self.files.storage.has_latency() {
            true => promise_beside(open)?,
            false => promise(&self.workers.pool, open),
        };
        self.opening.insert(file, promise);
        Ok(())
    }
}
