//! The allocation of a batch, into which Python, Arrow and libtorch look at the same time.

use std::sync::OnceLock;

use arrow::buffer::Buffer;
use onefold_ikjt::{Error, PackedBatch, Places};

/// A batch as one allocation: bytes at a fixed address, never moved and never grown.
///
/// Rust fills them before anybody else sees them. Arrow's arrays, and Rust's own work on a batch, check the bytes once
/// and then rely on them. A tensor of torch, in contrast, can always be written to. So the first use that is one of the
/// two decides which of them shares the memory; the other one gets a copy.
#[derive(Debug)]
pub(crate) struct Memory {
    batch: PackedBatch,
    use_of: OnceLock<Use>,
}

/// How memory is used beside views that only read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Its bytes are relied on, and never change.
    Fixed,
    /// Python may write into it at any time.
    Written,
}

impl Memory {
    /// The memory of a batch into which nobody else looks yet.
    pub(crate) fn new(batch: PackedBatch) -> Self {
        Self { batch, use_of: OnceLock::new() }
    }

    /// A copy of `bytes`, whose parts stand where the JSON text `places` says.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the text is something else.
    pub(crate) fn copy_of(bytes: &[u8], places: &str) -> Result<Self, Error> {
        let wrong = |error: serde_json::Error| {
            Error::invariant("packed batch", format!("its places cannot be read: {error}"))
        };
        let places = serde_json::from_str(places).map_err(wrong)?;
        // `from` copies.
        Ok(Self::new(PackedBatch::new(Buffer::from(bytes), places)))
    }

    /// The batch in memory that never changes: in this one, or in a copy if Python may write into it.
    ///
    /// Its bytes may be any: Python may have written them before.
    pub(crate) fn fixed(&self) -> PackedBatch {
        match self.use_of.get_or_init(|| Use::Fixed) {
            Use::Fixed => self.batch.clone(),
            Use::Written => {
                PackedBatch::new(Buffer::from(self.batch.memory().as_slice()), self.places().clone())
            }
        }
    }

    /// Whether Python may write into the memory, from now on.
    pub(crate) fn allow_writes(&self) -> bool {
        *self.use_of.get_or_init(|| Use::Written) == Use::Written
    }

    /// Where the parts stand.
    pub(crate) fn places(&self) -> &Places {
        self.batch.places()
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.batch.memory().as_ptr().cast_mut()
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.batch.memory().len()
    }
}
