//! The columns of a row group, gathered: those that a cache has, those that another reader is decoding, and the bytes
//! of the rest.
//!
//! Nothing here waits. The row group goes on to its decoding when the last thing has come.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arrow::array::ArrayRef;
use onefold_storage::Ranges;
use parquet::arrow::ProjectionMask;

use super::decode::RowGroup;
use super::stages::Stages;
use crate::cache::{Cache, Chunk, Claim, Found, Interest, Waiter};
use crate::{Error, Result};

/// A reader's use of a cache.
#[derive(Debug, Clone)]
pub(super) struct Cached {
    pub(super) cache: Arc<Cache>,
    pub(super) interest: Arc<Interest>,
}

/// What is there of a row group when it is decoded.
pub(super) struct Gathered {
    /// The bytes of the columns to decode.
    pub(super) ranges: Ranges,
    /// The columns to decode.
    pub(super) mask: ProjectionMask,
    /// The rights to decode them, if others may wait for them.
    pub(super) claims: Vec<Claim>,
    /// Columns that are decoded, by name.
    pub(super) decoded: Vec<(Arc<str>, ArrayRef)>,
    /// Columns that are on disk, or that another reader failed to decode.
    pub(super) missing: Vec<Chunk>,
}

impl Gathered {
    /// Bytes of columns, all of which are to be decoded.
    pub(super) fn of(ranges: Ranges, mask: ProjectionMask) -> Self {
        Self { ranges, mask, claims: Vec::new(), decoded: Vec::new(), missing: Vec::new() }
    }
}

/// Calls `done` once everything has come.
struct Latch(Mutex<Option<Waiting>>);

struct Waiting {
    left: usize,
    gathered: Gathered,
    failed: Result<()>,
    done: Done,
}

type Done = Box<dyn FnOnce(Result<Gathered>) + Send>;

impl Latch {
    fn waiting(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more thing has come. `add` must not give up a claim: whoever hears of that may come here.
    fn came(&self, add: impl FnOnce(&mut Gathered) -> Result<()>) {
        let mut state = self.waiting();
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

    /// Waits for a column that another reader decodes.
    fn wait_for(self: &Arc<Self>, chunk: &Chunk) -> Waiter {
        self.waiting().iter_mut().for_each(|waiting| waiting.left += 1);
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
    /// Gathers the row group's columns; `done` is called with them on a thread that must not be blocked for long.
    ///
    /// # Errors
    ///
    /// As [`start_reading`](Self::start_reading).
    pub(super) fn gather(
        &self,
        cached: Option<&Cached>,
        stages: &Arc<Stages>,
        done: impl FnOnce(Result<Gathered>) + Send + 'static,
    ) -> Result<()> {
        let Some(Cached { cache, interest }) = cached else {
            let mask = self.file.footer.columns.clone();
            return self.start_reading(mask.clone(), stages, move |ranges| {
                done(ranges.map(|ranges| Gathered::of(ranges, mask)));
            });
        };
        interest.reached_row_group(&self.file.footer.sha256, self.index);
        let footer = &self.file.footer;
        let nothing = Gathered::of(Ranges::empty(footer.object.bytes), footer.mask(&[]));
        let waiting = Waiting { left: 1, gathered: nothing, failed: Ok(()), done: Box::new(done) };
        let latch = Arc::new(Latch(Mutex::new(Some(waiting))));
        let (mut claims, mut decoded, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        for (chunk, found) in cache.find(self.chunks(), |chunk| latch.wait_for(chunk)) {
            match found {
                Found::Here(column) => decoded.push((chunk.column, column)),
                Found::OnDisk => missing.push(chunk),
                Found::Coming => (),
                Found::Claimed(claim) => claims.push(claim),
            }
        }
        self.read_claimed(claims, cache, stages, move |ranges, mask, claims| {
            latch.came(|gathered| {
                gathered.decoded.append(&mut decoded);
                gathered.missing.append(&mut missing);
                (gathered.mask, gathered.claims) = (mask, claims);
                ranges.map(|ranges| gathered.ranges = ranges)
            });
        })
    }

    /// Reads the bytes of the columns that are to be decoded.
    fn read_claimed(
        &self,
        claims: Vec<Claim>,
        cache: &Arc<Cache>,
        stages: &Arc<Stages>,
        then: impl FnOnce(Result<Ranges>, ProjectionMask, Vec<Claim>) + Send + 'static,
    ) -> Result<()> {
        let mask = self.mask_of(claims.iter().map(|claim| &claim.chunk));
        if !self.is_remote() {
            return self.start_reading(mask.clone(), stages, |ranges| then(ranges, mask, claims));
        }
        // What is kept encoded need not come from the object store.
        let kept = |claim: &Claim| (claim.chunk.clone(), cache.encoded(&claim.chunk));
        let (kept, fetched): (Vec<_>, Vec<_>) =
            claims.iter().map(kept).partition(|(_, bytes)| bytes.is_some());
        let (row_group, cache, started) = (self.clone(), Arc::clone(cache), Instant::now());
        self.start_reading(self.mask_of(fetched.iter().map(|(chunk, _)| chunk)), stages, move |ranges| {
            let add = |fetched_ranges: Ranges| {
                let took = started.elapsed() / u32::try_from(fetched.len().max(1)).unwrap_or(u32::MAX);
                // Requests cover what stands between columns, too; a column must not be there twice.
                let mut ranges = Ranges::empty(row_group.file.footer.object.bytes);
                for (chunk, _) in fetched {
                    let range = row_group.byte_range(&chunk.column)?;
                    let copy = fetched_ranges.copy(vec![range]).map(Ranges::into_parts);
                    for (start, bytes) in copy.into_iter().flatten() {
                        ranges.insert(start, bytes.clone());
                        cache.put_encoded(chunk.clone(), bytes, took);
                    }
                }
                for (chunk, bytes) in kept {
                    ranges.insert(row_group.byte_range(&chunk.column)?.start, bytes.unwrap_or_default());
                }
                Ok(ranges)
            };
            then(ranges.and_then(add), mask, claims);
        })
    }

    /// The columns to read.
    fn chunks(&self) -> Vec<Chunk> {
        let footer = &self.file.footer;
        let parquet = footer.metadata.parquet_schema();
        let leaves = (0..parquet.num_columns()).filter(|leaf| footer.columns.leaf_included(*leaf));
        let chunk = |leaf: usize| Chunk {
            file: Arc::clone(&footer.sha256),
            row_group: self.index,
            column: parquet.column(leaf).path().parts()[0].as_str().into(),
        };
        leaves.map(chunk).collect()
    }

    fn mask_of<'a>(&self, chunks: impl Iterator<Item = &'a Chunk>) -> ProjectionMask {
        self.file.footer.mask(&chunks.map(|chunk| &*chunk.column).collect::<Vec<_>>())
    }

    /// Whether the file is in an object store.
    fn is_remote(&self) -> bool {
        self.file.footer.storage.local().is_none()
    }

    /// Where the bytes of a column stand.
    fn byte_range(&self, column: &str) -> Result<Range<u64>> {
        let mut ranges = self.byte_ranges(&self.file.footer.mask(&[column]))?;
        ranges.pop().ok_or_else(|| Error::invariant("reader", format!("no column `{column}`")))
    }
}
