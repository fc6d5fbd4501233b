//! From sorted records back to samples: lists as slices of shared ids, none of them copied for a sample that repeats it.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, BinaryArray, Float32Array, Int64Array, ListViewArray, RecordBatch, TimestampMicrosecondArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, TimeUnit};
use onefold_datasets::digest::{Digest, SampleSeeds};
use onefold_datasets::{IdMap, PartitionKey, SESSION_COLUMN, TIME_COLUMN};

use super::fold::FoldOptions;
use super::record::{ChangedList, RecordReader, Shape};
use super::timelines::Slice;
use crate::{Error, Result};

/// Samples of a batch at most, and about how many ids at most: what the writer is given at a time.
const BATCH_SAMPLES: usize = 8192;
const BATCH_IDS: usize = 1 << 20;

/// A list column of the samples.
#[derive(Debug, Clone)]
pub(crate) struct ListColumn {
    pub(crate) name: String,
    /// The ranks of its ids in a vocabulary, if it has one.
    pub(crate) vocabulary: Option<Arc<IdMap>>,
}

/// A run of records of one session, in order.
#[derive(Debug)]
pub(super) struct SessionRun<'a> {
    pub(super) partition: &'a PartitionKey,
    pub(super) session: i64,
    pub(super) times: &'a [i64],
    pub(super) records: &'a BinaryArray,
    /// The parts of the timelines that the session's samples look at; one for each timeline.
    pub(super) slices: &'a [Slice],
}

/// Makes samples of records that come in the order of the dataset.
#[derive(Debug)]
pub(super) struct Unfolder {
    shape: Shape,
    /// The records' lists, then those from timelines.
    lists: Vec<ListColumn>,
    schema: SchemaRef,
    place: Option<(PartitionKey, i64)>,
    /// The chains of the current session.
    chains: HashMap<u64, Chain>,
    /// Where the slices of the current session start in the batch, by list; empty if they are not there.
    slice_starts: Vec<usize>,
    batch: Batch,
    seeds: SampleSeeds,
    samples: u64,
    digest: Digest,
}

/// The lists of the last sample of a chain.
#[derive(Debug)]
struct Chain {
    /// Offset and size of each in the batch.
    places: Vec<(usize, usize)>,
    /// What each adds to the sample's digest.
    parts: Vec<u128>,
    /// The lists, if they were in a batch that is given away.
    carried: Option<Vec<Vec<i64>>>,
}

/// Samples that are not given away yet.
#[derive(Debug, Default)]
struct Batch {
    sessions: Vec<i64>,
    times: Vec<i64>,
    floats: Vec<Vec<f32>>,
    lists: Vec<Lists>,
    ids: usize,
}

/// A list column as it grows.
#[derive(Debug, Default)]
struct Lists {
    ids: Vec<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

impl Unfolder {
    /// An unfolder of records that were folded with these options. `lists` are those of the records, then those of the
    /// timelines, in their order.
    pub(super) fn new(options: &FoldOptions, lists: Vec<ListColumn>) -> Self {
        let (shape, floats) = (options.shape(), &options.floats);
        let mut fields = vec![
            Field::new(SESSION_COLUMN, DataType::Int64, false),
            Field::new(TIME_COLUMN, DataType::Timestamp(TimeUnit::Microsecond, None), false),
        ];
        fields.extend(floats.iter().map(|name| Field::new(name, DataType::Float32, false)));
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        fields.extend(
            lists.iter().map(|list| Field::new(&list.name, DataType::ListView(Arc::clone(&item)), false)),
        );
        let batch = Batch::new(floats.len(), lists.len());
        Self {
            shape,
            seeds: options.seeds(),
            samples: 0,
            digest: Digest::default(),
            lists,
            schema: Arc::new(ArrowSchema::new(fields)),
            place: None,
            chains: HashMap::new(),
            slice_starts: Vec::new(),
            batch,
        }
    }

    /// Adds samples; what is complete goes to `give`, batch by batch, each of one partition.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] if a record is none, or the error of `give`.
    pub(super) fn push(
        &mut self,
        run: &SessionRun<'_>,
        give: &mut dyn FnMut(&PartitionKey, RecordBatch) -> Result<()>,
    ) -> Result<()> {
        let is_same = |(partition, session): &(PartitionKey, i64)| {
            *session == run.session && partition == run.partition
        };
        if !self.place.as_ref().is_some_and(is_same) {
            self.chains.clear();
            self.slice_starts.clear();
            if self.place.as_ref().is_some_and(|(partition, _)| partition != run.partition) {
                self.flush(give)?;
            }
            self.place = Some((run.partition.clone(), run.session));
        }
        for (row, time) in run.times.iter().enumerate() {
            if self.batch.times.len() >= BATCH_SAMPLES || self.batch.ids >= BATCH_IDS {
                self.flush(give)?;
            }
            self.sample(run, *time, run.records.value(row)).ok_or_else(|| Error::Engine {
                message: "a sorted record is not what was written".to_owned(),
                hint: "check the disk of `--spill-directory`; if it is sound, this is a bug in Onefold; please report it"
                    .to_owned(),
            })?;
        }
        Ok(())
    }

    /// Gives what is left.
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    pub(super) fn flush(
        &mut self,
        give: &mut dyn FnMut(&PartitionKey, RecordBatch) -> Result<()>,
    ) -> Result<()> {
        let Some((partition, _)) = &self.place else { return Ok(()) };
        if self.batch.times.is_empty() {
            return Ok(());
        }
        for chain in self.chains.values_mut().filter(|chain| chain.carried.is_none()) {
            let list = |(place, lists): (&(usize, usize), &Lists)| lists.ids[place.0..][..place.1].to_vec();
            chain.carried = Some(chain.places.iter().zip(&self.batch.lists).map(list).collect());
        }
        self.slice_starts.clear();
        let empty = Batch::new(self.shape.floats, self.lists.len());
        let batch = mem::replace(&mut self.batch, empty).into_columns(&self.lists, &self.schema);
        give(partition, batch?)
    }

