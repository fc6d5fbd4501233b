//! Collects the columns of a row group: columns from the cache, columns that another reader is decoding, and the
//! bytes of all other columns.
//!
//! No call blocks. Decoding of the row group starts when the last part has arrived.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use arrow::array::ArrayRef;
use onefold_base::sync::locked;
use onefold_storage::Ranges;
use parquet::arrow::ProjectionMask;

use super::file::OpenFile;
use super::row_group::RowGroup;
use super::stages::Stages;
use crate::cache::{Cache, Chunk, Claim, Found, Interest, Waiter};
use crate::error::{Error, Result};

/// The cache that a reader uses, and the reader's interest.
#[derive(Debug, Clone)]
pub(super) struct Cached {
    pub(super) cache: Arc<Cache>,
    pub(super) interest: Arc<Interest>,
}

/// Encoded columns of a file.
pub(super) struct Encoded {
    /// The bytes of the columns.
    pub(super) ranges: Ranges,
    pub(super) mask: ProjectionMask,
}

/// The parts of a row group when its decoding starts.
pub(super) struct Gathered {
    /// The columns to decode, by file.
    pub(super) encoded: Vec<Encoded>,
    /// The claims for these columns, if others may wait for them.
    pub(super) claims: Vec<Claim>,
    /// The decoded columns, by name.
    pub(super) decoded: Vec<(Arc<str>, ArrayRef)>,
    /// The columns that are on disk, or that another reader failed to decode.
    pub(super) missing: Vec<Chunk>,
}

impl Gathered {
    /// Creates a row group in which all columns must be decoded.
    pub(super) fn of(encoded: Vec<Encoded>) -> Self {
        Self { encoded, claims: Vec::new(), decoded: Vec::new(), missing: Vec::new() }
    }

    /// Records the bytes of the columns to decode of file `file`, or returns the error of reading them.
    fn add(&mut self, file: usize, ranges: Result<Ranges>, mask: ProjectionMask) -> Result<()> {
        self.encoded[file] = Encoded { ranges: ranges?, mask };
        Ok(())
    }
}

/// A countdown that calls `done` after all parts have arrived.
struct Latch(Mutex<Option<Waiting>>);

struct Waiting {
    left: usize,
    gathered: Gathered,
    failed: Result<()>,
    done: Done,
}

type Done = Box<dyn FnOnce(Result<Gathered>) + Send>;

impl Latch {
    /// Changes the parts that have arrived so far.
    fn update(&self, change: impl FnOnce(&mut Gathered)) {
        if let Some(waiting) = &mut *locked(&self.0) {
            change(&mut waiting.gathered);
        }
    }

    /// Records that one more part has arrived. `add` must not drop a claim, because this would call waiters, which
    /// may call this latch while it is locked.
    fn came(&self, add: impl FnOnce(&mut Gathered) -> Result<()>) {
        let mut state = locked(&self.0);
        let Some(waiting) = &mut *state else { return };
        if let Err(error) = add(&mut waiting.gathered) {
            waiting.failed = Err(error);
        }
        waiting.left -= 1;
        if waiting.left > 0 {
            return;
        }
        let complete = state.take();
        drop(state);
        if let Some(Waiting { gathered, failed, done, .. }) = complete {
            done(failed.map(|()| gathered));
        }
    }

    /// Returns a waiter for a column that another reader decodes.
    fn wait_for(self: &Arc<Self>, chunk: &Chunk) -> Waiter {
        locked(&self.0).iter_mut().for_each(|waiting| waiting.left += 1);
        let (latch, chunk) = (Arc::clone(self), chunk.clone());
        Waiter::new(move |column| {
            latch.came(|gathered| {
                match column {
                    Some(column) => gathered.decoded.push((chunk.column, column)),
                    None => gathered.missing.push(chunk),
                }
                Ok(())
            });
        })
    }
}

