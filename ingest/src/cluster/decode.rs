//! Decodes sorted delta records to samples. The lists of samples are slices of shared ids, so a repeated list is
//! not copied.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, BinaryArray, Float32Array, Int64Array, ListViewArray, RecordBatch, TimestampMicrosecondArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, TimeUnit};
use onefold_datasets::digest::{Digest, SampleSeeds};
use onefold_datasets::{IdMap, KeptColumn, KeptKind, SAMPLE_KEY_COLUMN, SESSION_COLUMN, TIME_COLUMN};
use serde::{Deserialize, Serialize};

use super::counts::IdCounts;
use super::encode::EncoderOptions;
use super::kept::{KeptBuilder, KeptValue};
use super::origin::Origin;
use super::record::{ChangedList, RecordReader, Shape, malformed};
use super::timelines::Slice;
use crate::error::{Result, arrow_bug};

/// The maximum number of samples, and the approximate maximum number of new ids, of a batch for the writer.
const BATCH_SAMPLES: usize = 8192;
const BATCH_IDS: usize = 1 << 20;

/// A list column of the samples.
#[derive(Debug, Clone)]
pub(crate) struct ListColumn {
    pub(crate) name: String,
    /// The vocabulary that maps the ids to ranks, if the feature has one.
    pub(crate) vocabulary: Option<Arc<IdMap>>,
}

/// Consecutive records of one session, in order.
#[derive(Debug)]
pub(super) struct SessionRun<'a> {
    pub(super) session: i64,
    pub(super) times: &'a [i64],
    /// The hashes of the samples' keys, if samples have keys.
    pub(super) keys: Option<&'a [i64]>,
    /// The [`Origin`] of each sample, if late samples are merged with those of a dataset.
    pub(super) origins: Option<&'a [i64]>,
    pub(super) records: &'a BinaryArray,
    /// For each timeline, the slice that contains the windows of the run.
    pub(super) slices: &'a [Arc<Slice>],
}

/// Decodes records that arrive in the order of the dataset.
#[derive(Debug)]
pub(super) struct DeltaDecoder {
    shape: Shape,
    /// The kinds of the kept columns.
    kept: Vec<KeptKind>,
    /// The lists of the records: first those of the log, then those from timelines.
    lists: Vec<ListColumn>,
    /// The number of lists that come from the log.
    logged: usize,
    schema: SchemaRef,
    /// The session of the last sample.
    session: Option<i64>,
    /// The open chains of the current session.
    chains: HashMap<u64, Chain>,
    /// For each timeline, the slice in the current batch, or in the previous one.
    placed: Vec<PlacedSlice>,
    batch: Batch,
    seeds: SampleSeeds,
    /// Whether the digest includes the lists.
    digested: bool,
    totals: DecodedTotals,
}

/// The number and the digest of decoded samples, and counts of the ids of their lists from timelines.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct DecodedTotals {
    pub(super) samples: u64,
    /// The digest without the lists from timelines, and without any lists if `digested` is `false`.
    pub(super) digest: Digest,
    /// For each list from a timeline, counts of its ids.
    pub(super) timeline_ids: Vec<IdCounts>,
}

impl DecodedTotals {
    pub(super) fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.digest.merge(other.digest);
        if self.timeline_ids.is_empty() {
            self.timeline_ids.extend(other.timeline_ids.iter().map(|_| IdCounts::new()));
        }
        self.timeline_ids.iter_mut().zip(&other.timeline_ids).for_each(|(ids, other)| ids.merge(other));
    }
}

/// The lists of the last sample of a chain.
#[derive(Debug)]
struct Chain {
    /// Offset and size of each list in the batch.
    spans: Vec<(usize, usize)>,
    /// The part of each list in the sample's digest.
    parts: Vec<u128>,
    /// A copy of the lists, if the batch that contained them has been passed on.
    carried: Option<Vec<Vec<i64>>>,
}