    /// Samples that came so far.
    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Their digest, without the lists from timelines.
    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    /// Appends a sample; `None` if its record is none.
    fn sample(&mut self, run: &SessionRun<'_>, time: i64, record: &[u8]) -> Option<()> {
        let mut record = RecordReader::new(self.shape, record)?;
        self.batch.sessions.push(run.session);
        self.batch.times.push(time);
        self.batch.floats.iter_mut().zip(record.floats()).for_each(|(column, float)| column.push(float));
        let chain = self.chains.entry(record.chain()).or_insert_with(|| Chain {
            places: vec![(0, 0); self.shape.lists],
            parts: vec![0; self.shape.lists],
            carried: None,
        });
        if let Some(carried) = chain.carried.take() {
            for (place, (ids, lists)) in
                chain.places.iter_mut().zip(carried.iter().zip(&mut self.batch.lists))
            {
                *place = (lists.ids.len(), ids.len());
                lists.ids.extend_from_slice(ids);
                self.batch.ids += ids.len();
            }
        }
        let mut digest = self.seeds.numbers(time, record.floats());
        for (i, lists) in self.batch.lists[..self.shape.lists].iter_mut().enumerate() {
            if record.is_changed(i) {
                let changed = record.next_changed()?;
                self.batch.ids += changed.stored();
                let (offset, size) = lists.append(chain.places[i], &changed)?;
                chain.places[i] = (offset, size);
                chain.parts[i] = self.seeds.list(i, &lists.ids[offset..][..size]);
            }
            digest.add(chain.parts[i]);
            lists.row(chain.places[i])?;
        }
        self.digest.add(digest);
        self.samples += 1;
        self.timeline_lists(run, &mut record.positions())
    }

    /// Appends a sample's lists from timelines: each a part of the session's slice.
    fn timeline_lists(
        &mut self,
        run: &SessionRun<'_>,
        positions: &mut dyn Iterator<Item = i64>,
    ) -> Option<()> {
        let mut lists = self.batch.lists[self.shape.lists..].iter_mut();
        let are_here = !self.slice_starts.is_empty();
        let mut number = 0;
        for slice in run.slices {
            let (start, end) = (positions.next()?, positions.next()?);
            let size = usize::try_from(end.checked_sub(start)?).ok()?;
            // An empty list says nothing else.
            let first = match size {
                0 => 0,
                _ => slice.positions.binary_search(&start).ok()?,
            };
            if size > 0 && slice.positions.get(first + size - 1) != Some(&(end - 1)) {
                return None;
            }
            for ids in &slice.columns {
                let column = lists.next()?;
                if !are_here {
                    self.slice_starts.push(column.ids.len());
                    column.ids.extend_from_slice(ids);
                    self.batch.ids += ids.len();
                }
                column.row((if size == 0 { 0 } else { self.slice_starts[number] + first }, size))?;
                number += 1;
            }
        }
        Some(())
    }
}

impl Lists {
    /// Puts a changed list behind the ids, where it may begin in the list before it; gives its offset and size.
    fn append(
        &mut self,
        (offset, size): (usize, usize),
        changed: &ChangedList<'_>,
    ) -> Option<(usize, usize)> {
        let known = changed.length.checked_sub(changed.stored())?;
        let from = (offset + size).checked_sub(known).filter(|from| *from >= offset)?;
        if known > 0 && offset + size != self.ids.len() {
            self.ids.extend_from_within(from..from + known);
        }
        changed.append_to(&mut self.ids);
        Some((self.ids.len() - changed.length, changed.length))
    }

    /// Adds a row with the list at `offset`.
    fn row(&mut self, (offset, size): (usize, usize)) -> Option<()> {
        self.offsets.push(i32::try_from(offset).ok()?);
        self.sizes.push(i32::try_from(size).ok()?);
        Some(())
    }
}

impl Batch {
    fn new(floats: usize, lists: usize) -> Self {
        let mut batch = Self::default();
        batch.floats.resize_with(floats, Vec::new);
        batch.lists.resize_with(lists, Lists::default);
        batch
    }

    /// The columns, their ids by the vocabularies of `definitions`.
    fn into_columns(self, definitions: &[ListColumn], schema: &SchemaRef) -> Result<RecordBatch> {
        let mut columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from(self.sessions)),
            Arc::new(TimestampMicrosecondArray::from(self.times)),
        ];
        columns.extend(
            self.floats.into_iter().map(|floats| -> ArrayRef { Arc::new(Float32Array::from(floats)) }),
        );
        let item = Arc::new(Field::new("element", DataType::Int64, false));
        for (lists, definition) in self.lists.into_iter().zip(definitions) {
            let ids = match &definition.vocabulary {
                None => lists.ids,
                Some(vocabulary) => vocabulary.apply(&lists.ids),
            };
            let ids = Arc::new(Int64Array::from(ids));
            let item = Arc::clone(&item);
            let lists = ListViewArray::try_new(item, lists.offsets.into(), lists.sizes.into(), ids, None);
            columns.push(Arc::new(lists.map_err(super::convert::engine)?));
        }
        RecordBatch::try_new(Arc::clone(schema), columns).map_err(super::convert::engine)
    }
}
