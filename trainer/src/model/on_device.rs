//! A step through the model where the tables are on a device: libtorch's operations between our kernels.
//!
//! ```text
//! tables ─▶ pooled rows ─────────────────────────────────────────┐
//!        └▶ elements ═▶ what rows share ─▶ rows, padded ═▶ rows ─┴▶ samples ═▶ interaction, top MLP ═▶ logits
//! dense features ═▶ bottom MLP ─────────────────────────────────▶┘
//! ```
//!
//! A double arrow is libtorch's, with autograd; a single one is a kernel of ours. Between two pieces of autograd is a leaf,
//! and `backward` goes from leaf to leaf.

use std::sync::PoisonError;

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use onefold_sharding::{Pooling, TableConfig};
use tch::{Kind, Tensor};

use self::blocks::Pooled;
use super::{Forward, Model};
use crate::checkpoint::Touched;
use crate::device::{Accelerator, Staged, Sums, guarded};
use crate::embedding::{DeviceEmbeddings, LookupGradients, Vectors};
use crate::{Result, TrainConfig};

mod blocks;

/// What a forward pass leaves for backward.
#[derive(Debug)]
pub(super) struct Passed {
    /// `[B, D]`.
    bottom: Option<Tensor>,
    sequences: Pooled,
    /// `[B, N D]`, the leaf that holds the vectors of every sample.
    vectors: Tensor,
}

/// Rows on their way to the samples that have them.
struct Source<'a> {
    part: Part,
    /// The first of them.
    first: i64,
    rows: i64,
    /// Vectors of a row.
    vectors: i64,
    /// Where rows are no samples.
    inverse: Option<&'a (Tensor, Sums)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// What is pooled by sum or mean.
    Pooled,
    /// What a block gave.
    Block(Pooling),
}

/// The sources of a sample's vectors after the bottom MLP's, in the model's order.
fn sources(batch: &Staged) -> Vec<Source<'_>> {
    let mut next: Vec<(Pooling, i64)> = batch.sequences.iter().map(|block| (block.pooling, 0)).collect();
    let mut sources = Vec::new();
    for group in &batch.groups {
        let inverse = group.inverse.as_ref();
        if group.pooled > 0 {
            let (part, first) = (Part::Pooled, group.first_bag);
            sources.push(Source { part, first, rows: group.rows, vectors: group.pooled, inverse });
        }
        for pooling in &group.sequences {
            // By `din` every sample has a vector of its own, as it has its own target.
            let by_sample = *pooling == Pooling::Din;
            let rows = if by_sample { batch.size() } else { group.rows };
            let inverse = inverse.filter(|_| !by_sample);
            let next = next.iter_mut().find(|(other, _)| other == pooling);
            let first = next.map_or(0, |(_, next)| std::mem::replace(next, *next + rows));
            sources.push(Source { part: Part::Block(*pooling), first, rows, vectors: 1, inverse });
        }
    }
    sources
}

impl Source<'_> {
    /// These rows of all of the part's vectors, `[rows, vectors D]`.
    fn of(&self, vectors: &Tensor, dim: i64) -> Tensor {
        vectors.narrow(0, self.first, self.rows * self.vectors).view([self.rows, self.vectors * dim])
    }
}

impl Model {
    /// A model on the CPU, or on `device`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`on_device`](Self::on_device).
    pub fn at(
        config: &TrainConfig,
        schema: &Schema,
        tables: &[TableConfig],
        threads: usize,
        device: Option<&Accelerator>,
    ) -> Result<Self> {
        match device {
            None => Self::new(config, schema, tables, threads),
            Some(device) => Self::on_device(config, schema, tables, threads, device),
        }
    }

    /// A model in the memory of `accelerator`, with the initial parameters that it has on the CPU.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Device`](crate::Error::Device) if the device lacks the memory, or the tables differ in
    /// their dimension or have 2^31 rows.
    pub fn on_device(
        config: &TrainConfig,
        schema: &Schema,
        tables: &[TableConfig],
        threads: usize,
        accelerator: &Accelerator,
    ) -> Result<Self> {
        let (optimizer, seed) = (&config.optimizer.tables, config.train.seed);
        let embeddings = DeviceEmbeddings::new(accelerator, tables, optimizer, seed, threads)?;
        let mut model = Self::with_embeddings(config, schema, Box::new(embeddings))?;
        guarded(accelerator.torch(), || {
            model.variables.set_device(accelerator.torch());
            Ok(())
        })?;
        Ok(model)
    }

