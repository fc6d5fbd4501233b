//! A sample as a byte record of its changes since the previous sample. The engine sorts these records instead of
//! the lists.
//!
//! ```text
//! chain u64 │ decoded bytes u32 │ floats │ positions │ one bit per list: changed? │ the changed lists │ kept values
//!                                4 bytes   8 bytes each
//! a changed list: length, ids stored (varints), bits per id, the ids, one after the other without bytes between them
//! a kept value:   0 if null, or else 1 and an integer (varint) or a length (varint) and a text
//! ```
//!
//! A **chain** is a run of samples of one session in which each sample is described by its changes since the
//! previous one. The first sample of a chain has every list changed. The highest bit of `chain` marks the last
//! sample of a chain. A changed list is a suffix of the previous list followed by the stored ids. Records are
//! stored only in the engine's spill files, so the format has no version.

use onefold_base::varint::{read_varint, write_varint};
use onefold_datasets::KeptKind;

use super::kept::KeptValue;
use crate::error::Error;

/// The bit that marks the last record of a chain, within byte [`ENDS_AT`] of the chain number.
const ENDS: u8 = 0x80;
/// The index of the byte with the [`ENDS`] bit.
const ENDS_AT: usize = 7;

/// Ids that need more bits than this are stored with 64 bits. An id of up to 57 bits can be read with one 8-byte
/// load, at whichever bit it begins.
const MOST_BITS: u32 = 57;

/// The numbers of floats, timeline positions and lists of each record of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) floats: usize,
    pub(super) positions: usize,
    pub(super) lists: usize,
}

/// Returns the decoded size of the sample of a record, in bytes; `None` if the record is malformed.
pub(super) fn decoded_bytes(record: &[u8]) -> Option<usize> {
    let (bytes, _) = record.get(8..)?.split_first_chunk::<4>()?;
    Some(u32::from_le_bytes(*bytes) as usize)
}

/// Marks a written record as the last one of its chain.
pub(super) fn end_chain(record: &mut [u8]) {
    record[ENDS_AT] |= ENDS;
}

/// Returns the error for a record that was changed after it was written.
pub(super) fn malformed() -> Error {
    Error::engine(
        "a sorted record differs from what was written",
        "check the disk of the spill directory; if it is sound, this is a bug in Onefold; please report it",
    )
}

/// Writes one record at a time.
#[derive(Debug)]
pub(super) struct RecordWriter {
    shape: Shape,
    bytes: Vec<u8>,
    /// The offset of the bits of changed lists in the current record.
    bits: usize,
}

/// Reads one record from start to end.
#[derive(Debug)]
pub(super) struct RecordReader<'a> {
    chain: u64,
    ends: bool,
    floats: &'a [u8],
    positions: &'a [u8],
    bits: &'a [u8],
    lists: &'a [u8],
}

/// A list that differs from the previous sample's list.
#[derive(Debug)]
pub(super) struct ChangedList<'a> {
    /// The number of ids of the whole list.
    pub(super) length: usize,
    /// The number of ids, at the end of the list, that the record stores.
    pub(super) stored: usize,
    /// The packed ids, followed by the rest of the record.
    bytes: &'a [u8],
    /// The number of bits per id.
    width: u32,
}

