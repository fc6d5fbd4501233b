//! The exchange of rows between ranks whose shards are in devices' memory. Ids travel between hosts; vectors and
//! their gradients travel between devices.
//!
//! A message between two ranks is in the order of the blocks (pooled rows, sequences, replicas, each ordered by
//! width), so vectors of one kind and width are contiguous in messages and in device memory.

use std::sync::atomic::AtomicU64;

use onefold_sharding::DataType;
use tch::{Kind as Element, Tensor};

use super::blocks::{Asked, Block, Kind, Served};
use super::copies::{CopiedRows, reducer};
use super::{Encoded, Exchange, Request};
use crate::Result;
use crate::device::{
    Accelerator, LookedUp, Merged, ReducedRows, Routes, RoutesParts, ServedParts, ServedRows, Staged, Update,
    concatenated, guarded,
};
use crate::distributed::Pending;
use crate::embedding::device::{DeviceGradients, DeviceStore};
use crate::trace::Activity;

/// The positions of the requested vectors on the device.
#[derive(Debug)]
pub(in crate::embedding) struct Destinations {
    routes: Routes,
    /// For each owner, the number of floats of the answers, and of the gradients.
    floats: [Vec<usize>; 2],
    /// For each owner, the number of floats of replicas' gradients, which are the last floats of the gradients.
    replicas: Vec<usize>,
}

/// The state of an exchange that the gradients need.
#[derive(Debug)]
pub(in crate::embedding) struct Travelled {
    destinations: Destinations,
    /// The served rows, by width.
    served: Vec<ServedRows>,
    counts: Counts,
    copies: Option<Copies>,
}

/// The replicated tables, which have the model's width.
#[derive(Debug)]
struct Copies {
    rows: ReducedRows,
    /// For each rank, the number of gradients that arrive from it.
    arriving: Vec<usize>,
    /// For each reducer, the number of rows whose gradients it sums.
    reduced: Vec<usize>,
}

/// For each requesting rank and width, the numbers of vectors of pooled rows and of sequences.
type Counts = Vec<Vec<[usize; 2]>>;

/// Gradients that are being sent to the owners.
#[derive(Debug)]
pub(in crate::embedding) struct Gradients {
    pending: Pending,
    received: Tensor,
    /// The gradients of the elements of this rank's pooled rows.
    unpooled: Tensor,
}

impl Exchange {
    /// Returns whether there is nothing to exchange.
    pub(in crate::embedding) fn is_alone(&self) -> bool {
        self.collectives.size() == 1 && self.asks.iter().all(Vec::is_empty)
    }

    /// Starts copying the destinations of the answers to `asked` to the device; `staged` is the same batch.
    pub(in crate::embedding) fn destinations(
        &self,
        asked: &Encoded,
        staged: &Staged,
        store: &DeviceStore,
    ) -> Result<Destinations> {
        let mut parts = RoutesParts::default();
        let mut floats = [Vec::new(), Vec::new()];
        let mut replicas = vec![0; self.ranks()];
        let mut starts = [0, 0];
        for ((blocks, asked), replicas) in self.asks.iter().zip(&asked.asked).zip(&mut replicas) {
            let before = starts;
            for (block, Asked { vectors }) in blocks.iter().zip(asked) {
                let (column, width, size) = (block.column, block.width, vectors.len() * block.width);
                match block.kind {
                    Kind::Pooled(feature) => {
                        let bags = vectors.iter().map(|&row| staged.places[feature].bag(row));
                        parts.pooled.add(bags, column, width, starts);
                    }
                    Kind::Sequence(feature) => {
                        let elements = vectors.iter().map(|&value| staged.places[feature].element(value));
                        parts.sequences.add(elements, column, width, starts);
                    }
                    Kind::Replica => *replicas += size,
                }
                starts[0] += if block.kind == Kind::Replica { 0 } else { size };
                starts[1] += size;
            }
            (0..2).for_each(|way| floats[way].push(starts[way] - before[way]));
        }
        parts.replicas = self.own_replicas(asked, staged);
        let bags = staged.bags.as_ref().map_or(0, |bags| bags.jagged.rows as usize);
        let elements = staged.sequences.iter().map(|block| block.elements as usize).sum();
        Ok(Destinations { routes: parts.send(store.routes(), bags, elements)?, floats, replicas })
    }

