//! A placement problem as searches see it: all divisions of each table, priced once.

use std::cmp::Reverse;
use std::ops::Range;

use rayon::prelude::*;

use crate::buffers::BufferBytes;
use crate::cost::{CostModel, ShardLoad, Traffic};
use crate::error::{Error, Result};
use crate::plan::{Shard, ShardingType, TablePlan, row_shards};
use crate::table::{Table, has_rows_for, row_blocks, validate_tables};
use crate::topology::Topology;

/// Column shards have a multiple of this number of columns: 16 bytes, as NeuroShard and FBGEMM require.
pub(crate) const COLUMN_STEP: u64 = 4;

/// The form in which a part of a table is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// All rows of some columns, on one rank.
    Columns,
    /// Some of the rows on each rank of one node.
    RowsOfNode,
    /// Some of the rows on each rank.
    RowsOfAll,
    /// A copy on each rank.
    Copies,
}

/// A part of a table that is placed as a whole: a column shard, or all shards of a table in another form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Unit {
    pub(crate) table: usize,
    pub(crate) kind: Kind,
    /// The first column. It does not affect the price.
    pub(crate) start: u64,
    /// The number of columns.
    pub(crate) columns: u64,
}

impl Unit {
    /// Returns both halves of a column shard, if it can be halved.
    pub(crate) fn halves(self) -> Option<[Self; 2]> {
        let splits = self.kind == Kind::Columns && self.columns.is_multiple_of(2 * COLUMN_STEP);
        let half = Self { columns: self.columns / 2, ..self };
        splits.then_some([half, Self { start: self.start + half.columns, ..half }])
    }

    /// Returns the first half of a column shard, if it can be halved.
    pub(crate) fn half(self) -> Option<Self> {
        self.halves().map(|[first, _]| first)
    }

    /// Returns `count` shards like this one, side by side.
    pub(crate) fn repeated(self, count: usize) -> impl Iterator<Item = Self> {
        (0..count as u64).map(move |number| Self { start: self.start + number * self.columns, ..self })
    }

    /// Returns the columns of the unit.
    fn range(&self) -> Range<u64> {
        self.start..self.start + self.columns
    }
}

/// A unit and its place: a node for rows of a node, and a rank for columns.
pub(crate) type Placed = (Unit, u32);

/// Returns the units of a placement.
pub(crate) fn units_of(placed: &[Placed]) -> impl Iterator<Item = &Unit> {
    placed.iter().map(|(unit, _)| unit)
}

/// The costs and bytes that a unit adds to each of its ranks. For unequal row shards, bytes are those of the largest
/// shard, and the work is that of the shard with the most lookups.
#[derive(Debug, Clone)]
pub(crate) struct Priced {
    pub(crate) traffic: Traffic,
    /// Bytes of weights, optimizer state, and the buffers to serve other ranks.
    pub(crate) bytes: u64,
    /// Bytes of request buffers that the unit needs on every rank of the topology.
    pub(crate) asking: u64,
    /// Computation of every rank for its requests to the unit, in milliseconds.
    pub(crate) asking_ms: f64,
    /// Computation that the unit adds to a rank, by the kind of the rank, in milliseconds.
    pub(crate) ms_by_kind: Vec<f64>,
    /// The mean of `ms_by_kind` over all ranks.
    pub(crate) ms: f64,
}

/// The memory that ranks have for units after their request buffers.
#[derive(Clone, Copy)]
pub(crate) struct Capacity<'a> {
    memory: &'a [u64],
    /// Bytes of request buffers on each rank.
    pub(crate) asking: u64,
}

