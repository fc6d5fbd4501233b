//! The allocation of a batch, into which Python, Arrow and libtorch look at the same time.

use arrow::buffer::Buffer;
use onefold_ikjt::{Error, PackedBatch};

/// A batch as one allocation: bytes at a fixed address, never moved and never grown.
///
/// Rust fills them before anybody else sees them. Afterwards Python may write into them, as into any numpy array,
/// so Rust reads them again only through [`PackedBatch::unpack`], which checks what it finds.
#[derive(Debug)]
pub(crate) struct Memory(pub(crate) PackedBatch);

impl Memory {
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
        Ok(Self(PackedBatch::new(Buffer::from(bytes), places)))
    }

    /// The address of the first byte.
    pub(crate) fn address(&self) -> *mut u8 {
        self.0.memory().as_ptr().cast_mut()
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.memory().len()
    }
}