    /// Returns the elements of every replicated row that a batch looks up, in the order in which the rows'
    /// gradients are sent.
    fn own_replicas(&self, asked: &Encoded, staged: &Staged) -> Merged {
        let mut places = Vec::new();
        let is_replica = |(_, block): &(usize, &Block)| block.kind == Kind::Replica;
        for (number, block) in self.asks[self.rank()].iter().enumerate().filter(is_replica) {
            for feature in asked.features_of(block.table) {
                let (place, rows) = (&staged.places[feature.feature], &feature.table_rows);
                let first = if place.is_sequence() { staged.pooled_elements as i32 } else { 0 };
                let covered = (0..).zip(rows).zip(feature.rows.covered(rows.len()));
                let element = |((value, &row), _): ((u32, &u32), bool)| {
                    ([reducer(row, self.ranks()), number, row as usize], first + place.element(value))
                };
                places.extend(covered.filter(|(_, covered)| *covered).map(element));
            }
        }
        Merged::new(places)
    }

    /// Looks up the requests of all ranks. `staged` is this rank's batch, which must have arrived.
    pub(in crate::embedding) fn lookup_on_device(
        &self,
        mut request: Request,
        mut destinations: Destinations,
        staged: &Staged,
        store: &DeviceStore,
    ) -> Result<(LookedUp, Travelled)> {
        let asked = self.served(&mut request)?;
        let (served, counts) = self.serve(&asked, store)?;
        let copies = self.reduced_rows(&asked, store)?;
        let accelerator = store.accelerator();
        let outputs = store.by_width().zip(&served).map(|((tables, _), served)| tables.serve(served));
        let outputs: Vec<[Tensor; 2]> = outputs.collect::<Result<_>>()?;
        let mut next = vec![[0, 0]; outputs.len()];
        let mut pieces = Vec::new();
        for of_asker in &counts {
            for kind in 0..2 {
                for ((output, next), count) in outputs.iter().zip(&mut next).zip(of_asker) {
                    pieces.push(output[kind].narrow(0, next[kind], count[kind] as i64).reshape([-1, 1]));
                    next[kind] += count[kind] as i64;
                }
            }
        }
        let answers = concatenated(accelerator, &pieces, 1)?.view(-1);
        let sizes = floats(&counts, store);
        let counter = &self.sent.answers;
        let (pending, received) =
            self.exchange_on_device(accelerator, &answers, &sizes, &destinations.floats[0], counter)?;
        // This lookup runs while the answers are being exchanged.
        let looked_up = store.lookup(staged)?;
        self.recorder.during(Activity::Answers, || pending.wait())?;
        let received = received.to_kind(Element::Float);
        let routes = &mut destinations.routes;
        routes.arrive()?;
        if let (Some(route), Some(output), Some(bags)) = (&routes.pooled, &looked_up.pooled, &staged.bags) {
            accelerator.collect(&received, route, Some(&bags.scales), output)?;
        }
        if let (Some(route), Some(output)) = (&routes.sequences, &looked_up.sequences) {
            accelerator.collect(&received, route, None, output)?;
        }
        Ok((looked_up, Travelled { destinations, served, counts, copies }))
    }

    /// Copies the requests of other ranks to the device, by width. Also returns the number of vectors of each kind
    /// by rank and width.
    fn serve(&self, asked: &[Vec<Served>], store: &DeviceStore) -> Result<(Vec<ServedRows>, Counts)> {
        let mut parts: Vec<ServedParts> = store.by_width().map(|_| ServedParts::default()).collect();
        let mut counts = vec![vec![[0; 2]; parts.len()]; asked.len()];
        for ((blocks, served), counts) in self.serves.iter().zip(asked).zip(&mut counts) {
            for (block, served) in blocks.iter().zip(served) {
                let (class, first_row) = store.place(block.shard);
                let parts = &mut parts[class];
                match served {
                    Served::Lookup(lookup, false) => {
                        let rows = (&lookup.rows.offsets[..], &lookup.rows.sizes[..]);
                        parts.add_pooled(first_row, rows, &lookup.table_rows);
                    }
                    Served::Lookup(lookup, true) => parts.add_sequence(first_row, &lookup.table_rows),
                    Served::Replica(..) => continue,
                }
                counts[class][block.kind.place()] += served.answers();
            }
        }
        let served = parts.into_iter().zip(store.by_width()).map(|(parts, (_, slots))| parts.send(slots));
        Ok((served.collect::<Result<_>>()?, counts))
    }