impl Capacity<'_> {
    pub(crate) fn of(&self, rank: usize) -> u64 {
        self.memory[rank].saturating_sub(self.asking)
    }

    /// Returns the memory of the rank with the most.
    pub(crate) fn most(&self) -> u64 {
        self.memory.iter().max().map_or(0, |memory| memory.saturating_sub(self.asking))
    }

    /// Returns whether the request buffers fit into the memory of every rank.
    pub(crate) fn suffices_to_ask(&self) -> bool {
        self.memory.iter().all(|memory| self.asking <= *memory)
    }

    /// Returns the first rank whose units and request buffers exceed its memory.
    pub(crate) fn exceeded(&self, bytes: &[u64]) -> Option<usize> {
        (0..bytes.len()).find(|rank| bytes[*rank].saturating_add(self.asking) > self.memory[*rank])
    }
}

/// Tables, ranks, and the price of every unit.
pub(crate) struct Problem<'a> {
    pub(crate) tables: &'a [Table],
    pub(crate) topology: &'a Topology,
    pub(crate) model: &'a dyn CostModel,
    /// Samples per rank and step.
    pub(crate) batch_size: u64,
    pub(crate) ranks: usize,
    /// The kind of every rank: see [`Topology::kinds`].
    pub(crate) kinds: Vec<usize>,
    /// The memory of every rank, in bytes.
    memory: Vec<u64>,
    /// The price of each unit, by table. A table has few units, so a linear search is faster than a hash table.
    priced: Vec<Vec<(Unit, Priced)>>,
}

/// Returns whether two units of a table have the same price.
fn are_alike(a: &Unit, b: &Unit) -> bool {
    (a.kind, a.columns) == (b.kind, b.columns)
}

impl<'a> Problem<'a> {
    /// Prices all units of every table: column shards of all columns, half, a quarter, … of them, rows, and copies.
    pub(crate) fn new(
        tables: &'a [Table],
        topology: &'a Topology,
        model: &'a dyn CostModel,
        batch_size: u64,
    ) -> Result<Self> {
        validate_tables(tables)?;
        topology.validate()?;
        let ranks = topology.ranks as usize;
        let memory = (0..topology.ranks).map(|rank| topology.memory_of(rank)).collect();
        let kinds = topology.kinds();
        let mut problem =
            Self { tables, topology, model, batch_size, ranks, kinds, memory, priced: Vec::new() };
        let price = |unit: Unit| Ok((unit, problem.price(unit)?));
        let priced = (0..tables.len()).into_par_iter();
        let priced = priced.map(|table| problem.units(table).into_iter().map(price).collect());
        problem.priced = priced.collect::<Result<_>>()?;
        Ok(problem)
    }

    /// Returns all units into which a table can be divided.
    fn units(&self, table: usize) -> Vec<Unit> {
        let rows = self.tables[table].rows;
        let mut units: Vec<Unit> =
            std::iter::successors(Some(self.whole(table)), |unit| unit.half()).collect();
        let mut add = |kind, parts: u64| {
            if self.ranks > 1 && has_rows_for(rows, parts) {
                units.push(self.form(table, kind));
            }
        };
        add(Kind::RowsOfAll, u64::from(self.topology.ranks));
        if self.topology.nodes() > 1 && self.topology.ranks_per_node > 1 {
            add(Kind::RowsOfNode, u64::from(self.topology.ranks_per_node));
        }
        add(Kind::Copies, 1);
        units
    }

