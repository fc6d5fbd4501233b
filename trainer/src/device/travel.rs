//! The vectors that ranks exchange for a batch, as the device needs them.
//!
//! ```text
//! requests of this rank      answers ═▶ collect ─▶ pooled rows, elements of sequences   (Routes)
//!                            their gradients ─▶ spread ═▶ owners
//! requests of other ranks    rows of the shards here ─▶ pool, gather ═▶ requesting rank  (ServedRows)
//!                            gradients ═▶ unpool ─▶ update
//! replicated tables          gradients ═▶ sums ═▶ all ranks ─▶ update                    (ReducedRows)
//! ```
//!
//! A double arrow is an exchange between ranks. The host knows which part of a message belongs to which rank; this
//! module has only the positions of vectors.

use tch::{Kind, Tensor};

use super::jagged::{JaggedParts, Layout};
use super::kernels::check;
use super::parcel::{Parcel, Part, view};
use super::samples_of_rows::SamplesOfRows;
use super::slots::{Delivery, Slots};
use super::{Accelerator, Bags, Sums};
use crate::Result;

/// Vectors that travel between ranks, and the rows of a local matrix that they belong to.
#[derive(Debug)]
pub(crate) struct Route {
    /// Four numbers per block, as kernels expect them: for answers, and for gradients.
    blocks: [Tensor; 2],
    /// The block of each vector, `[vectors]`.
    of: Tensor,
    /// The row of each vector, `[vectors]`.
    rows: Tensor,
    /// The vectors of every row.
    sums: Sums,
}

/// A route under construction.
#[derive(Debug, Default)]
pub(crate) struct RouteParts {
    blocks: [Vec<i64>; 2],
    of: Vec<i32>,
    rows: Vec<i32>,
}

impl RouteParts {
    /// Adds a block of vectors that belong to `rows` and contain `width` columns from `column` on. The vectors are
    /// contiguous: they begin at float `starts[0]` of the answers, and at float `starts[1]` of the gradients.
    pub(crate) fn add(
        &mut self,
        rows: impl Iterator<Item = i32>,
        column: usize,
        width: usize,
        starts: [usize; 2],
    ) {
        let (first, number) = (self.rows.len(), self.blocks[0].len() / 4);
        for (blocks, start) in self.blocks.iter_mut().zip(starts) {
            blocks.extend([first, column, width, start].map(|value| value as i64));
        }
        self.rows.extend(rows);
        self.of.resize(self.rows.len(), number as i32);
    }

    /// Adds the route to a parcel; `None` if it has no vectors. The matrix has `rows` rows. Returns a function of the
    /// parcel's memory on the device that returns the route.
    fn pack(self, parcel: &mut Parcel<'_>, rows: usize) -> Option<impl Fn(&Tensor) -> Route + use<>> {
        if self.rows.is_empty() {
            return None;
        }
        let SamplesOfRows { order, ends } = SamplesOfRows::new(&self.rows, rows);
        let blocks = self.blocks.map(|blocks| parcel.add(Part::Longs(blocks)));
        let rest = [self.of, self.rows, order, ends].map(|values| parcel.ints(values));
        Some(move |device: &Tensor| {
            let [of, rows, order, ends] = rest.map(|section| view(device, section, Kind::Int));
            let blocks = blocks.map(|section| view(device, section, Kind::Int64));
            Route { blocks, of, rows, sums: Sums { order, ends } }
        })
    }

    /// Copies a non-empty route to the device on its own, for checks.
    pub(super) fn alone(self, accelerator: &Accelerator, rows: usize) -> Result<(Route, Delivery)> {
        let mut parcel = Parcel::default();
        let route = self.pack(&mut parcel, rows).expect("a route of its own has vectors");
        let mut delivery = Slots::new(accelerator).send(&parcel)?;
        delivery.arrive()?;
        Ok((route(delivery.device()), delivery))
    }
}

/// Positions ordered by key, and the end of each key's positions.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    order: Vec<i32>,
    ends: Vec<i32>,
}

