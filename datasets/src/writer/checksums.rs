//! A data file while it is written: its bytes go to the storage, and each column chunk gets a checksum.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Write};

use onefold_storage::{Result, Upload};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// A Parquet file ends with the length of its metadata in four bytes and four letters.
const END_BYTES: usize = 8;

/// An upload of a Parquet file that takes the checksum of each column chunk, and of the footer.
///
/// The writer of Parquet puts the chunks of a row group one behind the other. The lengths of the chunks are announced
/// with [`expect`](Self::expect) before they are written, so that the chunks are told apart although the writer buffers
/// them.
pub(super) struct ChecksumWriter {
    upload: Upload,
    /// The bytes left of the part that is written now, and of the parts after it. The first part is the letters at the
    /// beginning of the file.
    parts: VecDeque<u64>,
    hasher: Box<Xxh3Default>,
    /// The checksums of the parts that are complete.
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

/// The end of a file that was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrittenEnd {
    /// The size of the file.
    pub(super) bytes: u64,
    /// The size of its footer: the metadata and the eight bytes after it.
    pub(super) footer_bytes: u32,
    /// The checksum of the footer.
    pub(super) footer_checksum: u64,
}

impl ChecksumWriter {
    /// Writes a Parquet file to `upload`.
    pub(super) fn new(upload: Upload) -> Self {
        let parts = VecDeque::from([4]);
        Self { upload, parts, hasher: Box::default(), checksums: Vec::new(), rest: Vec::new(), bytes: 0 }
    }

    /// Announces the lengths of the column chunks that are written next.
    pub(super) fn expect(&mut self, chunks: impl IntoIterator<Item = u64>) {
        self.parts.extend(chunks);
    }

    /// The checksums of all column chunks, in the order in which they were written.
    ///
    /// # Errors
    ///
    /// If chunks that were announced are not written yet: a bug.
    pub(super) fn chunks(&self) -> io::Result<&[u64]> {
        match (self.parts.is_empty(), self.checksums.get(1..)) {
            // The letters at the beginning are no chunk.
            (true, Some(chunks)) => Ok(chunks),
            _ => Err(io::Error::other(
                "internal error: column chunks do not have the sizes that were announced",
            )),
        }
    }

    /// Ends the upload.
    ///
    /// # Errors
    ///
    /// As [`Upload::finish`], and if the bytes are not those of a Parquet file.
    pub(super) fn finish(self) -> Result<WrittenEnd> {
        let footer = self.footer().ok_or_else(|| io::Error::other("internal error: a file has no footer"))?;
        let (footer_bytes, footer_checksum) = (footer.len() as u32, xxh3_64(footer));
        self.upload.finish()?;
        Ok(WrittenEnd { bytes: self.bytes, footer_bytes, footer_checksum })
    }

    /// The footer; `None` if the end is not that of a Parquet file.
    fn footer(&self) -> Option<&[u8]> {
        let (_, end) = self.rest.split_last_chunk::<END_BYTES>()?;
        let length = u32::from_le_bytes([end[0], end[1], end[2], end[3]]) as usize;
        let start = self.rest.len().checked_sub(length.checked_add(END_BYTES)?)?;
        (&end[4..] == b"PAR1").then(|| &self.rest[start..])
    }

    /// Adds bytes that were written to the checksums.
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
