//! Coalesced reads: the byte ranges that a row group's columns need, fetched in few large reads.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use bytes::{Buf, Bytes};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

use crate::Result;

/// Ranges that are closer than this are read together: the bytes between cost less than another request (Meta's
/// readers merge within about 1 MiB).
pub(super) const GAP: u64 = 1 << 20;

/// Some ranges of a file, in memory; what Parquet's decoder reads from.
#[derive(Debug)]
pub(super) struct Ranges {
    length: u64,
    /// Where each part starts, and its bytes; in order, apart from each other.
    parts: Vec<(u64, Bytes)>,
}

/// The reads that cover `wanted`: sorted, and merged where the gap is at most `gap` bytes.
pub(super) fn coalesce(mut wanted: Vec<Range<u64>>, gap: u64) -> Vec<Range<u64>> {
    wanted.retain(|range| !range.is_empty());
    wanted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

impl Ranges {
    /// Reads `wanted` from `file`, which has `length` bytes.
    pub(super) fn read(mut file: &fs_err::File, length: u64, wanted: Vec<Range<u64>>) -> Result<Self> {
        let mut parts = Vec::new();
        for range in coalesce(wanted, GAP) {
            let end = range.end.min(length);
            let mut bytes = vec![0; usize::try_from(end.saturating_sub(range.start)).unwrap_or(0)];
            file.seek(SeekFrom::Start(range.start))?;
            file.read_exact(&mut bytes)?;
            parts.push((range.start, bytes.into()));
        }
        Ok(Self { length, parts })
    }

    /// The bytes that were read.
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// What was read from `start` on, up to the end of its part.
    fn from(&self, start: u64) -> ParquetResult<Bytes> {
        let part = self.parts.partition_point(|(first, _)| *first <= start).checked_sub(1);
        let found = part.map(|part| &self.parts[part]).and_then(|(first, bytes)| {
            let skipped = usize::try_from(start - first).ok()?;
            (skipped <= bytes.len()).then(|| bytes.slice(skipped..))
        });
        found.ok_or_else(|| ParquetError::EOF(format!("byte {start} lies outside the columns' ranges")))
    }
}

impl Length for Ranges {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for Ranges {
    type T = bytes::buf::Reader<Bytes>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(self.from(start)?.reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        let bytes = self.from(start)?;
        if bytes.len() < length {
            let message = format!("{length} bytes at {start} end after the columns' ranges");
            return Err(ParquetError::EOF(message));
        }
        Ok(bytes.slice(..length))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn close_ranges_become_one_read() {
        assert_eq!(coalesce(vec![20..30, 0..10, 12..15], 2), [0..15, 20..30]);
        assert_eq!(coalesce(vec![0..10, 2..5, 10..11, 40..40], 0), std::slice::from_ref(&(0..11)));
        assert!(coalesce(vec![], 5).is_empty());
    }

    #[test]
    fn bytes_come_from_their_place_or_not_at_all() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
        file.write_all(&content).unwrap();
        let open = fs_err::File::open(file.path()).unwrap();
        let far = (GAP + 4096) as usize;
        let ranges =
            Ranges::read(&open, content.len() as u64, vec![10..20, 30..40, far as u64..far as u64 + 7])
                .unwrap();
        assert_eq!(ranges.parts.len(), 2);
        assert_eq!(ranges.bytes(), 37);
        assert_eq!(ranges.get_bytes(12, 25).unwrap(), &content[12..37]);
        assert_eq!(ranges.get_bytes(far as u64, 7).unwrap(), &content[far..far + 7]);
        let mut read = Vec::new();
        ranges.get_read(35).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, &content[35..40]);
        for (start, length) in [(0, 1), (12, 29), (41, 1), (far as u64, 8)] {
            assert!(ranges.get_bytes(start, length).is_err(), "{length} bytes at {start}");
        }
    }
}
