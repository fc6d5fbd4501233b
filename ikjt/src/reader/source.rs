//! The row groups of an epoch in order, from files that are verified and opened one ahead.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use onefold_datasets::DataFile;
use onefold_datasets::storage::Storage;

use super::decode::RowGroup;
use super::file::{Columns, KnownFiles, OpenFile};
use super::order::{FileStarts, Slice};
use super::pipeline::{Next, Pool, Promise, Work, fulfilled};
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
    fn open(&self, file: usize, stages: &Stages) -> Result<OpenFile> {
        if self.verify {
            let started = Instant::now();
            let bytes = OpenFile::verify(&self.storage, &self.files[file], &self.known)?;
            stages.verified(started, bytes);
        }
        self.open_footer(file)
    }

    pub(super) fn open_footer(&self, file: usize) -> Result<OpenFile> {
        OpenFile::open(&self.storage, &self.files[file], &self.columns, &self.known)
    }

    /// The rows of all files' row groups, from their footers: what a shuffled epoch is planned with.
    pub(super) fn row_counts(self: &Arc<Self>, pool: &Pool) -> Result<Vec<Vec<usize>>> {
        let promises = (0..self.files.len()).map(|file| {
            let files = Arc::clone(self);
            pool.promise(move || files.open_footer(file)?.row_counts())
        });
        let promises: Vec<_> = promises.collect();
        promises.iter().map(fulfilled).collect()
    }
}

/// What an epoch reads.
#[derive(Debug)]
pub(super) struct Source {
    files: Arc<Files>,
    order: Order,
    /// Files in the order of their first use.
    unopened: VecDeque<usize>,
    opening: Option<(usize, Promise<OpenFile>)>,
    opened: HashMap<usize, Arc<OpenFile>>,
    /// Samples of the first chunk that were delivered before the position.
    pub(super) skip: usize,
    first_chunk_sample: u64,
}

#[derive(Debug)]
enum Order {
    /// The samples in `range`, file after file; slices of the current file.
    File { starts: FileStarts, range: Range<u64>, pending: VecDeque<Slice> },
    /// Chunks of row groups whose sessions are mixed.
    Shuffled { chunks: VecDeque<VecDeque<Slice>> },
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
        let mut seen = std::collections::HashSet::new();
        for slice in chunks.iter().flatten() {
            if seen.insert(slice.file) {
                unopened.push_back(slice.file);
            }
        }
        Self::new(files, Order::Shuffled { chunks }, unopened, skip as usize, first_chunk_sample)
    }

    fn new(
        files: Arc<Files>,
        order: Order,
        unopened: VecDeque<usize>,
        skip: usize,
        first_chunk_sample: u64,
    ) -> Self {
        let opened = HashMap::new();
        Self { files, order, unopened, opening: None, opened, skip, first_chunk_sample }
    }

    /// The first chunk's first sample in the shard.
    pub(super) fn first_chunk_sample(&self) -> u64 {
        self.first_chunk_sample
    }

    /// The next row group, if there is one.
    pub(super) fn next(&mut self, work: &Work) -> Result<Option<Next>> {
        let next = match &mut self.order {
            Order::Shuffled { chunks } => {
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
            let upcoming = self.opening.as_ref().map(|(file, _)| *file).or(self.unopened.front().copied());
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
            None => self.open_next(work),
        };
        let open = match opening {
            Some((next, promise)) if next == file => {
                self.opening = self.open_next(work);
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

    fn open_next(&mut self, work: &Work) -> Option<(usize, Promise<OpenFile>)> {
        let file = self.unopened.pop_front()?;
        let (files, stages) = (Arc::clone(&self.files), Arc::clone(&work.stages));
        Some((file, work.pool.promise(move || files.open(file, &stages))))
    }
}
