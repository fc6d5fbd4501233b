//! Late materialization: a hash join does not copy the lists of its streamed side.
//!
//! DataFusion's hash join copies each column of its output twice: it selects the rows, and then fills batches. Lists
//! are most of the bytes of a log, and most joins output each row of the log once. The join therefore receives row
//! numbers instead of the lists. The lists are added to each batch of its output, as slices if the rows are
//! consecutive.
//!
//! ```text
//! streamed batches ──▶ row numbers for lists ──▶ hash join ──▶ rows with row numbers ──▶ rows with lists
//!        └──────────────── lists, until all rows of the batch have passed ───────────────────▲
//! ```
//!
//! The join must output every streamed row, so that only the lists of a few batches are kept. An inner join is
//! therefore run as an outer join, and the rows without a partner are dropped from its output.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use datafusion::arrow::array::{Array, ArrayRef, AsArray, NullArray, RecordBatch, UInt32Array, UInt64Array};
use datafusion::arrow::compute::{filter_record_batch, is_not_null, take_record_batch};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef, UInt64Type};
use datafusion::common::{JoinSide, JoinType, NullEquality};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::physical_expr::utils::collect_columns;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::expressions::Column;
use datafusion::physical_plan::joins::utils::build_join_schema;
use datafusion::physical_plan::joins::{HashJoinExec, HashJoinExecBuilder};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use futures::{StreamExt, TryStreamExt};
use onefold_base::sync::locked;

use crate::probe_lists::is_wide;

/// The lists that a hash join does not receive.
#[derive(Debug)]
pub(crate) struct LateLists {
    /// The columns of the join's output, including the lists.
    output: SchemaRef,
    /// The source of each output column.
    sources: Vec<Source>,
    /// The columns of the streamed side that the join receives.
    pub(crate) seen: SchemaRef,
    /// The replacement of each column of the streamed side; `None` for columns that the join receives.
    stand_ins: Vec<Option<StandIn>>,
    /// The columns of the streamed side that are added to the output.
    late: Vec<usize>,
    /// The output columns that the join computes.
    computed: Computed,
    /// For each partition of the streamed side, the lists of batches with rows that the join has not output yet.
    waiting: Vec<Mutex<Waiting>>,
}

#[derive(Debug, Clone, Copy)]
enum Source {
    /// A column that the join computes.
    Joined(usize),
    /// One of the late columns.
    Late(usize),
}

#[derive(Debug, Clone, Copy)]
enum StandIn {
    RowNumbers,
    Nothing,
}

#[derive(Debug)]
struct Computed {
    /// The indices in the unprojected output.
    projection: Vec<usize>,
    /// The index of the column of row numbers.
    numbers: usize,
    /// The index of a column that is null if a streamed row has no partner; `None` if such rows are kept.
    partner: Option<usize>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The number of the next row.
    next: u64,
    /// The number of the first row of each batch, and its late columns.
    batches: VecDeque<(u64, RecordBatch)>,
}

impl LateLists {
    /// Returns the lists that need not pass through `join`, or `None` if there are none. `partitions` is the number of
    /// partitions of the streamed side.
    pub(crate) fn of(join: &HashJoinExec, partitions: usize) -> Option<Self> {
        let keeps_rows = match join.join_type() {
            JoinType::Inner => join.null_equality() == NullEquality::NullEqualsNothing,
            JoinType::Right => true,
            _ => false,
        };
        if !keeps_rows {
            return None;
        }
        let streamed = join.right().schema();
        let hidden = hidden_columns(join, &streamed);
        let (_, columns) = build_join_schema(&join.left().schema(), &streamed, join.join_type());
        let all: Vec<usize> = (0..columns.len()).collect();
        let wanted = join.projection.as_deref().unwrap_or(&all);
        let (mut late, mut projection) = (Vec::new(), Vec::new());
        let mut sources = Vec::new();
        for place in wanted {
            let column = &columns[*place];
            if column.side == JoinSide::Right && hidden[column.index] {
                sources.push(Source::Late(position_or_push(&mut late, column.index)));
            } else {
                sources.push(Source::Joined(position_or_push(&mut projection, *place)));
            }
        }
        let first = *late.first()?;
        let place_of =
            |side, index| columns.iter().position(|column| (column.side, column.index) == (side, index));
        let numbers = position_or_push(&mut projection, place_of(JoinSide::Right, first)?);
        let partner = match join.join_type() {
            JoinType::Inner => {
                let key = join.on().first()?.0.downcast_ref::<Column>()?.index();
                Some(position_or_push(&mut projection, place_of(JoinSide::Left, key)?))
            }
            _ => None,
        };
        let stand_in = |(i, hidden): (usize, &bool)| match (hidden, i == first) {
            (false, _) => None,
            (true, true) => Some(StandIn::RowNumbers),
            (true, false) => Some(StandIn::Nothing),
        };
        let stand_ins: Vec<_> = hidden.iter().enumerate().map(stand_in).collect();
        Some(Self {
            output: join.schema(),
            sources,
            seen: Arc::new(seen_schema(&streamed, &stand_ins)),
            stand_ins,
            late,
            computed: Computed { projection, numbers, partner },
            waiting: (0..partitions).map(|_| Mutex::default()).collect(),
        })
    }