impl RecordWriter {
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, bytes: Vec::new(), bits: 0 }
    }

    /// Starts a record and discards the previous one. `chain` must be below 2^63. `decoded_bytes` is the decoded
    /// size of the sample.
    pub(super) fn start(
        &mut self,
        chain: u64,
        decoded_bytes: usize,
        floats: impl Iterator<Item = f32>,
        positions: impl Iterator<Item = i64>,
    ) {
        self.bytes.clear();
        self.bytes.extend_from_slice(&chain.to_le_bytes());
        self.bytes.extend_from_slice(&u32::try_from(decoded_bytes).unwrap_or(u32::MAX).to_le_bytes());
        floats.for_each(|float| self.bytes.extend_from_slice(&float.to_le_bytes()));
        positions.for_each(|position| self.bytes.extend_from_slice(&position.to_le_bytes()));
        self.bits = self.bytes.len();
        self.bytes.resize(self.bits + self.shape.lists.div_ceil(8), 0);
    }

    /// Adds the changed list number `list`. It has `length` ids and ends with the ids `stored`. Lists must be added
    /// in order.
    pub(super) fn changed(&mut self, list: usize, length: usize, stored: &[i64]) {
        self.bytes[self.bits + list / 8] |= 1 << (list % 8);
        write_varint(&mut self.bytes, length as u64);
        write_varint(&mut self.bytes, stored.len() as u64);
        // The union of the bits of all zigzag codes is as wide as the widest code. Every id takes at least one bit.
        let union = stored.iter().fold(1, |bits, id| bits | zigzag(*id));
        let width = match u64::BITS - union.leading_zeros() {
            width @ ..=MOST_BITS => width,
            _ => u64::BITS,
        };
        self.bytes.push(width as u8);
        self.pack(stored, width);
    }

    /// Appends the zigzag codes of ids, `width` bits each.
    fn pack(&mut self, ids: &[i64], width: u32) {
        let end = self.bytes.len() + packed_bytes(ids.len(), width).expect("a list in memory has fewer bits");
        let (mut word, mut filled) = (0, 0);
        for id in ids {
            let code = zigzag(*id);
            word |= code << filled;
            filled += width;
            if filled >= u64::BITS {
                self.bytes.extend_from_slice(&word.to_le_bytes());
                filled -= u64::BITS;
                // The bits of the code that did not fit into the full word; 0 if all of them did.
                word = code.checked_shr(width - filled).unwrap_or(0);
            }
        }
        self.bytes.extend_from_slice(&word.to_le_bytes());
        self.bytes.truncate(end);
    }

    /// Adds the value of the next kept column, after all lists.
    pub(super) fn kept(&mut self, value: Option<KeptValue<'_>>) {
        self.bytes.push(u8::from(value.is_some()));
        match value {
            None => {}
            Some(KeptValue::Integer(integer)) => write_varint(&mut self.bytes, zigzag(integer)),
            Some(KeptValue::Text(text)) => {
                write_varint(&mut self.bytes, text.len() as u64);
                self.bytes.extend_from_slice(text.as_bytes());
            }
        }
    }

    /// Returns the record that was begun by [`start`](Self::start).
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl<'a> RecordReader<'a> {
    /// Reads a record of `shape`; `None` if it is malformed.
    pub(super) fn new(shape: Shape, record: &'a [u8]) -> Option<Self> {
        let (chain, rest) = record.split_first_chunk::<8>()?;
        let (_, rest) = rest.split_first_chunk::<4>()?;
        let mut number = *chain;
        number[ENDS_AT] &= !ENDS;
        let (floats, rest) = rest.split_at_checked(4 * shape.floats)?;
        let (positions, rest) = rest.split_at_checked(8 * shape.positions)?;
        let (bits, lists) = rest.split_at_checked(shape.lists.div_ceil(8))?;
        let (chain, ends) = (u64::from_le_bytes(number), chain[ENDS_AT] & ENDS != 0);
        Some(Self { chain, ends, floats, positions, bits, lists })
    }

    pub(super) fn chain(&self) -> u64 {
        self.chain
    }

    /// Whether the record is the last one of its chain.
    pub(super) fn ends_chain(&self) -> bool {
        self.ends
    }

    pub(super) fn floats(&self) -> impl Iterator<Item = f32> + 'a {
        self.floats.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
    }

    pub(super) fn positions(&self) -> impl Iterator<Item = i64> + 'a {
        self.positions.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes))
    }

    /// Whether list number `list` changed. If it did, [`next_changed`](Self::next_changed) returns it after all
    /// earlier changed lists.
    pub(super) fn is_changed(&self, list: usize) -> bool {
        self.bits[list / 8] & (1 << (list % 8)) != 0
    }

    /// Reads the next changed list; `None` if the record is malformed.
    #[inline]
    pub(super) fn next_changed(&mut self) -> Option<ChangedList<'a>> {
        let length = usize::try_from(read_varint(&mut self.lists)?).ok()?;
        let stored = usize::try_from(read_varint(&mut self.lists)?).ok()?;
        let (width, bytes) = self.lists.split_first()?;
        let width = Some(u32::from(*width)).filter(|width| matches!(width, 1..=MOST_BITS | 64))?;
        self.lists = bytes.get(packed_bytes(stored, width)?..)?;
        Some(ChangedList { length, stored, bytes, width })
    }

    /// Reads the value of the next kept column, which has the type `kind`. Call it after all changed lists were
    /// read. The outer `None` means that the record is malformed, the inner one a null.
    pub(super) fn next_kept(&mut self, kind: KeptKind) -> Option<Option<KeptValue<'a>>> {
        let (present, rest) = self.lists.split_first()?;
        self.lists = rest;
        if *present == 0 {
            return Some(None);
        }
        let number = read_varint(&mut self.lists)?;
        if kind == KeptKind::Integer {
            return Some(Some(KeptValue::Integer(unzigzag(number))));
        }
        let (text, rest) = self.lists.split_at_checked(usize::try_from(number).ok()?)?;
        self.lists = rest;
        Some(Some(KeptValue::Text(std::str::from_utf8(text).ok()?)))
    }
}