    /// Copies the replicated rows whose gradients are summed to the device. Returns `None` without replicated
    /// tables.
    fn reduced_rows(&self, asked: &[Vec<Served>], store: &DeviceStore) -> Result<Option<Copies>> {
        let copied = self.copied(asked);
        if copied.is_empty() {
            return Ok(None);
        }
        let (mut places, mut arriving) = (Vec::new(), vec![0; self.ranks()]);
        for (rank, arriving) in arriving.iter_mut().enumerate() {
            for (table, copied) in copied.iter().enumerate() {
                let first = places.len() as i32;
                let place = |(place, number): (&u32, i32)| ([table, *place as usize], first + number);
                places.extend(copied.arriving[rank].iter().zip(0..).map(place));
                *arriving += copied.arriving[rank].len();
            }
        }
        let row = |reducer: usize| {
            let of_table = move |copied: &CopiedRows| {
                let (_, first) = store.place(copied.shard);
                copied.rows[reducer]
                    .iter()
                    .map(move |row| (first + i64::from(*row)) as i32)
                    .collect::<Vec<_>>()
            };
            copied.iter().flat_map(of_table)
        };
        let rows: Vec<Vec<i32>> = (0..self.ranks()).map(|reducer| row(reducer).collect()).collect();
        let reduced = rows.iter().map(Vec::len).collect();
        let rows = ReducedRows::send(Merged::new(places), rows.concat(), store.copies())?;
        Ok(Some(Copies { rows, arriving, reduced }))
    }

    /// Starts sending the gradients of the results of [`lookup_on_device`](Self::lookup_on_device).
    pub(in crate::embedding) fn send_gradients_on_device(
        &self,
        travelled: &Travelled,
        staged: &Staged,
        gradients: &DeviceGradients,
        store: &DeviceStore,
    ) -> Result<Gradients> {
        let accelerator = store.accelerator();
        guarded(accelerator.torch(), || {
            let Travelled { destinations, counts, copies, .. } = travelled;
            let Destinations { routes, floats: asked, replicas } = destinations;
            let unpooled = store.whole().unpooled(staged, gradients.pooled.as_ref())?;
            let total: usize = asked[1].iter().sum();
            let values = accelerator.empty(&[total as i64], Element::Float)?;
            if let (Some(route), Some(gradient), Some(bags)) =
                (&routes.pooled, &gradients.pooled, &staged.bags)
            {
                accelerator.spread(gradient, route, Some(&bags.scales), &values)?;
            }
            if let (Some(route), Some(gradient)) = (&routes.sequences, &gradients.sequences) {
                accelerator.spread(gradient, route, None, &values)?;
            }
            if let Some(sums) = &routes.replicas {
                let elements: Vec<Tensor> = std::iter::once(&unpooled)
                    .chain(&gradients.sequences)
                    .map(Tensor::shallow_clone)
                    .collect();
                let elements = concatenated(accelerator, &elements, store.whole().width() as i64)?;
                let sums = accelerator.summed(&elements, sums)?.view(-1);
                let (mut end, mut first) = (0, 0);
                for (floats, own) in asked[1].iter().zip(replicas) {
                    end += floats;
                    let place = values.narrow(0, (end - own) as i64, *own as i64);
                    place.shallow_clone().copy_(&sums.narrow(0, first as i64, *own as i64));
                    first += own;
                }
            }
            let mut sizes = floats(counts, store);
            if let Some(Copies { arriving, .. }) = copies {
                sizes.iter_mut().zip(arriving).for_each(|(size, rows)| *size += rows * store.whole().width());
            }
            let (pending, received) =
                self.exchange_on_device(accelerator, &values, &asked[1], &sizes, &self.sent.gradients)?;
            Ok(Gradients { pending, received, unpooled })
        })
    }