    /// Makes the join compute only the columns that it has to compute.
    pub(crate) fn computing(&self, join: HashJoinExecBuilder) -> HashJoinExecBuilder {
        join.with_type(JoinType::Right).with_projection(Some(self.computed.projection.clone()))
    }

    /// Replaces the lists of a partition of the streamed side.
    pub(crate) fn hide(
        self: &Arc<Self>,
        partition: usize,
        rows: SendableRecordBatchStream,
    ) -> SendableRecordBatchStream {
        let late = Arc::clone(self);
        let hidden = rows.map(move |batch| late.hidden(partition, &batch?));
        Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.seen), hidden))
    }

    /// Adds the lists to the output of a partition of the join.
    pub(crate) fn restore(
        self: &Arc<Self>,
        partition: usize,
        rows: SendableRecordBatchStream,
    ) -> SendableRecordBatchStream {
        let late = Arc::clone(self);
        let whole = rows.map(move |batch| {
            let batches = late.restored(partition, batch?)?;
            Ok::<_, DataFusionError>(futures::stream::iter(batches.into_iter().map(Ok)))
        });
        Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.output), whole.try_flatten()))
    }

    fn hidden(&self, partition: usize, batch: &RecordBatch) -> Result<RecordBatch> {
        let mut waiting = self.waiting(partition);
        let (first, rows) = (waiting.next, batch.num_rows());
        waiting.next += rows as u64;
        if rows > 0 {
            waiting.batches.push_back((first, batch.project(&self.late)?));
        }
        let next = waiting.next;
        drop(waiting);
        let columns = batch.columns().iter().zip(&self.stand_ins).map(|(column, stand_in)| match stand_in {
            None => Arc::clone(column),
            Some(StandIn::RowNumbers) => Arc::new(UInt64Array::from_iter_values(first..next)) as ArrayRef,
            Some(StandIn::Nothing) => Arc::new(NullArray::new(rows)),
        });
        Ok(RecordBatch::try_new(Arc::clone(&self.seen), columns.collect())?)
    }

    /// Adds the lists to the rows of a batch of the join's output. Returns one batch per streamed batch that the rows
    /// come from.
    fn restored(&self, partition: usize, mut joined: RecordBatch) -> Result<Vec<RecordBatch>> {
        let last = self.numbers(&joined).values().last().copied();
        if let Some(partner) = self.computed.partner
            && joined.column(partner).logical_null_count() > 0
        {
            joined = filter_record_batch(&joined, &is_not_null(joined.column(partner))?)?;
        }
        let numbers = self.numbers(&joined).values();
        let mut waiting = self.waiting(partition);
        let (mut start, mut batches) = (0, Vec::new());
        while let Some(number) = numbers.get(start) {
            waiting.drop_before(*number);
            let Some((first, late)) = waiting.batches.front() else {
                return datafusion::common::internal_err!(
                    "a join gave a row that it did not get, or out of order"
                );
            };
            let end = first + late.num_rows() as u64;
            let rows = start..start + numbers[start..].partition_point(|number| *number < end);
            let late = picked(late, *first, &numbers[rows.clone()])?;
            batches.push(self.put_together(&joined, &rows, &late)?);
            start = rows.end;
        }
        // The last row may be output again with its next partner.
        last.inspect(|last| waiting.drop_before(*last));
        Ok(batches)
    }

    fn put_together(
        &self,
        joined: &RecordBatch,
        rows: &Range<usize>,
        late: &RecordBatch,
    ) -> Result<RecordBatch> {
        let columns = self.sources.iter().map(|source| match source {
            Source::Joined(place) => joined.column(*place).slice(rows.start, rows.len()),
            Source::Late(place) => Arc::clone(late.column(*place)),
        });
        Ok(RecordBatch::try_new(Arc::clone(&self.output), columns.collect())?)
    }

    fn numbers<'a>(&self, joined: &'a RecordBatch) -> &'a UInt64Array {
        joined.column(self.computed.numbers).as_primitive::<UInt64Type>()
    }

    fn waiting(&self, partition: usize) -> std::sync::MutexGuard<'_, Waiting> {
        locked(&self.waiting[partition])
    }
}

