//! Byte ranges of an object, which are fetched with few large requests and then read from memory.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

use crate::retry::{self, LARGEST_REQUEST};

/// The largest gap in bytes across which ranges are fetched with one request: the bytes in between cost less
/// than another request. (Meta's readers merge ranges within about 1 MiB.)
pub const RANGE_GAP: u64 = 1 << 20;

/// The divisor that limits unneeded bytes: the gaps that are fetched have at most the wanted bytes divided by
/// this.
const GAPS_SHARE: u64 = 50;

/// The number of concurrent requests for one object.
const REQUESTS_AT_A_TIME: usize = 8;

/// Some ranges of an object in memory, from which Parquet's decoder reads.
#[derive(Debug, Clone)]
pub struct Ranges {
    length: u64,
    /// The start and the bytes of each part, in ascending order and without overlap.
    parts: Vec<(u64, Bytes)>,
}

impl Ranges {
    /// Creates an empty set of ranges of an object of `length` bytes.
    pub fn empty(length: u64) -> Self {
        Self { length, parts: Vec::new() }
    }

    /// Adds the bytes from offset `start` on, which must not be present yet.
    pub fn insert(&mut self, start: u64, bytes: Bytes) {
        let place = self.parts.partition_point(|(first, _)| *first < start);
        self.parts.insert(place, (start, bytes));
    }

    /// Returns the start and the bytes of each part.
    pub fn into_parts(self) -> Vec<(u64, Bytes)> {
        self.parts
    }

    /// Copies the ranges `wanted`, which may extend over adjacent parts; `None` if one of them is not
    /// completely present. The copy does not keep the original in memory.
    pub fn copy(&self, wanted: Vec<Range<u64>>) -> Option<Self> {
        let parts = &self.parts;
        let copy = |range: Range<u64>| {
            let mut bytes = Vec::with_capacity(usize::try_from(range.end - range.start).ok()?);
            let first = parts.partition_point(|(start, _)| *start <= range.start).checked_sub(1)?;
            for (start, part) in &parts[first..] {
                let position = range.start + bytes.len() as u64;
                let skipped = position.checked_sub(*start)?.min(part.len() as u64);
                let left = (range.end - position).min(part.len() as u64 - skipped);
                bytes.extend_from_slice(&part[skipped as usize..(skipped + left) as usize]);
                if range.start + bytes.len() as u64 == range.end {
                    return Some((range.start, bytes.into()));
                }
            }
            None
        };
        let copies: Option<Vec<(u64, Bytes)>> = coalesce(wanted, 0).into_iter().map(copy).collect();
        Some(Self { length: self.length, parts: copies? })
    }

    /// Returns the start and the bytes of each part.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (u64, &[u8])> {
        self.parts.iter().map(|(start, bytes)| (*start, bytes.as_ref()))
    }

    /// Returns the number of bytes in memory.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Returns the bytes from `start` to the end of the part that contains `start`.
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

/// Returns the requests that cover `wanted`: sorted, and merged across the smallest gaps as long as this
/// saves requests at a low cost.
fn requests(wanted: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let ranges = coalesce(wanted, 0);
    let mut gaps: Vec<u64> = ranges.windows(2).map(|pair| pair[1].start - pair[0].end).collect();
    gaps.sort_unstable();
    let mut left = ranges.iter().map(|range| range.end - range.start).sum::<u64>() / GAPS_SHARE;
    let mut widest = 0;
    for gap in gaps.into_iter().filter(|gap| *gap <= RANGE_GAP) {
        let Some(rest) = left.checked_sub(gap) else {
            widest = widest.min(gap - 1);
            break;
        };
        (left, widest) = (rest, gap);
    }
    coalesce(ranges, widest)
}