impl Merged {
    /// Orders positions by key; positions with equal keys keep their order.
    pub(crate) fn new<K: Ord>(mut places: Vec<(K, i32)>) -> Self {
        places.sort_by(|(key, _), (other, _)| key.cmp(other));
        let ends =
            (1..=places.len()).filter(|&end| end == places.len() || places[end].0 != places[end - 1].0);
        let ends = ends.map(|end| end as i32).collect();
        Self { ends, order: places.into_iter().map(|(_, number)| number).collect() }
    }

    /// Adds the positions to a parcel. Returns a function of the parcel's memory on the device.
    fn pack(self, parcel: &mut Parcel<'_>) -> impl Fn(&Tensor) -> Sums + use<> {
        let sections = [self.order, self.ends].map(|values| parcel.ints(values));
        move |device: &Tensor| {
            let [order, ends] = sections.map(|section| view(device, section, Kind::Int));
            Sums { order, ends }
        }
    }
}

/// The positions of the vectors that a batch requested from other ranks.
#[derive(Debug)]
pub(crate) struct Routes {
    delivery: Delivery,
    /// The route of the pooled rows, `[bags, D]`.
    pub(crate) pooled: Option<Route>,
    /// The route of the sequences' elements, `[T, D]`.
    pub(crate) sequences: Option<Route>,
    /// For replicated tables: the elements of every table row (pooled elements, then elements of sequences), in the
    /// order in which the gradients of rows are sent.
    pub(crate) replicas: Option<Sums>,
}

/// [`Routes`] under construction.
#[derive(Debug, Default)]
pub(crate) struct RoutesParts {
    pub(crate) pooled: RouteParts,
    pub(crate) sequences: RouteParts,
    /// The positions are indices of elements.
    pub(crate) replicas: Merged,
}

impl RoutesParts {
    /// Starts copying the routes to the device. The batch has `bags` pooled rows and `elements` elements of
    /// sequences.
    pub(crate) fn send(self, slots: &Slots, bags: usize, elements: usize) -> Result<Routes> {
        let mut parcel = Parcel::default();
        let pooled = self.pooled.pack(&mut parcel, bags);
        let sequences = self.sequences.pack(&mut parcel, elements);
        let replicas = (!self.replicas.ends.is_empty()).then(|| self.replicas.pack(&mut parcel));
        let delivery = slots.send(&parcel)?;
        let device = delivery.device();
        Ok(Routes {
            pooled: pooled.map(|route| route(device)),
            sequences: sequences.map(|route| route(device)),
            replicas: replicas.map(|sums| sums(device)),
            delivery,
        })
    }
}

impl Routes {
    /// Makes all work that is enqueued from now on wait for the routes.
    pub(crate) fn arrive(&mut self) -> Result<()> {
        self.delivery.arrive()
    }
}

/// The rows that all ranks request from the local shards of one width.
#[derive(Debug)]
pub(crate) struct ServedRows {
    _delivery: Delivery,
    /// The table rows of pooled elements, and of the elements of sequences.
    pub(super) rows: [Tensor; 2],
    /// The lists of the pooled elements.
    pub(super) bags: Option<Bags>,
}

/// The rows of replicated tables whose gradients are summed across ranks.
#[derive(Debug)]
pub(crate) struct ReducedRows {
    _delivery: Delivery,
    /// The table rows, `[rows]`, ordered by the rank that sums their gradients.
    pub(crate) rows: Tensor,
    /// The gradients that arrive for each row that this rank sums.
    pub(crate) sums: Sums,
}

impl ReducedRows {
    /// Copies the rows to the device.
    pub(crate) fn send(arriving: Merged, rows: Vec<i32>, slots: &Slots) -> Result<Self> {
        let mut parcel = Parcel::default();
        let rows = parcel.ints(rows);
        let sums = arriving.pack(&mut parcel);
        let mut delivery = slots.send(&parcel)?;
        delivery.arrive()?;
        let device = delivery.device();
        Ok(Self { rows: view(device, rows, Kind::Int), sums: sums(device), _delivery: delivery })
    }
}

/// [`ServedRows`] under construction.
#[derive(Default)]
pub(crate) struct ServedParts {
    rows: [Vec<i32>; 2],
    bags: JaggedParts,
}

