//! Converts the rows of a cell into record batches of the two logs, and writes them to files.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

use super::arrival::Arrival;
use super::features::{Group, Row, list_field};
use super::label::HiddenModel;
use super::workload::{DENSE_FEATURES, GroupSpec, Workload, dense_names};
use crate::Result;
use crate::raw_log::{RawLogWriter, TIME, TableWriter, list_row, schema};

/// The number of rows of a record batch.
const BATCH_ROWS: usize = 2048;
/// The number of rows after which a file ends, together with the current batch.
const PART_ROWS: usize = 128 << 10;
/// 2026-01-01T00:00:00Z: the time of the first request.
const FIRST_REQUEST_MICROS: i64 = 1_767_225_600_000_000;
/// The time between requests, which arrive at a constant rate of 500 per second.
const REQUEST_INTERVAL_MICROS: i64 = 2_000;
/// The delay of a request's event: the label is known a minute later, when the attribution window ends.
const EVENT_DELAY_MICROS: i64 = 60_000_000;
/// The number of users. The user of a session is drawn uniformly from them.
const USERS: i64 = 10_000_000;

/// The data that all cells of a log share.
#[derive(Debug)]
pub(super) struct World {
    pub(super) groups: Vec<GroupSpec>,
    session_size: f64,
    model: HiddenModel,
    seed: u64,
    features: SchemaRef,
    events: SchemaRef,
}

impl World {
    pub(super) fn new(workload: Workload, seed: u64) -> Self {
        let groups = workload.groups();
        let model = HiddenModel::new(&groups);
        let session_size = workload.session_size();
        Self { session_size, model, seed, features: feature_schema(&groups), events: event_schema(), groups }
    }

    /// Returns the random numbers for one purpose in one cell. There are fewer than 2^16 purposes and fewer than 2^48
    /// cells.
    fn rng(&self, cell: u64, purpose: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(cell << 16 | purpose);
        rng
    }
}

/// Returns the schema of the feature log, which has one row per request.
fn feature_schema(groups: &[GroupSpec]) -> SchemaRef {
    let mut fields = vec![
        Field::new("request_id", DataType::Int64, false),
        Field::new("session_id", DataType::Int64, false),
        Field::new("user_id", DataType::Int64, false),
        Field::new("timestamp", TIME, false),
    ];
    fields.extend(dense_names().iter().map(|name| Field::new(name, DataType::Float32, false)));
    fields.extend(groups.iter().flat_map(|group| &group.features).map(|name| list_field(name)));
    Arc::new(Schema::new(fields))
}

/// Returns the schema of the event log, which has one row per request.
fn event_schema() -> SchemaRef {
    schema([("request_id", DataType::Int64), ("timestamp", TIME), ("label", DataType::Float32)])
}

/// Rows of both logs for the same requests.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) features: RecordBatch,
    events: RecordBatch,
}

/// The rows of one cell, in batches.
#[derive(Debug)]
pub(super) struct Cell<'a> {
    world: &'a World,
    /// The request id of the cell's first row, which is also the session id of its session 0. A cell has no more
    /// sessions than rows, so the session ids of different cells do not overlap.
    first_id: i64,
    arrival: Arrival,
    users: Vec<i64>,
    /// The number of remaining samples of each session.
    left: Vec<u32>,
    groups: Vec<Group<'a>>,
    samples: ChaCha8Rng,
    next_row: usize,
}

impl<'a> Cell<'a> {
    /// Prepares the cell `index` with `samples` rows, whose first request has the number `first_id`.
    pub(super) fn new(world: &'a World, index: u64, first_id: i64, samples: u32) -> Self {
        let mut rng = world.rng(index, 0);
        let arrival = Arrival::draw(samples, world.session_size, &mut rng);
        let users = arrival.sizes.iter().map(|_| rng.random_range(0..USERS)).collect();
        let numbered = (2u64..).zip(&world.groups);
        Self {
            first_id,
            users,
            left: arrival.sizes.clone(),
            arrival,
            groups: numbered.map(|(purpose, spec)| Group::new(spec, world.rng(index, purpose))).collect(),
            samples: world.rng(index, 1),
            next_row: 0,
            world,
        }
    }

    pub(super) fn sessions(&self) -> u64 {
        self.arrival.sizes.len() as u64
    }

