//! The forms in which a caller receives a batch: as a batch, or as a copy in one allocation.

use super::convert::Pieces;
use super::recipe::Epoch;
use super::stages::Stages;
use crate::batch::{Batch, PackedBatch, SentBatch};
use crate::error::Result;

/// The options of copying a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    /// The numbers of dense features and labels per sample.
    pub(super) widths: (usize, usize),
    /// Whether lists may share ids in the copy.
    pub(super) overlaps: bool,
}

/// A form in which a caller receives a batch.
pub(super) trait Output: Send + Sized + 'static {
    /// Whether the output is a copy in one allocation. Otherwise it may share buffers with a row group.
    const COPIED: bool;

    /// Converts a batch. `packed` is the same batch in packed form if it came from another process.
    fn of(batch: Batch, packed: Option<PackedBatch>, packing: Packing) -> Self;

    fn size_in_bytes(&self) -> u64;

    /// Makes the output of the samples `pieces`, and returns it with its size in bytes and the row groups that it
    /// shares buffers with. Copies are made on the thread that made the batch, because the batch is in that core's
    /// cache.
    fn make(epoch: &Epoch, pieces: Pieces, packing: Packing, stages: &Stages) -> Result<(Self, u64, Pieces)> {
        let batch = match Self::COPIED {
            true => epoch.run_shared(&pieces, stages)?,
            false => epoch.run(&pieces, stages)?,
        };
        let made = Self::of(batch, None, packing);
        let bytes = made.size_in_bytes();
        // A batch of several pieces is also a copy, so it shares no buffers.
        let shared = if Self::COPIED || pieces.len() != 1 { Pieces::new() } else { pieces };
        Ok((made, bytes, shared))
    }
}

impl Output for Batch {
    const COPIED: bool = false;

    fn of(batch: Batch, _: Option<PackedBatch>, _: Packing) -> Self {
        batch
    }

    fn size_in_bytes(&self) -> u64 {
        self.bytes()
    }
}

impl Output for PackedBatch {
    const COPIED: bool = true;

    fn of(batch: Batch, packed: Option<PackedBatch>, Packing { widths, overlaps }: Packing) -> Self {
        packed.unwrap_or_else(|| Self::copy_of(&batch, widths, overlaps))
    }

    fn size_in_bytes(&self) -> u64 {
        self.memory().len() as u64
    }
}

impl Output for SentBatch {
    const COPIED: bool = true;

    fn of(batch: Batch, _: Option<PackedBatch>, Packing { widths, overlaps }: Packing) -> Self {
        Self::copy_of(&batch, widths, overlaps)
    }

    fn size_in_bytes(&self) -> u64 {
        self.memory.len() as u64
    }
}
