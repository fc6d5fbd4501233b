//! A data file while it is written: its bytes go to the storage, and each column chunk gets a checksum.

use std::collections::VecDeque;
use std::io::{self, Write};

use onefold_storage::{Result, Upload};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// A Parquet file ends with the length of its metadata in four bytes and four letters.
const END_BYTES: usize = 8;

/// An upload of a Parquet file that takes the checksum of each column chunk, and of the footer.
///
/// The writer of Parquet puts the chunks of a row group one behind the other. The lengths of the chunks are announced
/// with [`expect`](Self::expect) before they are written, so that the chunks are told apart although the writer buffers
/// them.
#[derive(Debug)]
pub(super) struct ChecksumWriter {
    upload: Upload,
    /// The bytes left of the part that is written now, and of the parts after it. The first part is the letters at the
    /// beginning of the file.
    parts: VecDeque<u64>,
    hasher: Box<Xxh3>,
    /// The checksums of the parts that are complete.
    checksums: Vec<u64>,
    /// The bytes after all parts: page indexes and the footer.
    rest: Vec<u8>,
    bytes: u64,
}

/// A file that was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrittenFile {
    /// Its size.
    pub(super) bytes: u64,
    /// The size of its footer: the metadata and the eight bytes after it.
    pub(super) footer_bytes: u32,
    /// The checksum of the footer.
    pub(super) footer_checksum: u64,
    /// The checksums of the column chunks, in the order in which they were written.
    pub(super) chunks: Vec<u64>,
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

    /// Ends the upload.
    ///
    /// # Errors
    ///
    /// As [`Upload::finish`], and if the bytes are not those of a Parquet file with the chunks that were announced.
    pub(super) fn finish(mut self) -> Result<WrittenFile> {
        let footer_bytes = self.footer_bytes().ok_or_else(|| {
            io::Error::other("internal error: the column chunks do not have the sizes that were announced")
        })?;
        let footer = &self.rest[self.rest.len() - footer_bytes..];
        let footer_checksum = xxh3_64(footer);
        // The letters at the beginning are no chunk.
        let chunks = self.checksums.split_off(1);
        self.upload.finish()?;
        Ok(WrittenFile { bytes: self.bytes, footer_bytes: footer_bytes as u32, footer_checksum, chunks })
    }

    /// The size of the footer; `None` if chunks are missing or the end is not that of a Parquet file.
    fn footer_bytes(&self) -> Option<usize> {
        let (_, end) = self.rest.split_last_chunk::<END_BYTES>()?;
        let length = u32::from_le_bytes([end[0], end[1], end[2], end[3]]) as usize;
        let all = length.checked_add(END_BYTES)?;
        (self.parts.is_empty() && &end[4..] == b"PAR1" && all <= self.rest.len()).then_some(all)
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