    /// Returns the next rows, or `None` at the end of the cell.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Internal`] if Arrow rejects the columns.
    pub(super) fn next_batch(&mut self) -> Result<Option<Batch>> {
        let range = self.next_row..self.arrival.order.len().min(self.next_row + BATCH_ROWS);
        if range.is_empty() {
            return Ok(None);
        }
        self.next_row = range.end;
        let rows = self.rows(range.clone());
        let lists: Vec<Vec<ListArray>> =
            self.groups.par_iter_mut().map(|group| group.columns(&rows)).collect();
        let lists = lists.concat();
        let (dense, labels) = self.draw_samples(&lists, rows.len());

        let ids: Vec<i64> = range.map(|row| self.first_id + row as i64).collect();
        let requests: ArrayRef = Arc::new(Int64Array::from(ids.clone()));
        let sessions = rows.iter().map(|row| self.first_id + i64::from(row.session));
        let users = rows.iter().map(|row| self.users.get(row.session as usize).copied().unwrap_or_default());
        let mut columns: Vec<ArrayRef> = vec![
            Arc::clone(&requests),
            Arc::new(Int64Array::from_iter_values(sessions)),
            Arc::new(Int64Array::from_iter_values(users)),
            request_times(&ids, 0),
        ];
        columns.extend(dense.into_iter().map(|column| Arc::new(Float32Array::from(column)) as ArrayRef));
        columns.extend(lists.into_iter().map(|column| Arc::new(column) as ArrayRef));
        let features = RecordBatch::try_new(Arc::clone(&self.world.features), columns)?;
        let events =
            vec![requests, request_times(&ids, EVENT_DELAY_MICROS), Arc::new(Float32Array::from(labels))];
        let events = RecordBatch::try_new(Arc::clone(&self.world.events), events)?;
        Ok(Some(Batch { features, events }))
    }

    fn rows(&mut self, range: Range<usize>) -> Vec<Row> {
        let (sizes, left) = (&self.arrival.sizes, &mut self.left);
        let row = |&session: &u32| {
            let (size, left) = (sizes.get(session as usize)?, left.get_mut(session as usize)?);
            let first = left == size;
            *left -= 1;
            Some(Row { session, first, last: *left == 0 })
        };
        self.arrival.order.get(range).unwrap_or(&[]).iter().filter_map(row).collect()
    }

    /// Draws the dense columns, which are standard normal, and the labels of the next `rows` rows.
    fn draw_samples(&mut self, lists: &[ListArray], rows: usize) -> (Vec<Vec<f32>>, Vec<f32>) {
        let mut columns: Vec<_> = (0..DENSE_FEATURES).map(|_| Vec::with_capacity(rows)).collect();
        let mut labels = Vec::with_capacity(rows);
        for row in 0..rows {
            let dense: [f32; DENSE_FEATURES] = std::array::from_fn(|_| self.samples.sample(StandardNormal));
            let probability = self.world.model.probability(&dense, |column| list_row(&lists[column], row));
            labels.push(if self.samples.random::<f64>() < probability { 1.0 } else { 0.0 });
            columns.iter_mut().zip(dense).for_each(|(column, value)| column.push(value));
        }
        (columns, labels)
    }
}

/// Returns the times of requests plus `delay` microseconds.
fn request_times(ids: &[i64], delay: i64) -> ArrayRef {
    let time = |id: &i64| FIRST_REQUEST_MICROS + REQUEST_INTERVAL_MICROS * id + delay;
    Arc::new(TimestampMicrosecondArray::from_iter_values(ids.iter().map(time)))
}

/// Writes the files of both logs, part by part. Parts with equal numbers contain the same requests.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    logs: &'a RawLogWriter,
    /// The open feature and event tables, and their number of rows.
    open: Option<(TableWriter, TableWriter, usize)>,
    finished: usize,
}

impl<'a> Parts<'a> {
    pub(super) fn new(logs: &'a RawLogWriter) -> Self {
        Self { logs, open: None, finished: 0 }
    }

    /// Appends a batch.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Io`] or [`crate::Error::Fault`] if a file cannot be written.
    pub(super) fn write(&mut self, batch: &Batch) -> Result<()> {
        let (mut features, mut events, rows) = match self.open.take() {
            Some(open) => open,
            None => {
                let name = format!("part-{:05}.parquet", self.finished);
                let features = self.logs.table(&format!("features/{name}"), batch.features.schema())?;
                (features, self.logs.table(&format!("events/{name}"), batch.events.schema())?, 0)
            }
        };
        features.write(&batch.features)?;
        events.write(&batch.events)?;
        let rows = rows + batch.features.num_rows();
        self.open = Some((features, events, rows));
        if rows >= PART_ROWS { self.finish() } else { Ok(()) }
    }

    /// Ends the current part.
    pub(super) fn finish(&mut self) -> Result<()> {
        if let Some((features, events, _)) = self.open.take() {
            features.finish()?;
            events.finish()?;
            self.finished += 1;
        }
        Ok(())
    }
}