/// A slice whose ids are in the batch.
#[derive(Debug, Default)]
struct PlacedSlice {
    /// The number of the slice, if there is one.
    number: Option<i64>,
    /// For each list, the offset of the slice in the ids of the batch.
    starts: Vec<usize>,
}

/// The samples that have not been passed on yet.
#[derive(Debug, Default)]
struct Batch {
    sessions: Vec<i64>,
    times: Vec<i64>,
    /// The hashes of keys; `None` if samples have no keys.
    keys: Option<Vec<i64>>,
    floats: Vec<Vec<f32>>,
    kept: Vec<KeptBuilder>,
    lists: Vec<Lists>,
    /// The number of added ids, without those copied from the previous batch.
    new_ids: usize,
}

/// A builder of a list column.
#[derive(Debug, Default)]
struct Lists {
    ids: Vec<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

impl DeltaDecoder {
    /// Creates a decoder of records that were encoded with `options`. `lists` has the lists of the log, then those
    /// of the timelines, in order. `keyed` says whether samples have keys.
    pub(super) fn new(options: &EncoderOptions, lists: Vec<ListColumn>, keyed: bool) -> Self {
        let (shape, floats) = (options.shape(), &options.floats);
        let mut fields = vec![
            Field::new(SESSION_COLUMN, DataType::Int64, false),
            Field::new(TIME_COLUMN, DataType::Timestamp(TimeUnit::Microsecond, None), false),
        ];
        fields.extend(floats.iter().map(|name| Field::new(name, DataType::Float32, false)));
        let kept: Vec<KeptKind> = options.kept.iter().map(|column| column.kind).collect();
        let kept_field = |column: &KeptColumn| Field::new(&column.name, column.kind.data_type(), true);
        fields.extend(options.kept.iter().map(kept_field));
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        fields.extend(
            lists.iter().map(|list| Field::new(&list.name, DataType::ListView(Arc::clone(&item)), false)),
        );
        fields.extend(keyed.then(|| Field::new(SAMPLE_KEY_COLUMN, DataType::Int64, false)));
        let batch = Batch::new(floats.len(), &kept, lists.len(), keyed);
        Self {
            shape,
            kept,
            logged: options.digested,
            seeds: options.seeds(),
            digested: true,
            totals: DecodedTotals::default(),
            lists,
            schema: Arc::new(ArrowSchema::new(fields)),
            session: None,
            chains: HashMap::new(),
            placed: Vec::new(),
            batch,
        }
    }

    /// Sets whether the digest includes the lists. The default is `true`.
    pub(super) fn with_digest(mut self, digested: bool) -> Self {
        self.digested = digested;
        self
    }

    /// Adds samples of a partition, and passes complete batches to `give`.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if a record is malformed.
    pub(super) fn push(&mut self, run: &SessionRun<'_>, give: &mut dyn FnMut(RecordBatch)) -> Result<()> {
        if self.session != Some(run.session) {
            self.chains.clear();
            self.session = Some(run.session);
        }
        for (row, time) in run.times.iter().enumerate() {
            if self.batch.times.len() >= BATCH_SAMPLES || self.batch.new_ids >= BATCH_IDS {
                self.flush(give)?;
            }
            self.sample(run, row, *time).ok_or_else(malformed)?;
        }
        Ok(())
    }

    /// Passes the remaining samples to `give`.
    pub(super) fn flush(&mut self, give: &mut dyn FnMut(RecordBatch)) -> Result<()> {
        if self.batch.times.is_empty() && self.batch.new_ids == 0 {
            return Ok(());
        }
        for chain in self.chains.values_mut().filter(|chain| chain.carried.is_none()) {
            let list = |(span, lists): (&(usize, usize), &Lists)| lists.ids[span.0..][..span.1].to_vec();
            chain.carried = Some(chain.spans.iter().zip(&self.batch.lists).map(list).collect());
        }
        self.placed.iter_mut().for_each(|placed| placed.starts.clear());
        let empty = Batch::new(self.shape.floats, &self.kept, self.lists.len(), self.batch.keys.is_some());
        let batch = mem::replace(&mut self.batch, empty);
        // Samples that the dataset already has add ids to a batch, but no rows.
        if batch.times.is_empty() {
            return Ok(());
        }
        give(batch.into_columns(&self.lists, &self.schema)?);
        Ok(())
    }

