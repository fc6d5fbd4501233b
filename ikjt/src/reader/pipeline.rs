//! Decoding ahead, cutting, deduplicating: the threads between the files and the caller.
//!
//! One scheduler thread keeps up to `threads + 1` row groups in decoding, takes them in order, cuts their rows
//! into batches of exact size, and hands each batch to the pool for conversion and deduplication. What
//! reaches the caller is a queue of promises in batch order, so work overlaps and the order does not depend on
//! which thread was faster. The queue is bounded: a slow caller stops the scheduler, and with it the decoding.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use onefold_datasets::{DataFile, Manifest, Schema};
use rayon::ThreadPool;

use super::convert::{Parts, to_batch};
use super::decode::{RowGroup, Verified, open};
use super::{Dedupe, ReaderOptions};
use crate::{Batch, Error, Result};

/// A result that a pool thread will send.
type Promise<T> = Receiver<Result<T>>;

/// The batches of one epoch. Dropping it stops the reader.
#[derive(Debug)]
pub struct Batches {
    queue: Option<Receiver<Promise<Batch>>>,
    scheduler: Option<JoinHandle<()>>,
    waited: Duration,
}

impl Batches {
    pub(super) fn start(
        directory: &Path,
        manifest: &Manifest,
        schema: &Schema,
        options: &ReaderOptions,
        verified: &Arc<Verified>,
    ) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(options.threads)
            .thread_name(|i| format!("onefold-read-{i}"))
            .build()
            .map_err(std::io::Error::other)?;
        let chosen = manifest.select(&options.partitions)?;
        let files: VecDeque<DataFile> =
            chosen.into_iter().flat_map(|partition| partition.files.clone()).collect();
        let scheduler = Scheduler {
            pool: Arc::new(pool),
            directory: Arc::from(directory),
            files,
            opening: None,
            row_groups: VecDeque::new(),
            verified: Arc::clone(verified),
            all: manifest.schema.to_arrow(),
            schema: Arc::new(schema.clone()),
            batch_size: options.batch_size,
            dedupe: options.dedupe,
            ahead: options.threads + 1,
        };
        let (sender, queue) = sync_channel(2 * options.threads);
        let scheduler = std::thread::Builder::new()
            .name("onefold-schedule".to_owned())
            .spawn(move || scheduler.run(&sender))?;
        Ok(Self { queue: Some(queue), scheduler: Some(scheduler), waited: Duration::ZERO })
    }

    /// How long [`next`](Iterator::next) has waited for batches so far.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl Iterator for Batches {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let started = Instant::now();
        let promise = self.queue.as_ref()?.recv();
        let batch = promise.ok().map(|promise| fulfilled(&promise));
        self.waited += started.elapsed();
        if !matches!(batch, Some(Ok(_))) {
            self.queue = None;
        }
        batch
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        // Closing the queue ends the scheduler at its next send.
        self.queue = None;
        if let Some(scheduler) = self.scheduler.take() {
            let _ = scheduler.join();
        }
    }
}

/// Waits for a pool thread; one that panicked has dropped its end.
fn fulfilled<T>(promise: &Promise<T>) -> Result<T> {
    promise
        .recv()
        .unwrap_or_else(|_| Err(Error::invariant("reader", "a reader thread ended without a result")))
}

struct Scheduler {
    pool: Arc<ThreadPool>,
    directory: Arc<Path>,
    files: VecDeque<DataFile>,
    /// The next file: it is read and checked while the one before it is decoded.
    opening: Option<Promise<Vec<RowGroup>>>,
    row_groups: VecDeque<RowGroup>,
    verified: Arc<Verified>,
    all: SchemaRef,
    schema: Arc<Schema>,
    batch_size: usize,
    dedupe: Dedupe,
    ahead: usize,
}

impl Scheduler {
    /// Sends promises until the dataset or the caller's interest ends.
    fn run(mut self, queue: &SyncSender<Promise<Batch>>) {
        let mut decoding = VecDeque::new();
        let mut rows = Rows::default();
        loop {
            while decoding.len() < self.ahead {
                match self.next_row_group() {
                    None => break,
                    Some(row_group) => decoding.push_back(self.promise(move || row_group?.decode())),
                }
            }
            let Some(decoded) = decoding.pop_front() else { break };
            match fulfilled(&decoded) {
                Ok(batches) => rows.extend(batches),
                Err(error) => {
                    let _ = queue.send(self.promise(move || Err(error)));
                    return;
                }
            }
            while rows.count >= self.batch_size {
                if queue.send(self.convert(rows.take(self.batch_size))).is_err() {
                    return;
                }
            }
        }
        if rows.count > 0 {
            let _ = queue.send(self.convert(rows.take(rows.count)));
        }
    }

    fn next_row_group(&mut self) -> Option<Result<RowGroup>> {
        while self.row_groups.is_empty() {
            let opened = self.opening.take().or_else(|| self.open_next_file())?;
            self.opening = self.open_next_file();
            match fulfilled(&opened) {
                Ok(row_groups) => self.row_groups = row_groups.into(),
                Err(error) => return Some(Err(error)),
            }
        }
        self.row_groups.pop_front().map(Ok)
    }

    fn open_next_file(&mut self) -> Option<Promise<Vec<RowGroup>>> {
        let file = self.files.pop_front()?;
        let (directory, verified) = (Arc::clone(&self.directory), Arc::clone(&self.verified));
        let (all, schema) = (Arc::clone(&self.all), Arc::clone(&self.schema));
        Some(self.promise(move || open(&directory, &file, &all, &schema, &verified)))
    }

    fn convert(&self, parts: Parts) -> Promise<Batch> {
        let (schema, dedupe) = (Arc::clone(&self.schema), self.dedupe);
        self.promise(move || to_batch(&parts, &schema, dedupe))
    }

    fn promise<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Promise<T> {
        let (sender, receiver) = sync_channel(1);
        self.pool.spawn(move || {
            // The caller may have gone.
            let _ = sender.send(work());
        });
        receiver
    }
}

/// Decoded rows that are in no batch yet.
#[derive(Default)]
struct Rows {
    parts: VecDeque<(RecordBatch, usize)>,
    count: usize,
}

impl Rows {
    fn extend(&mut self, batches: Vec<RecordBatch>) {
        for batch in batches {
            self.count += batch.num_rows();
            self.parts.push_back((batch, 0));
        }
    }

    /// The first `size` rows, of which there are enough.
    fn take(&mut self, size: usize) -> Parts {
        let mut taken = Parts::new();
        let mut missing = size;
        while missing > 0 {
            let Some((batch, start)) = self.parts.pop_front() else { break };
            let end = batch.num_rows().min(start + missing);
            missing -= end - start;
            if end < batch.num_rows() {
                self.parts.push_front((batch.clone(), end));
            }
            taken.push((batch, start..end));
        }
        self.count -= size - missing;
        taken
    }
}