impl ServedParts {
    /// Adds lists of rows of a shard; `first_row` is the shard's first row on the device.
    pub(crate) fn add_pooled(
        &mut self,
        first_row: i64,
        (offsets, sizes): (&[i32], &[i32]),
        table_rows: &[u32],
    ) {
        let (layout, first) = (Layout::new(offsets, sizes), self.rows[0].len());
        self.bags.add_rows(sizes, &layout, first);
        for run in &layout.runs {
            self.rows[0]
                .extend(table_rows[run.clone()].iter().map(|&row| (first_row + i64::from(row)) as i32));
        }
    }

    /// Adds single rows of a shard.
    pub(crate) fn add_sequence(&mut self, first_row: i64, table_rows: &[u32]) {
        self.rows[1].extend(table_rows.iter().map(|&row| (first_row + i64::from(row)) as i32));
    }

    /// Copies the rows to the device.
    pub(crate) fn send(self, slots: &Slots) -> Result<ServedRows> {
        let mut parcel = Parcel::default();
        let rows = self.rows.map(|rows| parcel.ints(rows));
        let bags = self.bags.offsets.len();
        let scales = parcel.add(Part::Floats(vec![1.0; bags].into()));
        let jagged = self.bags.pack(&mut parcel);
        let mut delivery = slots.send(&parcel)?;
        delivery.arrive()?;
        let device = delivery.device();
        Ok(ServedRows {
            rows: rows.map(|section| view(device, section, Kind::Int)),
            bags: (bags > 0)
                .then(|| Bags { jagged: jagged(device), scales: view(device, scales, Kind::Float) }),
            _delivery: delivery,
        })
    }
}

impl Accelerator {
    /// Adds to each row of `output`, `[rows, D]`, the vectors of `values` that belong to the row, times the row's
    /// scale.
    pub(crate) fn collect(
        &self,
        values: &Tensor,
        route: &Route,
        scales: Option<&Tensor>,
        output: &Tensor,
    ) -> Result<()> {
        let (rows, dim) = (output.size()[0], output.size()[1]);
        check(values, Kind::Float, 0, "values");
        check(output, Kind::Float, rows * dim, "output");
        route.check(rows, scales);
        let (Sums { order, ends }, width) = (&route.sums, dim as i32);
        let arguments =
            arguments![values, &route.blocks[0], &route.of, order, ends, scales, rows, width, output];
        // SAFETY: the arguments match `collect`, and their lengths were checked. A route is created from the
        // requests of the batch: it has as many vectors as the answers, and refers to rows of this matrix.
        unsafe { self.launch("collect", rows * dim, &arguments) }
    }

    /// Writes the gradients of a route's vectors to `output`, given the gradients of the rows, `[rows, D]`, times
    /// their scales.
    pub(crate) fn spread(
        &self,
        gradient: &Tensor,
        route: &Route,
        scales: Option<&Tensor>,
        output: &Tensor,
    ) -> Result<()> {
        let (rows, dim) = (gradient.size()[0], gradient.size()[1]);
        check(gradient, Kind::Float, rows * dim, "gradient");
        check(output, Kind::Float, 0, "output");
        route.check(rows, scales);
        let count = route.rows.numel() as i64;
        let Route { of, rows: places, .. } = route;
        let arguments = arguments![gradient, &route.blocks[1], of, places, scales, count, dim as i32, output];
        // SAFETY: the arguments match `spread`, and their lengths were checked; for the route see `collect`.
        unsafe { self.launch("spread", count * dim, &arguments) }
    }

    /// Returns the sums of the rows of `values` that `sums` combines, `[sums, D]`.
    pub(crate) fn summed(&self, values: &Tensor, sums: &Sums) -> Result<Tensor> {
        let output = self.empty(&[sums.ends.numel() as i64, values.size()[1]], Kind::Float)?;
        if values.size()[0] > 0 {
            self.fold(values, Some(sums), &output)?;
        }
        Ok(output)
    }
}

impl Route {
    fn check(&self, rows: i64, scales: Option<&Tensor>) {
        let vectors = self.rows.numel() as i64;
        check(&self.of, Kind::Int, vectors, "blocks");
        check(&self.sums.order, Kind::Int, vectors, "order");
        check(&self.sums.ends, Kind::Int, rows, "ends");
        if let Some(scales) = scales {
            check(scales, Kind::Float, rows, "scales");
        }
    }
}
