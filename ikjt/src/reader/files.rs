//! The row groups of an epoch in order, from files that are verified and opened one ahead.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use onefold_datasets::DataFile;
use onefold_datasets::storage::Storage;

use super::decode::RowGroup;
use super::file::{Columns, KnownFiles, OpenFile};
use super::kept::KeptFile;
use super::order::{FileStarts, Slice};
use super::pipeline::{Next, Pool, Promise, Work, fulfilled, promise_beside_pool};
use super::stages::Stages;
use crate::Result;

/// How many files' footers a shuffled epoch keeps at hand.
const OPEN_FILES: usize = 64;

/// The files that the reader's options choose.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) storage: Storage,
    pub(super) files: Vec<DataFile>,
    pub(super) columns: Columns,
    pub(super) verify: bool,
    pub(super) known: KnownFiles,
}

impl Files {
    /// Verifies a file and reads its footer; what was read is kept in `kept`.
    fn open(&self, file: usize, stages: &Stages, kept: KeptFile) -> Result<OpenFile> {
        if self.verify {
            let started = Instant::now();
            let bytes = OpenFile::verify(&self.storage, &self.files[file], &self.known, &kept)?;
            stages.verified(started, bytes);
        }
        OpenFile::open(&self.storage, &self.files[file], &self.columns, &self.known, kept)
    }

    pub(super) fn open_footer(&self, file: usize) -> Result<OpenFile> {
        let kept = KeptFile::default();
        OpenFile::open(&self.storage, &self.files[file], &self.columns, &self.known, kept)
    }

    /// Whether the whole file will come from an object store to be verified.
    fn will_come_whole(&self, file: usize) -> bool {
        self.verify && self.storage.local().is_none() && !self.known.is_verified(&self.files[file])
    }

    /// The rows of all files' row groups, which a shuffled epoch is planned with: from the snapshot, or from the footers of
    /// files whose row groups it does not describe.
    pub(super) fn row_counts(self: &Arc<Self>, pool: &Pool) -> Result<Vec<Vec<usize>>> {
        // A count that is too large for this machine is found when its file is opened.
        let rows = |samples: u64| usize::try_from(samples).unwrap_or(usize::MAX);
        let counts = self.files.iter().enumerate().map(|(number, file)| match file.row_groups.listed() {
            Some(row_groups) => Ok(row_groups.iter().map(|row_group| rows(row_group.samples)).collect()),
            None => {
                let files = Arc::clone(self);
                Err(pool.promise(move || files.open_footer(number)?.row_counts()))
            }
        });
        let counts: Vec<_> = counts.collect();
        counts.into_iter().map(|count| count.or_else(|promise| fulfilled(&promise))).collect()
    }
}

/// What an epoch reads.
#[derive(Debug)]
pub(super) struct Source {
    files: Arc<Files>,
    order: Order,
    /// Files in the order of their first use.
    unopened: VecDeque<usize>,
    opening: Option<Opening>,
    opened: HashMap<usize, Arc<OpenFile>>,
    /// What is kept of the file that was opened last.
    kept: KeptFile,
    /// Samples of the first chunk that were delivered before the position.
    pub(super) skip: usize,
    first_chunk_sample: u64,
}

/// A file that is verified and opened by another thread.
#[derive(Debug)]
struct Opening {
    file: usize,
    promise: Promise<OpenFile>,
    kept: KeptFile,
}

#[derive(Debug)]
enum Order {
    /// The samples in `range`, file after file; slices of the current file.
    File { starts: FileStarts, range: Range<u64>, pending: VecDeque<Slice> },
    /// Chunks of row groups whose sessions are mixed, and how many slices each file has in all of them.
    Shuffled { chunks: VecDeque<VecDeque<Slice>>, slices: HashMap<usize, usize> },
}

impl Source {
    /// The samples `range` in file order.
    pub(super) fn in_file_order(files: Arc<Files>, range: Range<u64>) -> Self {
        let starts = FileStarts::new(files.files.iter().map(|file| file.samples));
        let unopened = starts.files(&range).into();
        let order = Order::File { starts, range, pending: VecDeque::new() };
        Self::new(files, order, unopened, 0, 0)
    }

    /// A shuffled shard's chunks, from sample `skip` of the shard on.
    pub(super) fn shuffled(files: Arc<Files>, chunks: Vec<Vec<Slice>>, skip: u64) -> Self {
        let (mut skip, mut first_chunk_sample) = (skip, 0);
        let mut chunks: VecDeque<VecDeque<Slice>> = chunks.into_iter().map(Into::into).collect();
        while let Some(chunk) = chunks.front() {
            let samples: u64 = chunk.iter().map(|slice| slice.rows.len() as u64).sum();
            if skip < samples {
                break;
            }
            skip -= samples;
            first_chunk_sample += samples;
            chunks.pop_front();
        }
        let mut unopened = VecDeque::new();
        let mut slices: HashMap<usize, usize> = HashMap::new();
        for slice in chunks.iter().flatten() {
            let of_file = slices.entry(slice.file).or_default();
            *of_file += 1;
            if *of_file == 1 {
                unopened.push_back(slice.file);
            }
        }
        let order = Order::Shuffled { chunks, slices };
        Self::new(files, order, unopened, skip as usize, first_chunk_sample)
    }