    /// Begins to copy a batch to the device, if the tables are on one: `forward` will find it there.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn stage_ahead(&self, batch: &Batch) -> Result<()> {
        self.embeddings.on_device().map_or(Ok(()), |device| device.tables().stage_ahead(batch))
    }

    /// Adds the rows that were updated since the last call, if the tables are on a device, to `touched`.
    pub(crate) fn collect_touched(&mut self, touched: &mut Touched) {
        if let Some(device) = self.embeddings.on_device_mut() {
            let rows = device.tables_mut().take_touched();
            rows.iter().enumerate().for_each(|(table, rows)| touched.add(table, rows));
        }
    }

    pub(super) fn forward_on_device(&self, device: &DeviceEmbeddings, batch: &Batch) -> Result<Forward> {
        let accelerator = device.tables().accelerator();
        guarded(accelerator.torch(), || {
            let lookup = device.look_up(batch)?;
            let kept = device.kept(&lookup).lock().unwrap_or_else(PoisonError::into_inner);
            let (staged, looked_up) = (&kept.staged, &kept.looked_up);
            let sequences = self.blocks.forward_on_device(accelerator, staged, looked_up)?;
            let dense = staged.dense.as_ref();
            let bottom = self.bottom.as_ref().zip(dense).map(|(bottom, dense)| bottom.forward(dense));
            let rows_of = |part| match part {
                Part::Pooled => looked_up.pooled.as_ref(),
                Part::Block(pooling) => sequences.rows(pooling),
            };
            let vectors = self.expand_on_device(accelerator, staged, bottom.as_ref(), rows_of)?;
            let vectors = vectors.set_requires_grad(true);
            let logits = self.logits_on_device(&vectors, staged.size());
            drop(kept);
            Ok(Forward::on_device(logits, lookup, Passed { bottom, sequences, vectors }))
        })
    }

    /// `[B, N D]`, the vectors of every sample.
    fn expand_on_device<'a>(
        &self,
        accelerator: &Accelerator,
        batch: &Staged,
        bottom: Option<&Tensor>,
        rows_of: impl Fn(Part) -> Option<&'a Tensor>,
    ) -> Result<Tensor> {
        let (dim, sources) = (self.embeddings.dim() as i64, sources(batch));
        let vectors = i64::from(bottom.is_some()) + sources.iter().map(|source| source.vectors).sum::<i64>();
        let samples = accelerator.empty(&[batch.size(), vectors * dim], Kind::Float)?;
        let mut column = 0;
        if let Some(bottom) = bottom {
            accelerator.expand(&bottom.detach().contiguous(), None, &samples.narrow(1, 0, dim))?;
            column = dim;
        }
        for source in sources {
            let all = rows_of(source.part).expect("every group has been looked up");
            let rows = source.of(&all.detach().contiguous(), dim);
            let index = source.inverse.map(|(inverse, _)| inverse);
            accelerator.expand(&rows, index, &samples.narrow(1, column, source.vectors * dim))?;
            column += source.vectors * dim;
        }
        Ok(samples)
    }

    /// The interaction and the top MLP.
    fn logits_on_device(&self, vectors: &Tensor, size: i64) -> Tensor {
        let dim = self.embeddings.dim() as i64;
        let input = if let Some(crosses) = &self.crosses {
            crosses.forward(vectors)
        } else {
            let matrices = vectors.view([size, -1, dim]);
            let count = matrices.size()[1];
            let products = matrices.bmm(&matrices.transpose(1, 2)).view([size, count * count]);
            let triangle = self.triangle.get_or_init(|| {
                // The strict lower triangle, row by row.
                let places: Vec<i64> =
                    (1..count).flat_map(|row| (0..row).map(move |column| row * count + column)).collect();
                Tensor::from_slice(&places).to_device(vectors.device())
            });
            let products = products.index_select(1, triangle);
            match self.bottom {
                Some(_) => Tensor::cat(&[&vectors.narrow(1, 0, dim), &products], 1),
                None => products,
            }
        };
        self.top.forward(&input)
    }

    pub(super) fn backward_on_device(
        &self,
        device: &DeviceEmbeddings,
        forward: &Forward,
        passed: &Passed,
        loss: &Tensor,
    ) -> Result<Vec<LookupGradients>> {
        let accelerator = device.tables().accelerator();
        guarded(accelerator.torch(), || {
            loss.backward();
            let mut gradients = Vec::with_capacity(forward.lookups.len());
            for lookup in &forward.lookups {
                let kept = device.kept(lookup).lock().unwrap_or_else(PoisonError::into_inner);
                gradients.push(self.backward_sources_on_device(accelerator, &kept.staged, passed)?);
            }
            Ok(gradients)
        })
    }

    /// From the gradient of the samples' vectors to those of the tables'.
    fn backward_sources_on_device(
        &self,
        accelerator: &Accelerator,
        batch: &Staged,
        passed: &Passed,
    ) -> Result<LookupGradients> {
        let dim = self.embeddings.dim() as i64;
        let upstream = passed.vectors.grad().contiguous();
        let empty = |rows: i64| accelerator.empty(&[rows, dim], Kind::Float);
        let pooled = batch.bags.as_ref().map(|bags| empty(bags.jagged.rows)).transpose()?;
        let blocks = batch.sequences.iter().map(|block| Ok((block.pooling, empty(block.rows.rows)?)));
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let gradient_of = |part| match part {
            Part::Pooled => pooled.as_ref().expect("what is pooled has bags"),
            Part::Block(pooling) => {
                let own = blocks.iter().find(|(other, _)| *other == pooling);
                &own.expect("every block's sequences are in the batch").1
            }
        };
        let mut column = if passed.bottom.is_some() { dim } else { 0 };
        for source in sources(batch) {
            let own = upstream.narrow(1, column, source.vectors * dim);
            let rows = source.of(gradient_of(source.part), dim);
            accelerator.fold(&own, source.inverse.map(|(_, sums)| sums), &rows)?;
            column += source.vectors * dim;
        }
        if let Some(bottom) = &passed.bottom {
            weighted(bottom, &upstream.narrow(1, 0, dim)).backward();
        }
        let of_block = |pooling| gradient_of(Part::Block(pooling));
        let elements = passed.sequences.backward(accelerator, batch, of_block, pooled.as_ref())?;
        let pooled = pooled.map_or_else(|| Vectors::from(Vec::new()), Vectors::Tensor);
        Ok(LookupGradients { pooled, sequences: elements.into_iter().map(Vectors::Tensor).collect() })
    }
}

/// A scalar whose gradient with regard to `values` is `gradient`.
fn weighted(values: &Tensor, gradient: &Tensor) -> Tensor {
    (values * gradient).sum(Kind::Float)
}