impl Waiting {
    /// Drops the batches whose rows all have smaller numbers.
    fn drop_before(&mut self, number: u64) {
        while self.batches.front().is_some_and(|(first, late)| first + late.num_rows() as u64 <= number) {
            self.batches.pop_front();
        }
    }
}

/// Returns, for each column of the streamed side, whether it is wide and the join itself does not need it.
fn hidden_columns(join: &HashJoinExec, streamed: &ArrowSchema) -> Vec<bool> {
    let mut hidden: Vec<bool> = streamed.fields().iter().map(|field| is_wide(field.data_type())).collect();
    for (_, key) in join.on() {
        collect_columns(key).iter().for_each(|column| hidden[column.index()] = false);
    }
    for column in join.filter().into_iter().flat_map(|filter| filter.column_indices()) {
        if column.side == JoinSide::Right {
            hidden[column.index] = false;
        }
    }
    hidden
}

fn seen_schema(streamed: &ArrowSchema, stand_ins: &[Option<StandIn>]) -> ArrowSchema {
    let fields = streamed.fields().iter().zip(stand_ins).map(|(field, stand_in)| match stand_in {
        None => Arc::clone(field),
        Some(StandIn::RowNumbers) => Arc::new(Field::new(field.name(), DataType::UInt64, false)),
        Some(StandIn::Nothing) => Arc::new(Field::new(field.name(), DataType::Null, true)),
    });
    ArrowSchema::new(fields.collect::<Vec<_>>())
}

/// Selects the rows with these numbers. `first` is the number of the first row of `late`.
fn picked(late: &RecordBatch, first: u64, numbers: &[u64]) -> Result<RecordBatch> {
    let place = |number: &u64| (number - first) as u32;
    if numbers.windows(2).all(|pair| pair[1] == pair[0] + 1) {
        return Ok(late.slice(numbers.first().map_or(0, place) as usize, numbers.len()));
    }
    Ok(take_record_batch(late, &UInt32Array::from_iter_values(numbers.iter().map(place)))?)
}