    /// Waits for the gradients, and updates every row of this rank's shards once.
    pub(in crate::embedding) fn update_on_device(
        &self,
        travelled: &Travelled,
        (staged, looked_up): (&Staged, &LookedUp),
        gradients: &DeviceGradients,
        sent: Gradients,
        store: &mut DeviceStore,
        update: &Update<'_>,
    ) -> Result<()> {
        let Gradients { pending, received, unpooled } = sent;
        self.recorder.during(Activity::Gradients, || pending.wait())?;
        let accelerator = store.accelerator().clone();
        let received = received.to_kind(Element::Float);
        let widths: Vec<usize> = store.by_width().map(|(tables, _)| tables.width()).collect();
        let mut pieces: Vec<[Vec<Tensor>; 2]> = widths.iter().map(|_| Default::default()).collect();
        let (mut start, mut of_copies, dim) = (0, Vec::new(), store.whole().width() as i64);
        let mut next = |vectors: usize, width: usize| {
            let (vectors, width) = (vectors as i64, width as i64);
            start += vectors * width;
            received.narrow(0, start - vectors * width, vectors * width).view([vectors, width])
        };
        for (rank, of_asker) in travelled.counts.iter().enumerate() {
            for kind in 0..2 {
                for ((pieces, count), &width) in pieces.iter_mut().zip(of_asker).zip(&widths) {
                    pieces[kind].push(next(count[kind], width));
                }
            }
            if let Some(Copies { arriving, .. }) = &travelled.copies {
                of_copies.push(next(arriving[rank], dim as usize));
            }
        }
        let sums = travelled.copies.as_ref().map(|copies| {
            guarded(accelerator.torch(), || {
                let gradients = concatenated(&accelerator, &of_copies, dim)?;
                self.send_sums_on_device(copies, &gradients, &accelerator)
            })
        });
        let mut sums = sums.transpose()?;
        for (class, (pieces, width)) in pieces.into_iter().zip(widths).enumerate() {
            let (rows, values) = guarded(accelerator.torch(), || {
                let whole = |pieces: &Vec<Tensor>| concatenated(&accelerator, pieces, width as i64);
                let [pooled, sequences] = &pieces;
                let vectors = [whole(pooled)?, whole(sequences)?];
                let tables = store.by_width().nth(class).expect("there are tables of every width").0;
                let (rows, values) = tables.gradients_of(&travelled.served[class], vectors)?;
                if class + 1 < store.by_width().count() {
                    return Ok((rows, values));
                }
                // The gradients of this rank's batch come first.
                let (mut all_rows, mut all_values) =
                    self.own_elements(staged, looked_up, &unpooled, gradients);
                all_rows.push(rows);
                all_values.push(values);
                if let (Some(copies), Some((pending, sums))) = (&travelled.copies, sums.take()) {
                    self.recorder.during(Activity::Gradients, || pending.wait())?;
                    all_rows.push(copies.rows.rows.shallow_clone());
                    all_values.push(copies.in_order(&sums, dim));
                }
                Ok((Tensor::cat(&all_rows, 0), Tensor::cat(&all_values, 0)))
            })?;
            let none = accelerator.empty(&[0, width as i64], Element::Float)?;
            store.update(class, &rows, [&values, &none], update)?;
        }
        Ok(())
    }

