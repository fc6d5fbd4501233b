//! The data files of an epoch, which are opened before they are needed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::datatypes::FieldRef;
use onefold_datasets::{ColumnChanges, FileSet, Layout, SESSION_COLUMN, Schema, Snapshot, TIME_COLUMN};
use onefold_storage::Storage;

use super::file::{KnownFiles, OpenFiles, WantedColumns};
use super::options::ReaderOptions;
use super::pipeline::{Promise, Work, ended, promise, promise_beside};
use super::workers::Workers;
use crate::Result;

/// Footers are cached as long as they take at most the memory limit divided by this number.
const FOOTERS_SHARE: u64 = 16;

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
    pub(super) known: Arc<KnownFiles>,
    pub(super) footers: Footers,
}

/// A cache of footers, limited in bytes. It evicts the oldest footers.
#[derive(Debug)]
pub(super) struct Footers {
    limit: usize,
    state: Mutex<KnownFooters>,
}

#[derive(Debug, Default)]
struct KnownFooters {
    bytes: usize,
    by_file: HashMap<usize, Arc<OpenFiles>>,
    oldest: VecDeque<usize>,
}

impl Footers {
    /// Creates a cache of at most `limit` bytes of footers, or of one entry of any size.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit: usize::try_from(limit).unwrap_or(usize::MAX), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, KnownFooters> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, file: usize) -> Option<Arc<OpenFiles>> {
        self.state().by_file.get(&file).cloned()
    }

    fn add(&self, file: usize, open: Arc<OpenFiles>) {
        let mut state = self.state();
        state.bytes += open.memory_size();
        if let Some(same) = state.by_file.insert(file, open) {
            state.bytes -= same.memory_size();
        } else {
            state.oldest.push_back(file);
        }
        while state.bytes > self.limit && state.oldest.len() > 1 {
            let oldest = state.oldest.pop_front().and_then(|oldest| state.by_file.remove(&oldest));
            state.bytes -= oldest.map_or(0, |open| open.memory_size());
        }
    }
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
            footers: Footers::new(workers.memory_limit() / FOOTERS_SHARE),
            storage,
        }
    }

    /// Opens the files of a set, or returns them from the cache of footers.
    pub(super) fn open(&self, file: usize) -> Result<Arc<OpenFiles>> {
        if let Some(open) = self.footers.get(file) {
            return Ok(open);
        }
        let Chosen { set, lacking, .. } = &self.files[file];
        let open = OpenFiles::open(&self.storage, (set, &lacking[..]), &self.columns, &self.known)?;
        let open = Arc::new(open);
        self.footers.add(file, Arc::clone(&open));
        Ok(open)
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
}

impl Opener {
    /// Creates an opener of the files `upcoming` that opens at most `ahead` files ahead of their use.
    pub(super) fn new(files: Arc<Files>, upcoming: VecDeque<usize>, ahead: usize) -> Self {
        Self { files, upcoming, begun: HashSet::new(), opening: HashMap::new(), ahead }
    }

    /// Returns an open set of files, or `None` if it is still being opened and `wait` is false.
    pub(super) fn file(&mut self, file: usize, work: &Work, wait: bool) -> Result<Option<Arc<OpenFiles>>> {
        if !self.opening.contains_key(&file) {
            if let Some(open) = self.files.footers.get(file) {
                self.begun.insert(file);
                self.open_ahead(work)?;
                return Ok(Some(open));
            }
            self.begin(file, work)?;
        }
        self.open_ahead(work)?;
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

    fn open_ahead(&mut self, work: &Work) -> Result<()> {
        while self.opening.len() < self.ahead
            && let Some(file) = self.upcoming.pop_front()
        {
            if !self.begun.contains(&file) && self.files.footers.get(file).is_none() {
                self.begin(file, work)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, file: usize, work: &Work) -> Result<()> {
        self.begun.insert(file);
        let (files, account) = (Arc::clone(&self.files), Arc::clone(&work.account));
        let open = move || {
            account.check_open()?;
            files.open(file)
        };
        let promise = match self.files.storage.has_latency() {
            true => promise_beside(open)?,
            false => promise(&work.workers.pool, open),
        };
        self.opening.insert(file, promise);
        Ok(())
    }
}