/// Returns the index of `item` in `items`; appends the item if it is not there.
fn position_or_push(items: &mut Vec<usize>, item: usize) -> usize {
    items.iter().position(|other| *other == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{BinaryArray, Int64Array, ListArray};
    use datafusion::arrow::datatypes::Int64Type;
    use datafusion::arrow::util::pretty::pretty_format_batches;
    use datafusion::datasource::MemTable;
    use datafusion::execution::SessionStateBuilder;
    use datafusion::prelude::{SessionConfig, SessionContext};
    use onefold_sql::Query as _;

    use super::*;
    use crate::engine::physical_rules;

    /// Returns a log of `rows` rows with keys, lists (some null, some empty) and bytes, in two partitions with batches
    /// of different sizes.
    fn log(rows: i64) -> MemTable {
        let mut partitions = vec![Vec::new(), Vec::new()];
        let (mut start, mut size) = (0, 1);
        while start < rows {
            let numbers: Vec<i64> = (start..(start + size).min(rows)).collect();
            let lists = numbers
                .iter()
                .map(|n| (n % 7 != 0).then(|| (0..n % 5).map(|i| Some(n * 10 + i)).collect::<Vec<_>>()));
            let bytes: Vec<Vec<u8>> =
                numbers.iter().map(|n| n.to_le_bytes()[..(n % 9) as usize].to_vec()).collect();
            let columns: Vec<(&str, ArrayRef)> = vec![
                ("k", Arc::new(Int64Array::from_iter_values(numbers.iter().map(|n| n % 50)))),
                ("list", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))),
                ("n", Arc::new(Int64Array::from(numbers.clone()))),
                ("bytes", Arc::new(BinaryArray::from_iter_values(&bytes))),
            ];
            let nullable = columns.into_iter().map(|(name, column)| (name, column, true));
            partitions[start as usize % 2].push(RecordBatch::try_from_iter_with_nullable(nullable).unwrap());
            (start, size) = (start + size, size % 37 + 4);
        }
        MemTable::try_new(partitions[0][0].schema(), partitions).unwrap()
    }

    /// Runs a query over the log and a table `few` with these keys, with our rules or DataFusion's own.
    async fn answered(query: &str, keys: &[i64], ours: bool) -> Vec<RecordBatch> {
        let mut config = SessionConfig::new().with_target_partitions(2).with_batch_size(32);
        config.options_mut().optimizer.prefer_hash_join = true;
        let mut state = SessionStateBuilder::new().with_default_features().with_config(config);
        if ours {
            state = state.with_physical_optimizer_rules(physical_rules(None));
        }
        let context = SessionContext::new_with_state(state.build());
        context.register_table("log", Arc::new(log(1000))).unwrap();
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("k", Arc::new(Int64Array::from(keys.to_vec()))),
            ("v", Arc::new(Int64Array::from_iter_values(0..keys.len() as i64))),
        ];
        let few = RecordBatch::try_from_iter(columns).unwrap();
        context
            .register_table("few", Arc::new(MemTable::try_new(few.schema(), vec![vec![few]]).unwrap()))
            .unwrap();
        context.query(query).await.unwrap().collect().await.unwrap()
    }

    #[tokio::test]
    async fn joins_give_the_rows_that_datafusion_gives() {
        let all: Vec<i64> = (0..50).collect();
        for keys in [&all[..], &[3, 3, 4, 17, 3], &[], &[99]] {
            for query in [
                "SELECT l.*, f.v FROM log l JOIN few f ON l.k = f.k",
                "SELECT f.v, l.bytes, l.list FROM few f JOIN log l ON l.k = f.k",
                "SELECT l.list, f.v FROM log l LEFT JOIN few f ON l.k = f.k",
                "SELECT l.list, l.list AS again, f.v FROM log l JOIN few f ON l.k = f.k AND l.n > 10 * f.v",
                "SELECT l.list, f.v FROM log l JOIN few f ON l.k = f.k AND l.list[1] > 10 * f.v",
                "SELECT l.list, f.v FROM log l FULL JOIN few f ON l.k = f.k",
                "SELECT l.list FROM log l WHERE EXISTS (SELECT 1 FROM few f WHERE l.k = f.k)",
                "SELECT count(*), sum(f.v) FROM log l JOIN few f ON l.k = f.k",
                "SELECT a.list, b.bytes FROM log a JOIN (SELECT l.n, l.bytes FROM log l JOIN few f ON l.k = f.k) b \
                 ON a.n = b.n",
            ] {
                let rows = async |ours| {
                    let batches = answered(query, keys, ours).await;
                    let text = pretty_format_batches(&batches).unwrap().to_string();
                    let mut rows: Vec<_> = text.lines().map(str::to_owned).collect();
                    rows.sort();
                    rows
                };
                assert!(rows(true).await == rows(false).await, "{query} with the keys {keys:?}");
            }
        }
    }

    #[tokio::test]
    async fn lists_are_not_copied() {
        let keys: Vec<i64> = (0..50).collect();
        let batches = answered("SELECT l.list, f.v FROM log l JOIN few f ON l.k = f.k", &keys, true).await;
        let table = log(1000);
        let ids = |batch: &RecordBatch| batch.column_by_name("list").unwrap().as_list::<i32>().values().len();
        let mut whole = Vec::new();
        for partition in &table.batches {
            whole.extend(partition.read().await.iter().map(ids));
        }
        // A slice shares all ids of the batch that it was cut from; a copy has only its own.
        assert!(batches.iter().all(|batch| whole.contains(&ids(batch))));
        assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), 1000);
    }
}