    /// Starts sending the sums of the replicas' gradients that this rank computes to all ranks. Ranks with fewer
    /// rows send zeros after their sums.
    fn send_sums_on_device(
        &self,
        copies: &Copies,
        gradients: &Tensor,
        accelerator: &Accelerator,
    ) -> Result<(Pending, Tensor)> {
        let (ranks, dim) = (self.ranks() as i64, gradients.size()[1]);
        let longest = copies.reduced.iter().copied().max().unwrap_or(0) as i64;
        let sums = accelerator.summed(gradients, &copies.rows.sums)?;
        let padding = Tensor::zeros([longest - sums.size()[0], dim], (Element::Float, accelerator.torch()));
        let sums = on_wire(&Tensor::cat(&[sums, padding], 0), self.dtype);
        let gathered = accelerator.empty(&[ranks * longest, dim], sums.kind())?;
        let pending = self.collectives.all_gather(&gathered, &sums)?;
        self.count(&self.sent.gradients, &vec![longest * dim; ranks as usize], self.dtype.bytes());
        Ok((pending, gathered))
    }

    /// Returns the rows and gradients of the batch's elements in tables that only this rank has.
    fn own_elements(
        &self,
        staged: &Staged,
        looked_up: &LookedUp,
        unpooled: &Tensor,
        gradients: &DeviceGradients,
    ) -> (Vec<Tensor>, Vec<Tensor>) {
        let (mut rows, mut values) = (Vec::new(), Vec::new());
        let here = (0..self.features.len()).filter(|table| self.is_here(*table));
        for feature in here.flat_map(|table| &self.features[table]) {
            let place = &staged.places[*feature];
            let (elements, sequence) = (place.elements(), place.is_sequence());
            let count = elements.end - elements.start;
            let (first, source) = match (&gradients.sequences, sequence) {
                (Some(gradient), true) => (staged.pooled_elements, gradient),
                _ => (0, unpooled),
            };
            rows.push(looked_up.rows.narrow(0, first + elements.start, count));
            values.push(source.narrow(0, elements.start, count));
        }
        (rows, values)
    }

    /// Exchanges floats between devices, in the type of the messages; the sizes are by rank.
    fn exchange_on_device(
        &self,
        accelerator: &Accelerator,
        values: &Tensor,
        sent: &[usize],
        received: &[usize],
        counter: &AtomicU64,
    ) -> Result<(Pending, Tensor)> {
        let splits = |sizes: &[usize]| -> Vec<i64> { sizes.iter().map(|size| *size as i64).collect() };
        let (sent, received) = (splits(sent), splits(received));
        let values = on_wire(values, self.dtype);
        let output = accelerator.empty(&[received.iter().sum()], values.kind())?;
        let pending = self.collectives.all_to_all(&output, &received, &values, &sent)?;
        self.count(counter, &sent, self.dtype.bytes());
        Ok((pending, output))
    }
}

impl Copies {
    /// Returns the sums of all rows, `[rows, D]`, in the order of the rows, without the padding of the gathered
    /// sums.
    fn in_order(&self, gathered: &Tensor, dim: i64) -> Tensor {
        let longest = gathered.size()[0] / self.reduced.len() as i64;
        let own = |(reducer, rows): (i64, &usize)| gathered.narrow(0, reducer * longest, *rows as i64);
        let pieces: Vec<Tensor> = (0..).zip(&self.reduced).map(own).collect();
        Tensor::cat(&pieces, 0).to_kind(Element::Float).view([-1, dim])
    }
}

/// Returns the number of floats of the answers to each rank.
fn floats(counts: &[Vec<[usize; 2]>], store: &DeviceStore) -> Vec<usize> {
    let of_width = |(count, (tables, _)): (&[usize; 2], (&crate::device::DeviceTables, _))| {
        count.iter().sum::<usize>() * tables.width()
    };
    counts.iter().map(|of_rank| of_rank.iter().zip(store.by_width()).map(of_width).sum()).collect()
}

/// Converts floats to the type of the messages. Finite values beyond its largest value become the largest value.
fn on_wire(values: &Tensor, dtype: DataType) -> Tensor {
    let (kind, largest) = match dtype {
        DataType::Fp32 => return values.shallow_clone(),
        DataType::Bf16 => (Element::BFloat16, 3.389_531_389_251_535_5e38),
        DataType::Fp16 => (Element::Half, 65504.0),
    };
    values.clamp(-largest, largest).where_self(&values.isfinite(), values).to_kind(kind)
}
