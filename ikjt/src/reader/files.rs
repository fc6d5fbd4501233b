//! The data files of an epoch: verified and opened before they are needed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use onefold_datasets::{DataFile, Layout, SESSION_COLUMN, Schema, Snapshot, TIME_COLUMN};
use onefold_storage::Storage;

use super::budget::Account;
use super::file::{Footer, KnownFiles, OpenFile, WantedColumns};
use super::kept::KeptFile;
use super::options::ReaderOptions;
use super::pipeline::{Promise, Work, ended, promise, promise_beside};
use super::stages::Stages;
use super::workers::Workers;
use crate::Result;

/// Footers are kept as long as they take no more than the memory limit divided by this.
const FOOTERS_SHARE: u64 = 16;

/// A data file that the reader's options choose.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) file: DataFile,
    /// Its partition, in order.
    pub(super) partition: usize,
    /// Number of its first sample among the chosen samples of the dataset.
    pub(super) first: u64,
}

/// The files of the partitions that the reader's options choose, in the order of the snapshot.
pub(super) fn choose(snapshot: &Snapshot, options: &ReaderOptions) -> Result<Vec<Chosen>> {
    let mut files = Vec::new();
    let mut first = 0_u64;
    for (partition, chosen) in snapshot.select(&options.partitions)?.into_iter().enumerate() {
        for file in &chosen.files {
            files.push(Chosen { file: file.clone(), partition, first });
            first = first.saturating_add(file.samples);
        }
    }
    Ok(files)
}

/// The chosen files in their storage.
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
    by_file: HashMap<usize, Arc<Footer>>,
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

    fn get(&self, file: usize) -> Option<Arc<Footer>> {
        self.state().by_file.get(&file).cloned()
    }

    fn add(&self, file: usize, footer: Arc<Footer>) {
        let size = |footer: &Footer| footer.metadata.metadata().memory_size();
        let mut state = self.state();
        state.bytes += size(&footer);
        if let Some(same) = state.by_file.insert(file, footer) {
            state.bytes -= size(&same);
        } else {
            state.oldest.push_back(file);
        }
        while state.bytes > self.limit && state.oldest.len() > 1 {
            let oldest = state.oldest.pop_front().and_then(|oldest| state.by_file.remove(&oldest));
            state.bytes -= oldest.map_or(0, |footer| size(&footer));
        }
    }
}

impl Files {
    /// The `chosen` files of a snapshot, to read the columns of `schema`.
    pub(super) fn new(
        storage: Storage,
        chosen: Arc<Vec<Chosen>>,
        (snapshot, schema): (&Snapshot, &Schema),
        options: &ReaderOptions,
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
            verify: options.verify,
            known: workers.known_files(&storage, &snapshot.dataset),
            footers: Footers::new(workers.memory_limit() / FOOTERS_SHARE),
            storage,
        }
    }

    /// Verifies a file, unless that is known already, and reads its footer; what was read is kept in `kept`.
    fn open(&self, file: usize, stages: &Stages, kept: KeptFile, account: &Account) -> Result<OpenFile> {
        if self.verify {
            let started = Instant::now();
            let bytes = OpenFile::verify(&self.storage, &self.files[file].file, &self.known, &kept, account)?;
            stages.verified(started, bytes);
        }
        Ok(OpenFile { footer: self.footer(file, &kept)?, kept })
    }

    /// The footer of a file, which is read once as long as there is room for all.
    pub(super) fn footer(&self, file: usize, kept: &KeptFile) -> Result<Arc<Footer>> {
        if let Some(footer) = self.footers.get(file) {
            return Ok(footer);
        }
        let chosen = &self.files[file].file;
        let footer = Arc::new(Footer::open(&self.storage, chosen, &self.columns, &self.known, kept)?);
        self.footers.add(file, Arc::clone(&footer));
        Ok(footer)
    }

    /// Whether a file can be opened without reading it from the storage.
    fn is_at_hand(&self, file: usize) -> bool {
        let verified = !self.verify || self.known.is_verified(&self.files[file].file);
        verified && self.footers.get(file).is_some()
    }

    /// Whether the whole file will come from an object store to be verified.
    fn will_come_whole(&self, file: usize) -> bool {
        self.verify && self.storage.local().is_none() && !self.known.is_verified(&self.files[file].file)
    }
}

/// Opens files ahead, in the order in which they are needed first.
#[derive(Debug)]
pub(super) struct Opener {
    files: Arc<Files>,
    /// In the order of their first use; whether each is read in one go.
    upcoming: VecDeque<(usize, bool)>,
    /// Files that were opened, or are being opened.
    begun: HashSet<usize>,
    opening: HashMap<usize, Opening>,
    /// Files that are opened ahead.
    ahead: usize,
}

/// A file that is verified and opened by another thread.
#[derive(Debug)]
struct Opening {
    promise: Promise<OpenFile>,
    kept: KeptFile,
}

impl Opener {
    /// Opens `ahead` files ahead of those `upcoming`, which come with whether they are read in one go.
    pub(super) fn new(files: Arc<Files>, upcoming: VecDeque<(usize, bool)>, ahead: usize) -> Self {
        Self { files, upcoming, begun: HashSet::new(), opening: HashMap::new(), ahead }
    }

    /// An opened file; `None` if it is still being opened, and `wait` is false.
    pub(super) fn file(&mut self, file: usize, work: &Work, wait: bool) -> Result<Option<OpenFile>> {
        if !self.opening.contains_key(&file) {
            if self.files.is_at_hand(file) {
                self.begun.insert(file);
                let open = self.files.open(file, &work.stages, KeptFile::default(), &work.account);
                self.open_ahead(work)?;
                return open.map(Some);
            }
            let in_one_go = self.upcoming.iter().any(|upcoming| *upcoming == (file, true));
            self.begin(file, in_one_go, work)?;
        }
        self.open_ahead(work)?;
        let Some(Opening { promise, .. }) = self.opening.get(&file) else { return Ok(None) };
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
            && let Some((file, in_one_go)) = self.upcoming.pop_front()
        {
            if !self.begun.contains(&file) && !self.files.is_at_hand(file) {
                self.begin(file, in_one_go, work)?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, file: usize, in_one_go: bool, work: &Work) -> Result<()> {
        self.begun.insert(file);
        // A file that a shuffle comes back to much later is not kept.
        let kept = (in_one_go && self.files.will_come_whole(file))
            .then(|| KeptFile::reserve(&work.account, self.files.files[file].file.bytes_on_disk))
            .flatten()
            .unwrap_or_default();
        let (files, stages, kept_by_file) = (Arc::clone(&self.files), Arc::clone(&work.stages), kept.clone());
        let account = Arc::clone(&work.account);
        let open = move || {
            account.check_open()?;
            files.open(file, &stages, kept_by_file, &account)
        };
        let promise = match self.files.storage.local() {
            Some(_) => promise(&work.workers.pool, open),
            None => promise_beside(open)?,
        };
        self.opening.insert(file, Opening { promise, kept });
        Ok(())
    }

    /// Gives up what is kept of files that are being opened: the memory is needed.
    pub(super) fn release_kept(&self) {
        self.opening.values().for_each(|opening| opening.kept.release());
    }
}
