//! The forms in which a caller gets a batch: the batch, or a copy of it in one allocation.

use super::convert::{Conversion, Pieces};
use super::stages::Stages;
use crate::{Batch, PackedBatch, Result, SentBatch};

/// How a batch is copied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packing {
    /// The dense features and labels of a sample.
    pub(super) widths: (usize, usize),
    /// Whether lists may share ids.
    pub(super) overlaps: bool,
}

/// A form in which a caller gets a batch.
pub(super) trait Output: Send + Sized + 'static {
    /// Whether it is a copy in one allocation. Otherwise it may share buffers with a row group.
    const COPIED: bool;

    /// The output of a batch, which came from elsewhere if it is `packed` already.
    fn of(batch: Batch, packed: Option<PackedBatch>, packing: Packing) -> Self;

    fn size_in_bytes(&self) -> u64;

    /// The output of the samples `pieces`, with its bytes, and the row groups whose buffers it shares. A copy is made on
    /// the thread that made the batch, whose cache has it.
    fn make(
        conversion: &Conversion,
        pieces: Pieces,
        packing: Packing,
        stages: &Stages,
    ) -> Result<(Self, u64, Pieces)> {
        let batch = match Self::COPIED {
            true => conversion.run_shared(&pieces, stages)?,
            false => conversion.run(&pieces, stages)?,
        };
        let made = Self::of(batch, None, packing);
        let bytes = made.size_in_bytes();
        // A batch of several pieces is a copy, too.
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