    fn price(&self, unit: Unit) -> Result<Priced> {
        let table = &self.tables[unit.table];
        // The number of blocks into which the unit's rows are divided.
        let parts = match unit.kind {
            Kind::RowsOfNode | Kind::RowsOfAll => self.ranks_of(&unit, 0).len() as u64,
            Kind::Columns | Kind::Copies => 1,
        };
        let shard = Shard { rank: 0, rows: table.busiest_block(parts), columns: 0..unit.columns };
        let load = ShardLoad {
            table,
            sharding_type: unit.kind.sharding_type(),
            shard: &shard,
            topology: self.topology,
            batch_size: self.batch_size,
            within_node: unit.kind == Kind::RowsOfNode || self.topology.nodes() == 1,
        };
        let ms_by_kind = self.ms_by_kind(load)?;
        let ms = match &ms_by_kind[..] {
            [ms] => *ms,
            several => self.kinds.iter().map(|kind| several[*kind]).sum::<f64>() / self.ranks as f64,
        };
        let weights = table.shard_bytes(table.rows.div_ceil(parts), unit.columns)?;
        // Shards have equal lookups, unless their distribution over the rows is known.
        let (shards, alike): (Vec<Shard>, f64) = match table.has_even_lookups() {
            true => (vec![shard.clone()], self.ranks_of(&unit, 0).len() as f64),
            false => {
                let shards = row_blocks(table.rows, parts).map(|rows| Shard { rows, ..shard.clone() });
                (shards.collect(), 1.0)
            }
        };
        let loads: Vec<ShardLoad<'_>> = shards.iter().map(|shard| ShardLoad { shard, ..load }).collect();
        let buffers: Vec<BufferBytes> = loads.iter().map(ShardLoad::reserved_buffers).collect();
        let serving = buffers.iter().map(|buffers| buffers.serving).max().unwrap_or(0);
        let asking = buffers.iter().map(|buffers| buffers.asking as f64).sum::<f64>() * alike;
        Ok(Priced {
            traffic: self.model.traffic(&load),
            bytes: weights.saturating_add(serving),
            asking: asking as u64,
            asking_ms: loads.iter().map(|load| self.model.asking_ms(load)).sum::<f64>() * alike,
            ms_by_kind,
            ms,
        })
    }

    /// Returns the computation that a shard adds to a rank of every kind.
    fn ms_by_kind(&self, load: ShardLoad<'_>) -> Result<Vec<f64>> {
        let of_kind = |kind| {
            let rank = self.kinds.iter().position(|other| *other == kind).unwrap_or(0) as u32;
            let shard = Shard { rank, ..load.shard.clone() };
            let ms = self.model.shard_ms(&ShardLoad { shard: &shard, ..load })?;
            if !ms.is_finite() {
                let (model, table) = (self.model.id(), &load.table.name);
                let message = format!("cost model `{model}` gives {ms} ms for table `{table}`");
                return Err(Error::invalid(message, "train the model again, or choose another"));
            }
            Ok(ms)
        };
        (0..=self.kinds.iter().copied().max().unwrap_or(0)).map(of_kind).collect()
    }

    /// Returns a table as one unit on one rank.
    pub(crate) fn whole(&self, table: usize) -> Unit {
        self.form(table, Kind::Columns)
    }

    /// Returns all columns of a table in this form.
    pub(crate) fn form(&self, table: usize, kind: Kind) -> Unit {
        Unit { table, kind, start: 0, columns: self.tables[table].dim }
    }

    /// Returns the possible forms of a table by rows, and as copies.
    pub(crate) fn forms(&self, table: usize) -> impl Iterator<Item = Unit> {
        let kinds = [Kind::RowsOfAll, Kind::RowsOfNode, Kind::Copies];
        kinds.into_iter().map(move |kind| self.form(table, kind)).filter(move |unit| self.get(unit).is_some())
    }

    /// Returns every table as one unit on one rank.
    pub(crate) fn whole_tables(&self) -> Vec<Unit> {
        (0..self.tables.len()).map(|table| self.whole(table)).collect()
    }

    /// Returns the price of `unit`, or `None` if the table cannot be divided like this.
    pub(crate) fn get(&self, unit: &Unit) -> Option<&Priced> {
        let of_table = &self.priced[unit.table];
        of_table.iter().find(|(other, _)| are_alike(other, unit)).map(|(_, priced)| priced)
    }

    /// Returns the price of a unit of this problem.
    pub(crate) fn priced(&self, unit: &Unit) -> &Priced {
        match self.get(unit) {
            Some(priced) => priced,
            None => unreachable!("{unit:?} is of another problem"),
        }
    }