impl ChangedList<'_> {
    /// Appends the stored ids to `ids`.
    pub(super) fn append_to(&self, ids: &mut Vec<i64>) {
        let (width, mask) = (self.width as usize, u64::MAX >> (u64::BITS - self.width));
        let code = |word: [u8; 8], bit: usize| unzigzag(u64::from_le_bytes(word) >> (bit % 8) & mask);
        let bits = (0..self.stored).map(|id| id * width);
        let last_word = self.stored.saturating_sub(1) * width / 8;
        if last_word + size_of::<u64>() <= self.bytes.len() {
            ids.extend(bits.map(|bit| {
                let word = self.bytes[bit / 8..].first_chunk().expect("the last id has a whole word");
                code(*word, bit)
            }));
            return;
        }
        // The last ids are less than a word away from the end of the record.
        ids.extend(bits.map(|bit| {
            let (mut word, rest) = ([0; size_of::<u64>()], &self.bytes[bit / 8..]);
            let there = rest.len().min(word.len());
            word[..there].copy_from_slice(&rest[..there]);
            code(word, bit)
        }));
    }
}

/// Returns the size of `ids` ids of `width` bits each, in bytes; `None` on overflow.
fn packed_bytes(ids: usize, width: u32) -> Option<usize> {
    Some(ids.checked_mul(width as usize)?.div_ceil(8))
}

/// Encodes an integer so that values with a small magnitude get small codes.
fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)) as u64
}

