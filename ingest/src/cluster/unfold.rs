//! Cuts sorted records into row groups. The records of a row group are decoded by the task that encodes it, in
//! parallel with other row groups.
//!
//! ```text
//! sorted records ─▶ cut into row groups ─▶ decode, encode ─┐
//!                   in order, one thread   decode, encode ─┼─▶ file
//!                                          decode, encode ─┘
//! ```
//!
//! The decoded size that every record contains determines where a row group ends. A row group begins with a
//! session, so that its records can be decoded without earlier ones. Only if a session is larger than a row group,
//! the next row group continues with the decoder of the previous one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use datafusion::arrow::array::{Array, AsArray, BinaryArray, Int64Array, RecordBatch, UInt64Array};
use datafusion::arrow::datatypes::{Int64Type, UInt64Type};
use onefold_datasets::{Buckets, Decode, PartitionKey};
use serde::{Deserialize, Serialize};

use super::columns::column;
use super::decode::{DecodedTotals, DeltaDecoder, ListColumn, SessionRun};
use super::encode::EncoderOptions;
use super::fold::{DIGEST, RECORD};
use super::origin::{ORIGIN, Origin};
use super::partitions::Partitions;
use super::record::{decoded_bytes, malformed};
use super::timelines::Slice;
use crate::error::{Error, Result, bug};
use crate::sessionize::{KEY, SESSION, TIME};

/// Receives the samples of a clustering, partition by partition and bucket by bucket. A row group contains samples
/// of one range of buckets only.
pub(crate) trait RowGroups {
    /// Whether the samples of a partition are wanted.
    fn wants(&mut self, partition: &PartitionKey) -> Result<bool>;

    /// Counts samples of a partition that are not wanted. `times` has their times.
    fn leave_out(&mut self, partition: &PartitionKey, times: &[i64]) -> Result<()>;

    /// Begins a range of buckets of a partition that is wanted.
    fn enter(&mut self, partition: &PartitionKey, range: u32) -> Result<()>;

    /// Announces the next sample of the range. If it returns `true`, a row group ends before this sample.
    fn push(&mut self, session: i64, time: i64, bytes: usize) -> Result<bool>;

    /// Receives a row group, whose samples `decode` computes.
    fn write_row_group(&mut self, decode: Decode) -> Result<()>;
}

/// Decodes samples that are not written, in portions of about [`PORTION_BYTES`] decoded bytes. A portion ends between
/// sessions, unless a session is larger than a portion.
pub(crate) struct DecodedSamples<W, R> {
    /// Returns whether the samples of a partition are wanted.
    wants: W,
    /// Receives the batches of a partition's samples.
    receive: R,
    partition: PartitionKey,
    session: Option<i64>,
    bytes: usize,
}

/// The approximate number of decoded bytes of a portion.
const PORTION_BYTES: usize = 32 << 20;

impl<W, R> DecodedSamples<W, R>
where
    W: FnMut(&PartitionKey) -> Result<bool>,
    R: FnMut(&PartitionKey, &RecordBatch) -> Result<()>,
{
    /// Passes the samples of the partitions that `wants` selects to `receive`, batch by batch.
    pub(crate) fn new(wants: W, receive: R) -> Self {
        Self { wants, receive, partition: PartitionKey::default(), session: None, bytes: 0 }
    }
}

impl<W, R> RowGroups for DecodedSamples<W, R>
where
    W: FnMut(&PartitionKey) -> Result<bool>,
    R: FnMut(&PartitionKey, &RecordBatch) -> Result<()>,
{
    fn wants(&mut self, partition: &PartitionKey) -> Result<bool> {
        (self.wants)(partition)
    }

    fn leave_out(&mut self, _: &PartitionKey, _: &[i64]) -> Result<()> {
        Ok(())
    }

    fn enter(&mut self, partition: &PartitionKey, _: u32) -> Result<()> {
        (self.partition, self.session, self.bytes) = (partition.clone(), None, 0);
        Ok(())
    }

    fn push(&mut self, session: i64, _: i64, bytes: usize) -> Result<bool> {
        let begins = self.session.replace(session) != Some(session);
        let ends = self.bytes >= PORTION_BYTES && begins || self.bytes >= 2 * PORTION_BYTES;
        self.bytes = if ends { bytes } else { self.bytes + bytes };
        Ok(ends)
    }

    fn write_row_group(&mut self, decode: Decode) -> Result<()> {
        let decoded = decode().map_err(onefold_datasets::Error::Decoding)?;
        decoded.iter().try_for_each(|samples| (self.receive)(&self.partition, samples))
    }
}

/// Options for cutting and decoding sorted records.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CutSpec {
    pub(super) partitions: Partitions,
    pub(super) encoded: EncoderOptions,
    /// Whether to compute the digest of the decoded samples.
    pub(crate) digested: bool,
    pub(super) buckets: Buckets,
    /// For each timeline, the names of the lists that it produces.
    pub(super) timelines: Vec<Vec<String>>,
    /// The columns of a slice that identify its bucket.
    pub(super) place_of_slices: Vec<String>,
    /// The columns whose order numbers the samples of a bucket. Used only if there are timelines.
    pub(super) numbered_by: Vec<String>,
}