    /// Returns the memory of the ranks for units, after the request buffers for all of `units`.
    pub(crate) fn capacity<'u>(&self, units: impl IntoIterator<Item = &'u Unit>) -> Capacity<'_> {
        let asking = units.into_iter().map(|unit| self.priced(unit).asking);
        Capacity { memory: &self.memory, asking: asking.fold(0, u64::saturating_add) }
    }

    /// Returns the free bytes of a rank whose units take `bytes`, for comparisons among ranks. The result is negative
    /// if the units exceed the memory.
    pub(crate) fn left(&self, rank: usize, bytes: u64) -> i128 {
        i128::from(self.memory[rank]) - i128::from(bytes)
    }

    /// Returns the error for a unit that fits on no rank, where units take these `bytes` of every rank. `splits` states
    /// whether the search splits tables.
    pub(crate) fn does_not_fit(
        &self,
        unit: &Unit,
        capacity: Capacity<'_>,
        bytes: &[u64],
        splits: bool,
    ) -> Error {
        let left = |rank: usize| capacity.of(rank).saturating_sub(bytes[rank]);
        let rank = (0..self.ranks).min_by_key(|rank| Reverse(left(*rank))).unwrap_or_default();
        let room = (rank as u32, left(rank), self.memory[rank]);
        Error::does_not_fit(&self.tables[unit.table].name, self.priced(unit).bytes, room, splits)
    }

    /// Returns the ranks of a unit at `place`.
    pub(crate) fn ranks_of(&self, unit: &Unit, place: u32) -> Range<usize> {
        let (place, per_node) = (place as usize, self.topology.ranks_per_node as usize);
        match unit.kind {
            Kind::Columns => place..place + 1,
            Kind::RowsOfNode => place * per_node..(place + 1) * per_node,
            Kind::RowsOfAll | Kind::Copies => 0..self.ranks,
        }
    }

    /// Returns the number of possible places of a unit.
    pub(crate) fn places(&self, unit: &Unit) -> u32 {
        match unit.kind {
            Kind::Columns => self.topology.ranks,
            Kind::RowsOfNode => self.topology.nodes(),
            Kind::RowsOfAll | Kind::Copies => 1,
        }
    }

    /// Returns units at places as the tables of a plan, in table order.
    pub(crate) fn table_plans(&self, placed: &[Placed]) -> Vec<TablePlan> {
        let placed = self.by_table(placed);
        self.tables.iter().zip(placed).map(|(table, units)| self.table_plan(table, &units)).collect()
    }

    /// Returns the units of every table with their places, ordered by column.
    pub(crate) fn by_table(&self, placed: &[Placed]) -> Vec<Vec<Placed>> {
        let mut of_table: Vec<Vec<Placed>> = vec![Vec::new(); self.tables.len()];
        placed.iter().for_each(|placed| of_table[placed.0.table].push(*placed));
        of_table.iter_mut().for_each(|units| units.sort_by_key(|(unit, _)| unit.start));
        of_table
    }

    /// Returns the plan of a table with units at these places.
    pub(crate) fn table_plan(&self, table: &Table, units: &[Placed]) -> TablePlan {
        let (sharding_type, shards) = match units {
            [(unit, rank)] if unit.kind == Kind::Columns => {
                (ShardingType::TableWise, vec![Shard::whole(table, *rank)])
            }
            [(unit, place)] => {
                let ranks = self.ranks_of(unit, *place);
                let shards = match unit.kind {
                    Kind::Copies => ranks.map(|rank| Shard::whole(table, rank as u32)).collect(),
                    _ => row_shards(table, ranks),
                };
                (unit.kind.sharding_type(), shards)
            }
            _ => {
                let shard =
                    |(unit, rank): &Placed| Shard { rank: *rank, rows: 0..table.rows, columns: unit.range() };
                (ShardingType::ColumnWise, units.iter().map(shard).collect())
            }
        };
        TablePlan::new(table, sharding_type, shards)
    }
}

impl Kind {
    pub(crate) fn sharding_type(self) -> ShardingType {
        match self {
            // A table on one rank has the price of its only column shard.
            Self::Columns => ShardingType::ColumnWise,
            Self::RowsOfNode | Self::RowsOfAll => ShardingType::RowWise,
            Self::Copies => ShardingType::DataParallel,
        }
    }
}