    /// Takes the totals of the samples decoded since the last call.
    pub(super) fn take_totals(&mut self) -> DecodedTotals {
        mem::take(&mut self.totals)
    }

    /// The number of open chains of the current session.
    #[cfg(test)]
    pub(super) fn open_chains(&self) -> usize {
        self.chains.len()
    }

    /// Appends a sample. A sample that the dataset already has only continues its chain. Returns `None` if the
    /// record is malformed.
    fn sample(&mut self, run: &SessionRun<'_>, row: usize, time: i64) -> Option<()> {
        let mut record = RecordReader::new(self.shape, run.records.value(row))?;
        let origin = run.origins.map_or(Some(Origin::Late), |origins| Origin::of(origins[row]))?;
        let is_kept = origin != Origin::Known;
        if is_kept {
            self.batch.sessions.push(run.session);
            self.batch.times.push(time);
            self.batch.floats.iter_mut().zip(record.floats()).for_each(|(column, float)| column.push(float));
            self.batch.keys.iter_mut().zip(run.keys).for_each(|(column, keys)| column.push(keys[row]));
        }
        let mut chain = self.chains.remove(&record.chain()).unwrap_or_else(|| Chain {
            spans: vec![(0, 0); self.shape.lists],
            parts: vec![0; self.shape.lists],
            carried: None,
        });
        for (span, (ids, lists)) in
            chain.spans.iter_mut().zip(chain.carried.take().iter().flatten().zip(&mut self.batch.lists))
        {
            *span = (lists.ids.len(), ids.len());
            lists.ids.extend_from_slice(ids);
        }
        let mut digest = self.seeds.numbers(time, record.floats());
        for (i, lists) in self.batch.lists[..self.shape.lists].iter_mut().enumerate() {
            if record.is_changed(i) {
                let changed = record.next_changed()?;
                let before = lists.ids.len();
                let (offset, size) = lists.append(chain.spans[i], &changed)?;
                self.batch.new_ids += lists.ids.len() - before;
                chain.spans[i] = (offset, size);
                if i < self.logged && self.digested {
                    chain.parts[i] = self.seeds.list(i, &lists.ids[offset..][..size]);
                }
            }
            digest.add(chain.parts[i]);
            if is_kept && (i < self.logged || origin == Origin::Old) {
                lists.row(chain.spans[i])?;
            }
        }
        for (i, kind) in self.kept.iter().enumerate() {
            let value = record.next_kept(*kind)?;
            value.into_iter().for_each(|value| digest.add(value.part(self.seeds.kept(i))));
            if is_kept {
                self.batch.kept[i].push(value);
                // Long texts end a batch just as ids do.
                self.batch.new_ids += value.map_or(0, KeptValue::ids);
            }
        }
        if !record.ends_chain() {
            self.chains.insert(record.chain(), chain);
        }
        self.totals.digest.add(digest);
        self.totals.samples += 1;
        if origin == Origin::Late { self.timeline_lists(run, &mut record.positions()) } else { Some(()) }
    }