fn unzigzag(code: u64) -> i64 {
    (code >> 1) as i64 ^ -((code & 1) as i64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_are_read_as_they_were_written(
            chain in 0..1_u64 << 63,
            ends in any::<bool>(),
            bytes in any::<u32>(),
            floats in prop::collection::vec(any::<f32>(), 0..4),
            positions in prop::collection::vec(any::<i64>(), 0..3),
            lists in prop::collection::vec(
                prop::option::of((0_usize..300, prop::collection::vec(prop_oneof![-5..500_i64, any::<i64>()], 0..20))),
                0..20,
            ),
            kept in prop::collection::vec(prop::option::of(prop_oneof![any::<i64>(), -9..9_i64]), 0..4),
        ) {
            let shape = Shape { floats: floats.len(), positions: positions.len(), lists: lists.len() };
            let mut writer = RecordWriter::new(shape);
            writer.start(1, 3, floats.iter().map(|float| float + 1.0), positions.iter().copied());
            writer.start(chain, bytes as usize, floats.iter().copied(), positions.iter().copied());
            for (i, list) in lists.iter().enumerate() {
                if let Some((length, stored)) = list {
                    writer.changed(i, *length, stored);
                }
            }
            let texts: Vec<_> = kept.iter().map(|value| value.map(|value| format!("ü{value}"))).collect();
            for (integer, text) in kept.iter().zip(&texts) {
                writer.kept(integer.map(KeptValue::Integer));
                writer.kept(text.as_deref().map(KeptValue::Text));
            }
            let mut record = writer.bytes().to_vec();
            if ends {
                end_chain(&mut record);
            }
            prop_assert_eq!(decoded_bytes(&record), Some(bytes as usize));
            let mut reader = RecordReader::new(shape, &record).unwrap();
            prop_assert_eq!((reader.chain(), reader.ends_chain()), (chain, ends));
            let bits = |floats: Vec<f32>| floats.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            prop_assert_eq!(bits(reader.floats().collect()), bits(floats));
            prop_assert_eq!(reader.positions().collect::<Vec<_>>(), positions);
            for (i, list) in lists.iter().enumerate() {
                prop_assert_eq!(reader.is_changed(i), list.is_some());
                if let Some((length, stored)) = list {
                    let changed = reader.next_changed().unwrap();
                    let mut ids = vec![7];
                    changed.append_to(&mut ids);
                    prop_assert_eq!((changed.length, changed.stored, &ids[1..]), (*length, stored.len(), &stored[..]));
                }
            }
            for (integer, text) in kept.iter().zip(&texts) {
                let found = [KeptKind::Integer, KeptKind::Text].map(|kind| reader.next_kept(kind).unwrap());
                prop_assert_eq!(found, [integer.map(KeptValue::Integer), text.as_deref().map(KeptValue::Text)]);
            }
            prop_assert_eq!(reader.next_kept(KeptKind::Text), None);
        }
    }

    #[test]
    fn ids_of_every_width_and_sign_are_restored() {
        let shape = Shape { floats: 0, positions: 0, lists: 2 };
        for id in (0..63).flat_map(|bit| [1 << bit, -(1 << bit), i64::MIN >> bit, !(i64::MIN >> bit)]) {
            for count in [1, 2, 7, 8, 9, 70] {
                let mut writer = RecordWriter::new(shape);
                writer.start(0, 0, [].into_iter(), [].into_iter());
                let list: Vec<i64> = (0..count).map(|place| if place % 3 == 1 { 0 } else { id }).collect();
                writer.changed(0, list.len(), &list);
                writer.changed(1, list.len(), &list);
                let mut ids = Vec::new();
                let mut reader = RecordReader::new(shape, writer.bytes()).unwrap();
                reader.next_changed().unwrap().append_to(&mut ids);
                reader.next_changed().unwrap().append_to(&mut ids);
                assert_eq!(ids, [&list[..], &list].concat());
            }
        }
    }

    #[test]
    fn malformed_records_are_detected() {
        let shape = Shape { floats: 1, positions: 0, lists: 1 };
        assert!(RecordReader::new(shape, &[0; 16]).is_none());
        assert_eq!(decoded_bytes(&[0; 11]), None);
        // The length of the list, the number of stored ids and their width; then the ids.
        let next = |list: &[u8]| {
            let record = [&[0; 17][..], list].concat();
            RecordReader::new(shape, &record).unwrap().next_changed().is_some()
        };
        assert!(next(&[2, 2, 9, 0, 0, 0]));
        assert!(!next(&[2, 2, 9, 0, 0]), "two ids of nine bits take three bytes");
        assert!(!next(&[2, 2, 0, 0, 0, 0]) && !next(&[2, 2, 58]) && !next(&[2, 2, 65]) && !next(&[2, 2]));
        let most = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
        assert!(!next(&[&most[..], &most, &[64]].concat()), "more bits than can be counted");
    }
}