/// Cuts records into row groups.
pub(super) struct Unfolding {
    spec: Arc<CutSpec>,
    lists: Vec<ListColumn>,
    place: Option<Place>,
    /// The records since the end of the last row group.
    pieces: Vec<Piece>,
    /// The session of the last sample.
    session: Option<i64>,
    /// Receives the decoder of the previous row group, if this row group begins within a session.
    before: Option<Receiver<DeltaDecoder>>,
    /// The totals of samples that are not decoded.
    left_out: DecodedTotals,
    sender: Sender<DecodedTotals>,
    decoded: Receiver<DecodedTotals>,
}

/// A partition and a range of its buckets.
struct Place {
    partition: PartitionKey,
    range: u32,
    wanted: bool,
    /// Whether a sample has been added.
    entered: bool,
}

/// The columns of a sorted batch that samples are decoded from.
#[derive(Debug)]
pub(super) struct SortedRecords {
    sessions: Int64Array,
    times: Int64Array,
    records: BinaryArray,
    digests: [UInt64Array; 2],
    keys: Option<Int64Array>,
    origins: Option<Int64Array>,
}

/// Some records of a batch, and for each timeline the slice that contains their windows.
struct Piece {
    records: Arc<SortedRecords>,
    rows: Range<usize>,
    slices: Vec<Arc<Slice>>,
}

impl SortedRecords {
    /// Reads the columns of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if a sample belongs to no session.
    pub(super) fn of(batch: &RecordBatch) -> Result<Self> {
        let sessions = column(batch, SESSION)?.as_primitive::<Int64Type>();
        if sessions.null_count() > 0 {
            return Err(Error::engine(
                format!("{} samples belong to no session", sessions.null_count()),
                "the query must give the same rows each time it is evaluated; remove `random()` and the like",
            ));
        }
        let numbers =
            |name: &str| batch.column_by_name(name).map(|column| column.as_primitive::<Int64Type>().clone());
        let half = |name: &str| Ok::<_, Error>(column(batch, name)?.as_primitive::<UInt64Type>().clone());
        Ok(Self {
            sessions: sessions.clone(),
            times: column(batch, TIME)?.as_primitive::<Int64Type>().clone(),
            records: column(batch, RECORD)?.as_binary::<i32>().clone(),
            digests: [half(DIGEST[0])?, half(DIGEST[1])?],
            keys: numbers(KEY),
            origins: numbers(ORIGIN),
        })
    }

    pub(super) fn origins(&self) -> Option<&[i64]> {
        self.origins.as_ref().map(|origins| &origins.values()[..])
    }

    /// Whether a record is a sample to write, not one that the dataset already has.
    fn is_sample(&self, row: usize) -> bool {
        self.origins.as_ref().is_none_or(|origins| Origin::of(origins.value(row)) != Some(Origin::Known))
    }

    fn totals(&self, rows: Range<usize>) -> DecodedTotals {
        let mut totals = DecodedTotals { samples: rows.len() as u64, ..DecodedTotals::default() };
        for row in rows {
            let [high, low] = self.digests.each_ref().map(|half| u128::from(half.value(row)));
            totals.digest.add_number(high << 64 | low);
        }
        totals
    }
}

impl Unfolding {
    pub(super) fn new(spec: CutSpec, lists: Vec<ListColumn>) -> Self {
        let (sender, decoded) = channel();
        Self {
            spec: Arc::new(spec),
            lists,
            place: None,
            pieces: Vec::new(),
            session: None,
            before: None,
            left_out: DecodedTotals::default(),
            sender,
            decoded,
        }
    }

    /// Divides a sorted batch into runs of records of one bucket of one partition.
    pub(super) fn places(
        &self,
        batch: &RecordBatch,
        records: &SortedRecords,
    ) -> Result<Vec<(PartitionKey, u32, Range<usize>)>> {
        let (sessions, buckets) = (records.sessions.values(), self.spec.buckets);
        let bucket = |session: &i64| buckets.bucket_of(*session);
        let mut places = Vec::new();
        for rows in self.spec.partitions.runs(batch)? {
            let partition = self.spec.partitions.key(batch, rows.start)?;
            let mut start = rows.start;
            for run in sessions[rows].chunk_by(|a, b| bucket(a) == bucket(b)) {
                places.push((partition.clone(), bucket(&run[0]), start..start + run.len()));
                start += run.len();
            }
        }
        Ok(places)
    }

    /// Moves to a bucket of a partition. The current row group continues if it has the same partition and range.
    pub(super) fn enter(
        &mut self,
        partition: &PartitionKey,
        bucket: u32,
        output: &mut dyn RowGroups,
    ) -> Result<()> {
        let range = self.spec.buckets.range_of(bucket);
        if self.place.as_ref().is_some_and(|place| place.partition == *partition && place.range == range) {
            return Ok(());
        }
        self.leave(output)?;
        let wanted = output.wants(partition)?;
        self.place = Some(Place { partition: partition.clone(), range, wanted, entered: false });
        self.session = None;
        Ok(())
    }