/// Returns `wanted` sorted, and merged where the gap is at most `gap` bytes.
fn coalesce(mut wanted: Vec<Range<u64>>, gap: u64) -> Vec<Range<u64>> {
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

/// Fetches the `wanted` ranges of an object of `length` bytes. Adjacent ranges become one part. With an
/// `e_tag`, another version of the object is an error.
pub(super) async fn fetch(
    store: Arc<dyn ObjectStore>,
    key: Path,
    length: u64,
    wanted: Vec<Range<u64>>,
    e_tag: Option<String>,
) -> object_store::Result<Ranges> {
    let parts = join_adjacent(fetch_parts(store, key, wanted, e_tag).await?);
    Ok(Ranges { length, parts })
}

/// Returns the start and the bytes of each answer to the requests for the `wanted` ranges of an object, in
/// ascending order.
pub(super) async fn fetch_parts(
    store: Arc<dyn ObjectStore>,
    key: Path,
    wanted: Vec<Range<u64>>,
    e_tag: Option<String>,
) -> object_store::Result<Vec<(u64, Bytes)>> {
    let requests: Vec<Range<u64>> = requests(wanted).into_iter().flat_map(split).collect();
    let fetch_one = |range: Range<u64>| {
        let (store, key, if_match) = (Arc::clone(&store), key.clone(), e_tag.clone());
        async move {
            let get = || async {
                let range_option = Some(GetRange::Bounded(range.clone()));
                let options =
                    GetOptions { range: range_option, if_match: if_match.clone(), ..GetOptions::default() };
                let bytes = store.get_opts(&key, options).await?.bytes().await?;
                if bytes.len() as u64 != range.end - range.start {
                    let message = format!("{} bytes came of {}", bytes.len(), range.end - range.start);
                    return Err(object_store::Error::Generic { store: "storage", source: message.into() });
                }
                Ok(bytes)
            };
            retry::repeat(get).await.map(|bytes| (range.start, bytes))
        }
    };
    stream::iter(requests).map(fetch_one).buffered(REQUESTS_AT_A_TIME).try_collect().await
}

/// Divides a large request into parts that are fetched concurrently.
fn split(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (range.start..range.end).step_by(LARGEST_REQUEST as usize);
    starts.map(move |start| start..range.end.min(start + LARGEST_REQUEST))
}

/// Joins adjacent parts, so that a column chunk is contiguous.
fn join_adjacent(parts: Vec<(u64, Bytes)>) -> Vec<(u64, Bytes)> {
    let mut joined: Vec<(u64, Vec<Bytes>, u64)> = Vec::new();
    for (start, bytes) in parts {
        let end = start + bytes.len() as u64;
        match joined.last_mut() {
            Some((_, pieces, last)) if *last == start => {
                pieces.push(bytes);
                *last = end;
            }
            _ => joined.push((start, vec![bytes], end)),
        }
    }
    let join = |(start, mut pieces, _): (u64, Vec<Bytes>, u64)| match pieces.len() {
        1 => (start, pieces.remove(0)),
        _ => (start, pieces.concat().into()),
    };
    joined.into_iter().map(join).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn close_ranges_become_one_request() {
        assert_eq!(coalesce(vec![20..30, 0..10, 12..15], 2), [0..15, 20..30]);
        assert_eq!(coalesce(vec![0..10, 2..5, 10..11, 40..40], 0), std::slice::from_ref(&(0..11)));
        assert!(coalesce(vec![], 5).is_empty());
    }

    #[test]
    fn few_bytes_are_fetched_between_ranges() {
        assert_eq!(requests(vec![0..500, 510..1000, 1030..1500]), [0..1000, 1030..1500]);
        assert_eq!(requests(vec![0..500, 520..1000, 1020..1500]), [0..500, 520..1000, 1020..1500]);
        assert_eq!(requests(vec![0..500, 500..700]), std::slice::from_ref(&(0..700)));
        let far = vec![0..1 << 30, (1 << 30) + RANGE_GAP + 1..2 << 30];
        assert_eq!(requests(far.clone()), far);
        assert!(requests(vec![]).is_empty());
    }

    #[test]
    fn ranges_are_copied_from_parts() {
        let content: Bytes = (0..=255).cycle().take(1000).collect::<Vec<u8>>().into();
        let part = |range: Range<usize>| (range.start as u64, content.slice(range));
        let parts = |parts: Vec<(u64, Bytes)>| {
            let mut ranges = Ranges::empty(1000);
            parts.into_iter().for_each(|(start, bytes)| ranges.insert(start, bytes));
            ranges
        };
        let ranges = parts(vec![part(0..300), part(300..301), part(301..600)]);
        let copied = ranges.copy(vec![590..600, 10..20, 15..302]).unwrap();
        assert_eq!((copied.bytes(), copied.parts().len()), (302, 2));
        assert_eq!(copied.get_bytes(10, 292).unwrap(), &content[10..302]);
        assert_eq!(copied.get_bytes(590, 10).unwrap(), &content[590..600]);
        for beyond in [590..601, 700..701, 999..1000] {
            assert!(ranges.copy(vec![0..5, beyond]).is_none());
        }
        assert!(parts(vec![part(5..10), part(20..30)]).copy(vec![6..7, 8..22]).is_none());
        assert!(Ranges::empty(1000).copy(vec![0..1, 3..4]).is_none());
        assert_eq!(Ranges::empty(1000).copy(vec![]).unwrap().bytes(), 0);
    }

    #[test]
    fn bytes_outside_the_fetched_ranges_are_an_error() {
        let content: Bytes = (0..=255).cycle().take(1000).collect::<Vec<u8>>().into();
        let parts = vec![(10, content.slice(10..40)), (500, content.slice(500..507))];
        let ranges = Ranges { length: 1000, parts };
        assert_eq!(ranges.bytes(), 37);
        assert_eq!(ranges.get_bytes(12, 25).unwrap(), &content[12..37]);
        assert_eq!(ranges.get_bytes(500, 7).unwrap(), &content[500..507]);
        let mut read = Vec::new();
        ranges.get_read(35).unwrap().read_to_end(&mut read).unwrap();
        assert_eq!(read, &content[35..40]);
        for (start, length) in [(0, 1), (12, 29), (41, 1), (500, 8)] {
            assert!(ranges.get_bytes(start, length).is_err(), "{length} bytes at {start}");
        }
    }
}