impl RowGroup {
    /// Collects the row group's columns. `done` is called with them on a thread that must not be blocked for long.
    ///
    /// # Errors
    ///
    /// See [`start_reading`](Self::start_reading).
    pub(super) fn gather(
        &self,
        cached: Option<&Cached>,
        stages: &Arc<Stages>,
        done: impl FnOnce(Result<Gathered>) + Send + 'static,
    ) -> Result<()> {
        let files = &self.files.files;
        let nothing =
            |file: &OpenFile| Encoded { ranges: Ranges::empty(file.object.bytes), mask: file.mask(&[]) };
        let gathered = Gathered::of(files.iter().map(nothing).collect());
        let waiting = Waiting { left: files.len(), gathered, failed: Ok(()), done: Box::new(done) };
        let latch = Arc::new(Latch(Mutex::new(Some(waiting))));
        let Some(Cached { cache, interest }) = cached else {
            for (number, file) in files.iter().enumerate() {
                let (latch, mask) = (Arc::clone(&latch), file.columns.clone());
                self.start_reading(number, &file.columns, stages, move |ranges| {
                    latch.came(|gathered| gathered.add(number, ranges, mask));
                })?;
            }
            return Ok(());
        };
        interest.reached_row_group(&files[0].name, self.index);
        let mut claims = Vec::new();
        for (chunk, found) in cache.find(self.chunks(), |chunk| latch.wait_for(chunk)) {
            match found {
                Found::Here(column) => latch.update(|gathered| gathered.decoded.push((chunk.column, column))),
                Found::OnDisk => latch.update(|gathered| gathered.missing.push(chunk)),
                Found::Coming => (),
                Found::Claimed(claim) => claims.push(claim),
            }
        }
        for (number, file) in files.iter().enumerate() {
            let (own, others) = claims.into_iter().partition(|claim: &Claim| claim.chunk.file == file.name);
            claims = others;
            let latch = Arc::clone(&latch);
            self.read_claimed(number, own, cache, stages, move |ranges, mask, claims| {
                latch.came(|gathered| {
                    gathered.claims.extend(claims);
                    gathered.add(number, ranges, mask)
                });
            })?;
        }
        Ok(())
    }

    /// Reads the bytes of the columns of file `number` that `claims` cover.
    fn read_claimed(
        &self,
        number: usize,
        claims: Vec<Claim>,
        cache: &Arc<Cache>,
        stages: &Arc<Stages>,
        then: impl FnOnce(Result<Ranges>, ProjectionMask, Vec<Claim>) + Send + 'static,
    ) -> Result<()> {
        let file = &self.files.files[number];
        let mask = mask_of(file, claims.iter().map(|claim| &claim.chunk));
        if !self.files.storage.has_latency() {
            return self.start_reading(number, &mask.clone(), stages, |ranges| then(ranges, mask, claims));
        }
        // Columns in the cache do not have to be fetched from the object store.
        let cached = |claim: &Claim| (claim.chunk.clone(), cache.encoded(&claim.chunk));
        let (cached, fetched): (Vec<_>, Vec<_>) =
            claims.iter().map(cached).partition(|(_, bytes)| bytes.is_some());
        let (row_group, cache, started) = (self.clone(), Arc::clone(cache), Instant::now());
        let wanted = mask_of(file, fetched.iter().map(|(chunk, _)| chunk));
        self.start_reading(number, &wanted, stages, move |ranges| {
            let file = &row_group.files.files[number];
            let byte_range = |chunk: &Chunk| row_group.byte_range(file, &chunk.column);
            let add = |fetched_ranges: Ranges| {
                let took = started.elapsed() / u32::try_from(fetched.len().max(1)).unwrap_or(u32::MAX);
                // The fetched ranges also cover bytes between columns. Only the columns are inserted, because ranges
                // must not overlap.
                let mut ranges = Ranges::empty(file.object.bytes);
                for (chunk, _) in fetched {
                    let copy = fetched_ranges.copy(vec![byte_range(&chunk)?]).map(Ranges::into_parts);
                    for (start, bytes) in copy.into_iter().flatten() {
                        ranges.insert(start, bytes.clone());
                        cache.put_encoded(chunk.clone(), bytes, took);
                    }
                }
                for (chunk, bytes) in cached {
                    ranges.insert(byte_range(&chunk)?.start, bytes.unwrap_or_default());
                }
                Ok(ranges)
            };
            then(ranges.and_then(add), mask, claims);
        })
    }

    /// Returns the columns to read.
    fn chunks(&self) -> Vec<Chunk> {
        let of_file = |file: &OpenFile| {
            let chunk = |(_, column): (usize, &str)| Chunk {
                file: Arc::clone(&file.name),
                row_group: self.index,
                column: column.into(),
            };
            file.leaves(&file.columns).map(chunk).collect::<Vec<_>>()
        };
        self.files.files.iter().flat_map(of_file).collect()
    }

    /// Returns the byte range of a column in its file.
    fn byte_range(&self, file: &OpenFile, column: &str) -> Result<Range<u64>> {
        let mut ranges = file.byte_ranges(self.index, &file.mask(&[column]))?;
        ranges.pop().ok_or_else(|| Error::invariant("reader", format!("no column `{column}`")))
    }
}

fn mask_of<'a>(file: &OpenFile, chunks: impl Iterator<Item = &'a Chunk>) -> ProjectionMask {
    file.mask(&chunks.map(|chunk| &*chunk.column).collect::<Vec<_>>())
}
