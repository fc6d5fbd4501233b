//! The data files of an epoch: opened before they are needed.

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

/// Footers are kept as long as they take no more than the memory limit divided by this.
const FOOTERS_SHARE: u64 = 16;

/// Files that the reader's options choose.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) set: FileSet,
    /// Columns of the dataset that the files lack.
    pub(super) lacking: Vec<FieldRef>,
    /// Its partition, in order.
    pub(super) partition: usize,
    /// Number of its first sample among the chosen samples of the dataset.
    pub(super) first: u64,
}

/// The files of the partitions that the reader's options choose, in the order of the snapshot.
pub(super) fn choose(snapshot: &Snapshot, options: &ReaderOptions) -> Result<Vec<Chosen>> {
    let mut files = Vec::new();
    let mut first = 0_u64;
    // Consecutive files mostly lack the same columns.
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

/// The chosen files in their storage. A file's number stands for all files of its set.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) storage: Storage,
    pub(super) files: Arc<Vec<Chosen>>,
    pub(super) columns: WantedColumns,
    pub(super) verify: bool,
    pub(super) known: Arc<KnownFiles>,
    pub(super) footers: Footers,
}

/// Footers that were read, as many as fit into a number of bytes: those that were read last.
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
    /// At most `limit` bytes of footers, and one.
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
    /// The `chosen` files of a snapshot, to read the columns of `schema`.
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

    /// Opens the files of a set, which is done once as long as there is room for all footers.
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

/// Opens files ahead, in the order in which they are needed first.
#[derive(Debug)]
pub(super) struct Opener {
    files: Arc<Files>,
    /// In the order of their first use.
    upcoming: VecDeque<usize>,
    /// Files that were opened, or are being opened.
    begun: HashSet<usize>,
    /// Files that other threads open.
    opening: HashMap<usize, Promise<Arc<OpenFiles>>>,
    /// Files that are opened ahead.
    ahead: usize,
}

impl Opener {
    /// Opens `ahead` files ahead of those `upcoming`.
    pub(super) fn new(files: Arc<Files>, upcoming: VecDeque<usize>, ahead: usize) -> Self {
        Self { files, upcoming, begun: HashSet::new(), opening: HashMap::new(), ahead }
    }

    /// Opened files; `None` if they are still being opened, and `wait` is false.
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
        let promise = match self.files.storage.local() {
            Some(_) => promise(&work.workers.pool, open),
            None => promise_beside(open)?,
        };
        self.opening.insert(file, promise);
        Ok(())
    }
}
