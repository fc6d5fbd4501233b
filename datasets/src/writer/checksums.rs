//! Computes checksums of the column chunks of a data file while it is uploaded.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};

use onefold_storage::{Result, Upload};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// The size in bytes of the end of a Parquet file: the length of its metadata in four bytes, and four
/// letters.
const END_BYTES: usize = 8;

/// Uploads a Parquet file and computes the checksums of each column chunk and of the footer.
///
/// The Parquet writer writes the chunks of a row group consecutively, but buffers them. The lengths of the
/// chunks are therefore announced with [`expect`](Self::expect) before they are written, so that their
/// boundaries are known.
pub(super) struct ChecksumWriter {
    upload: Upload,
    /// The number of remaining bytes of the current part and of the parts after it. The first part is the
    /// four letters at the start of the file.
    parts: VecDeque<u64>,
    hasher: Box<Xxh3Default>,
    /// The checksums of the complete parts.
    checksums: Vec<u64>,
    /// The bytes after all parts: page indexes and the footer.
    rest: Vec<u8>,
    bytes: u64,
}

impl fmt::Debug for ChecksumWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChecksumWriter").field("upload", &self.upload).finish_non_exhaustive()
    }
}

/// The size and footer of a written file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrittenEnd {
    /// The size of the file in bytes.
    pub(super) bytes: u64,
    /// The size of its footer in bytes: the metadata and the eight bytes after it.
    pub(super) footer_bytes: u32,
    /// The checksum of the footer.
    pub(super) footer_checksum: u64,
}

impl ChecksumWriter {
    /// Creates a writer of a Parquet file to `upload`.
    pub(super) fn new(upload: Upload) -> Self {
        let parts = VecDeque::from([4]);
        Self { upload, parts, hasher: Box::default(), checksums: Vec::new(), rest: Vec::new(), bytes: 0 }
    }

    /// Announces the lengths of the next column chunks.
    pub(super) fn expect(&mut self, chunks: impl IntoIterator<Item = u64>) {
        self.parts.extend(chunks);
    }

    /// Returns the checksums of all column chunks, in file order.
    ///
    /// # Errors
    ///
    /// Returns an error if announced chunks are not written yet, which is a bug.
    pub(super) fn chunks(&self) -> io::Result<&[u64]> {
        match (self.parts.is_empty(), self.checksums.get(1..)) {
            // The first part, the letters at the start of the file, is not a chunk.
            (true, Some(chunks)) => Ok(chunks),
            _ => Err(io::Error::other(
                "internal error: column chunks do not have the sizes that were announced",
            )),
        }
    }

    /// Completes the upload.
    ///
    /// # Errors
    ///
    /// The errors of [`Upload::finish`], and an error if the bytes do not end like a Parquet file.
    pub(super) fn finish(self) -> Result<WrittenEnd> {
        let footer = self.footer().ok_or_else(|| io::Error::other("internal error: a file has no footer"))?;
        let (footer_bytes, footer_checksum) = (footer.len() as u32, xxh3_64(footer));
        self.upload.finish()?;
        Ok(WrittenEnd { bytes: self.bytes, footer_bytes, footer_checksum })
    }

    /// Returns the footer, or `None` if the bytes do not end like a Parquet file.
    fn footer(&self) -> Option<&[u8]> {
        let (_, end) = self.rest.split_last_chunk::<END_BYTES>()?;
        let length = u32::from_le_bytes([end[0], end[1], end[2], end[3]]) as usize;
        let start = self.rest.len().checked_sub(length.checked_add(END_BYTES)?)?;
        (&end[4..] == b"PAR1").then(|| &self.rest[start..])
    }

    /// Adds written bytes to the checksums.
    fn digest(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        while let Some(left) = self.parts.front_mut() {
            let taken = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
            let (part, after) = bytes.split_at(taken);
            self.hasher.update(part);
            *left -= taken as u64;
            bytes = after;
            if *left > 0 {
                return;
            }
            self.parts.pop_front();
            self.checksums.push(self.hasher.digest());
            self.hasher.reset();
        }
        self.rest.extend_from_slice(bytes);
    }
}

impl Write for ChecksumWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.upload.write(bytes)?;
        self.digest(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.upload.flush()
    }
}