    /// Adds records of the current bucket. `slices` contain their windows.
    pub(super) fn push(
        &mut self,
        records: &Arc<SortedRecords>,
        rows: Range<usize>,
        slices: &[Arc<Slice>],
        output: &mut dyn RowGroups,
    ) -> Result<()> {
        let Some(place) = &mut self.place else { return Ok(()) };
        if !place.wanted {
            self.left_out.merge(&records.totals(rows.clone()));
            let samples = rows.filter(|row| records.is_sample(*row));
            let times: Vec<i64> = samples.map(|row| records.times.value(row)).collect();
            return output.leave_out(&place.partition, &times);
        }
        let mut start = rows.start;
        for row in rows.clone().filter(|row| records.is_sample(*row)) {
            if let Some(place) = self.place.as_mut().filter(|place| !place.entered) {
                output.enter(&place.partition, place.range)?;
                place.entered = true;
            }
            let session = records.sessions.value(row);
            let bytes = decoded_bytes(records.records.value(row)).ok_or_else(malformed)?;
            if output.push(session, records.times.value(row), bytes)? {
                self.keep(records, start..row, slices);
                self.end_row_group(self.session == Some(session), output)?;
                start = row;
            }
            self.session = Some(session);
        }
        self.keep(records, start..rows.end, slices);
        Ok(())
    }

    fn keep(&mut self, records: &Arc<SortedRecords>, rows: Range<usize>, slices: &[Arc<Slice>]) {
        if !rows.is_empty() {
            self.pieces.push(Piece { records: Arc::clone(records), rows, slices: slices.to_vec() });
        }
    }

    /// Passes the collected records on as a row group. `continues` says whether the next row group begins within a
    /// session.
    fn end_row_group(&mut self, continues: bool, output: &mut dyn RowGroups) -> Result<()> {
        let pieces = std::mem::take(&mut self.pieces);
        let (spec, lists, before) = (Arc::clone(&self.spec), self.lists.clone(), self.before.take());
        let (sender, after) = channel();
        self.before = continues.then_some(after);
        let (sender, totals) = (continues.then_some(sender), self.sender.clone());
        output.write_row_group(Box::new(move || {
            let mut decoder = match before {
                None => {
                    DeltaDecoder::new(&spec.encoded, lists, spec.encoded.keyed).with_digest(spec.digested)
                }
                Some(before) => before.recv().map_err(|_| bug("the row group before was not decoded"))?,
            };
            let rows = decode(&mut decoder, &pieces)?;
            // The send fails if the build has failed; then the totals are not needed.
            let _ = totals.send(decoder.take_totals());
            if let Some(sender) = sender {
                let _ = sender.send(decoder);
            }
            Ok(rows)
        }))
    }

    /// Ends the range.
    pub(super) fn leave(&mut self, output: &mut dyn RowGroups) -> Result<()> {
        match self.place.take() {
            Some(place) if place.entered => self.end_row_group(false, output),
            // All records are samples that the dataset already has.
            _ => {
                for piece in self.pieces.drain(..) {
                    self.left_out.merge(&piece.records.totals(piece.rows));
                }
                Ok(())
            }
        }
    }

    /// The size in bytes of the records that wait for the end of their row group.
    pub(super) fn held_bytes(&self) -> usize {
        let of = |piece: &Piece| {
            let offsets = piece.records.records.value_offsets();
            (offsets[piece.rows.end] - offsets[piece.rows.start]) as usize
        };
        self.pieces.iter().map(of).sum()
    }

    /// Returns the totals of all records. Call it after all row groups are decoded.
    pub(super) fn totals(self) -> DecodedTotals {
        let Self { left_out: mut totals, sender, decoded, .. } = self;
        drop(sender);
        decoded.iter().for_each(|other| totals.merge(&other));
        totals
    }
}

/// Decodes the records of a row group.
fn decode(decoder: &mut DeltaDecoder, pieces: &[Piece]) -> Result<Vec<RecordBatch>> {
    let mut rows = Vec::new();
    let mut give = |batch| rows.push(batch);
    for Piece { records, rows, slices } in pieces {
        let mut start = rows.start;
        for run in records.sessions.values()[rows.clone()].chunk_by(|a, b| a == b) {
            let range = start..start + run.len();
            let run = SessionRun {
                session: run[0],
                times: &records.times.values()[range.clone()],
                keys: records.keys.as_ref().map(|keys| &keys.values()[range.clone()]),
                origins: records.origins().map(|origins| &origins[range.clone()]),
                records: &records.records.slice(range.start, range.len()),
                slices,
            };
            decoder.push(&run, &mut give)?;
            start = range.end;
        }
    }
    decoder.flush(&mut give)?;
    Ok(rows)
}