    fn new(
        files: Arc<Files>,
        order: Order,
        unopened: VecDeque<usize>,
        skip: usize,
        first_chunk_sample: u64,
    ) -> Self {
        let (opened, kept) = (HashMap::new(), KeptFile::default());
        Self { files, order, unopened, opening: None, opened, kept, skip, first_chunk_sample }
    }

    /// The first chunk's first sample in the shard.
    pub(super) fn first_chunk_sample(&self) -> u64 {
        self.first_chunk_sample
    }

    /// The next row group, if there is one. The reading of those before has begun.
    pub(super) fn next(&mut self, work: &Work) -> Result<Option<Next>> {
        let next = match &mut self.order {
            Order::Shuffled { chunks, .. } => {
                // Of files that are kept there is one row group.
                self.kept.release();
                while chunks.front().is_some_and(VecDeque::is_empty) {
                    chunks.pop_front();
                }
                let chunk = chunks.front_mut();
                chunk.and_then(|chunk| chunk.pop_front().map(|slice| (slice, chunk.is_empty())))
            }
            Order::File { .. } => self.next_in_file_order(work)?.map(|slice| (slice, true)),
        };
        let Some((slice, ends_chunk)) = next else { return Ok(None) };
        let file = self.file(slice.file, work)?;
        Ok(Some(Next { row_group: RowGroup { file, index: slice.row_group }, rows: slice.rows, ends_chunk }))
    }

    fn next_in_file_order(&mut self, work: &Work) -> Result<Option<Slice>> {
        loop {
            if let Order::File { pending, .. } = &mut self.order
                && let Some(slice) = pending.pop_front()
            {
                return Ok(Some(slice));
            }
            self.kept.release();
            let upcoming =
                self.opening.as_ref().map(|opening| opening.file).or(self.unopened.front().copied());
            let Some(upcoming) = upcoming else { return Ok(None) };
            // Row groups in decoding hold what they need of the files before.
            self.opened.clear();
            let rows = self.file(upcoming, work)?.row_counts()?;
            if let Order::File { starts, range, pending } = &mut self.order {
                pending.extend(starts.slices(upcoming, &rows, range));
            }
        }
    }

    /// An opened file. At their first use files come in order, and the one after it is opened meanwhile; later, one that
    /// is not at hand any more is opened again.
    fn file(&mut self, file: usize, work: &Work) -> Result<Arc<OpenFile>> {
        if let Some(open) = self.opened.get(&file) {
            return Ok(Arc::clone(open));
        }
        if self.opened.len() >= OPEN_FILES {
            self.opened.clear();
        }
        let opening = match self.opening.take() {
            Some(opening) => Some(opening),
            None => self.open_next(work)?,
        };
        let open = match opening {
            Some(Opening { file: next, promise, kept }) if next == file => {
                self.kept = kept;
                self.opening = self.open_next(work)?;
                fulfilled(&promise)?
            }
            other => {
                self.opening = other;
                self.files.open_footer(file)?
            }
        };
        let open = Arc::new(open);
        self.opened.insert(file, Arc::clone(&open));
        Ok(open)
    }

    fn open_next(&mut self, work: &Work) -> Result<Option<Opening>> {
        let Some(file) = self.unopened.pop_front() else { return Ok(None) };
        let kept = self.keep(file, work).unwrap_or_default();
        let (files, stages, kept_by_file) = (Arc::clone(&self.files), Arc::clone(&work.stages), kept.clone());
        let open = move || files.open(file, &stages, kept_by_file);
        let promise = match self.files.storage.local() {
            Some(_) => work.pool.promise(open),
            None => promise_beside_pool(open)?,
        };
        Ok(Some(Opening { file, promise, kept }))
    }

    /// Room for a file that is decoded soon after it was verified: a shuffle comes back to a file of several row groups
    /// much later.
    fn keep(&self, file: usize, work: &Work) -> Option<KeptFile> {
        let decoded_soon = match &self.order {
            Order::File { .. } => true,
            Order::Shuffled { slices, .. } => slices.get(&file) == Some(&1),
        };
        let keep = decoded_soon && self.files.will_come_whole(file);
        keep.then(|| KeptFile::reserve(&work.budget, self.files.files[file].bytes_on_disk)).flatten()
    }

    /// Gives up what is kept of files: the memory is needed.
    pub(super) fn release_kept(&self) {
        self.kept.release();
        if let Some(opening) = &self.opening {
            opening.kept.release();
        }
    }
}
