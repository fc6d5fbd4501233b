//! The allocation of a batch, which Python, Arrow and libtorch access at the same time.

use std::sync::OnceLock;

use arrow::buffer::Buffer;
use onefold_ikjt::{Error, PackedBatch, Places};

/// A batch in one allocation: bytes at a fixed address that are never moved and never grow.
///
/// Rust fills the bytes before they are accessible elsewhere. Arrow's arrays, and Rust's own work on a batch,
/// validate the bytes once and then rely on them. A tensor of torch, in contrast, is always writable. So the first of
/// these two uses shares the memory, and the other one gets a copy.
#[derive(Debug)]
pub(crate) struct Memory {
    batch: PackedBatch,
    use_of: OnceLock<Use>,
}

/// The use of the memory apart from read-only views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Code relies on the bytes, which never change.
    Fixed,
    /// Python may write to the memory at any time.
    Written,
}

impl Memory {
    /// Takes the memory of a batch that is not used elsewhere.
    pub(crate) fn new(batch: PackedBatch) -> Self {
        Self { batch, use_of: OnceLock::new() }
    }

    /// Copies `bytes`. The JSON text `places` states where the parts of the batch are.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if `places` cannot be parsed.
    pub(crate) fn copy_of(bytes: &[u8], places: &str) -> Result<Self, Error> {
        let wrong = |error: serde_json::Error| {
            Error::invariant("packed batch", format!("its places cannot be read: {error}"))
        };
        let places = serde_json::from_str(places).map_err(wrong)?;
        // `Buffer::from` copies the bytes.
        Ok(Self::new(PackedBatch::new(Buffer::from(bytes), places)))
    }

    /// Returns the batch in memory that never changes: in this memory, or in a copy if Python may write to this
    /// memory.
    ///
    /// The bytes may have any values, because Python may have written to them before.
    pub(crate) fn fixed(&self) -> PackedBatch {
        match self.use_of.get_or_init(|| Use::Fixed) {
            Use::Fixed => self.batch.clone(),
            Use::Written => {
                PackedBatch::new(Buffer::from(self.batch.memory().as_slice()), self.places().clone())
            }
        }
    }

    /// Returns whether Python may write to the memory from now on.
    pub(crate) fn allow_writes(&self) -> bool {
        *self.use_of.get_or_init(|| Use::Written) == Use::Written
    }

    /// Returns where the parts of the batch are.
    pub(crate) fn places(&self) -> &Places {
        self.batch.places()
    }

    /// Returns the address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.batch.memory().as_ptr().cast_mut()
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.batch.memory().len()
    }
}