    /// Appends a sample's lists from timelines. Each is a range of a slice.
    fn timeline_lists(
        &mut self,
        run: &SessionRun<'_>,
        positions: &mut dyn Iterator<Item = i64>,
    ) -> Option<()> {
        let mut number = self.logged;
        self.placed.resize_with(run.slices.len(), PlacedSlice::default);
        for (slice, placed) in run.slices.iter().zip(&mut self.placed) {
            let (start, end) = (positions.next()?, positions.next()?);
            let size = usize::try_from(end.checked_sub(start)?).ok()?;
            let lists = number..number + slice.columns.len();
            let columns = self.batch.lists.get_mut(lists.clone())?;
            number = lists.end;
            if size == 0 {
                columns.iter_mut().try_for_each(|column| column.row((0, 0)))?;
                continue;
            }
            let first = slice.positions.binary_search(&start).ok()?;
            // Positions are increasing, so if the first and the last position match, all positions between them
            // exist.
            if slice.positions.get(first + size - 1) != Some(&(end - 1)) {
                return None;
            }
            let is_new = placed.number != Some(slice.number);
            if is_new || placed.starts.is_empty() {
                if is_new {
                    let all = &mut self.totals.timeline_ids;
                    all.resize_with(self.lists.len() - self.logged, IdCounts::new);
                    let ids = &mut all[lists.start - self.logged..];
                    ids.iter_mut().zip(&slice.columns).for_each(|(counts, ids)| counts.add(ids));
                }
                placed.number = Some(slice.number);
                placed.starts = columns.iter().map(|column| column.ids.len()).collect();
                for (column, ids) in columns.iter_mut().zip(&slice.columns) {
                    column.ids.extend_from_slice(ids);
                    // A slice copied from the previous batch does not count: otherwise it could fill this batch
                    // before the batch has a sample.
                    self.batch.new_ids += if is_new { ids.len() } else { 0 };
                }
            }
            for (column, start) in columns.iter_mut().zip(&placed.starts) {
                column.row((start + first, size))?;
            }
        }
        Some(())
    }
}

impl Lists {
    /// Appends the ids of a changed list, which may begin with a suffix of the previous list. Returns its offset
    /// and size.
    fn append(
        &mut self,
        (offset, size): (usize, usize),
        changed: &ChangedList<'_>,
    ) -> Option<(usize, usize)> {
        let known = changed.length.checked_sub(changed.stored)?;
        let from = (offset + size).checked_sub(known).filter(|from| *from >= offset)?;
        if known > 0 && offset + size != self.ids.len() {
            self.ids.extend_from_within(from..from + known);
        }
        changed.append_to(&mut self.ids);
        Some((self.ids.len() - changed.length, changed.length))
    }

    /// Adds a row: the list with this offset and size.
    fn row(&mut self, (offset, size): (usize, usize)) -> Option<()> {
        self.offsets.push(i32::try_from(offset).ok()?);
        self.sizes.push(i32::try_from(size).ok()?);
        Some(())
    }
}

impl Batch {
    fn new(floats: usize, kept: &[KeptKind], lists: usize, keyed: bool) -> Self {
        let mut batch = Self { keys: keyed.then(Vec::new), ..Self::default() };
        batch.kept.extend(kept.iter().map(|kind| KeptBuilder::new(*kind)));
        batch.floats.resize_with(floats, Vec::new);
        batch.lists.resize_with(lists, Lists::default);
        batch
    }

    /// Builds the columns of the batch. Ids are mapped by the vocabularies of `definitions`.
    fn into_columns(self, definitions: &[ListColumn], schema: &SchemaRef) -> Result<RecordBatch> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from(self.sessions)),
            Arc::new(TimestampMicrosecondArray::from(self.times)),
        ];
        columns.extend(
            self.floats.into_iter().map(|floats| -> ArrayRef { Arc::new(Float32Array::from(floats)) }),
        );
        columns.extend(self.kept.into_iter().map(KeptBuilder::finish));
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        for (lists, definition) in self.lists.into_iter().zip(definitions) {
            let ids = match &definition.vocabulary {
                None => lists.ids,
                Some(vocabulary) => vocabulary.apply(&lists.ids),
            };
            let ids = Arc::new(Int64Array::from(ids));
            let item = Arc::clone(&item);
            let lists = ListViewArray::try_new(item, lists.offsets.into(), lists.sizes.into(), ids, None);
            columns.push(Arc::new(lists.map_err(arrow_bug)?));
        }
        columns.extend(self.keys.map(|keys| -> ArrayRef { Arc::new(Int64Array::from(keys)) }));
        RecordBatch::try_new(Arc::clone(schema), columns).map_err(arrow_bug)
    }
}
