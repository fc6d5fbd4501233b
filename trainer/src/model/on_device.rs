//! A step through the model where the tables are on a device: libtorch's operations between our kernels.
//!
//! ```text
//! tables ─▶ pooled rows ─────────────────────────────────────────┐
//!        └▶ elements ═▶ what rows share ─▶ rows, padded ═▶ rows ─┴▶ samples ═▶ interaction, top MLP ═▶ logits
//! dense features ═▶ bottom MLP ─────────────────────────────────▶┘
//! ```
//!
//! A double arrow is libtorch's, with autograd; a single one is a kernel of ours. Between two pieces of autograd is a
//! leaf, and `backward` goes from leaf to leaf.

use onefold_ikjt::Batch;
use onefold_sharding::Pooling;
use tch::{Kind, Tensor};

use self::blocks::Pooled;
use super::Model;
use super::forward::{Finite, Passed};
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, Staged, Sums};
use crate::embedding::{
    DeviceEmbeddings, DeviceGradients, DeviceLookup, DeviceSentGradients, Embeddings, Request,
};
use crate::{Result, shim};

mod blocks;

/// The way through tables on a device.
#[derive(Debug)]
pub(super) struct DevicePath {
    lookup: DeviceLookup,
    /// `[B, D]`.
    bottom: Option<Tensor>,
    sequences: Pooled,
    /// `[B, N D]`, the leaf that holds the vectors of every sample.
    vectors: Tensor,
    gradients: DeviceGradients,
    sent: Option<DeviceSentGradients>,
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

impl DevicePath {
    pub(super) fn new(model: &Model, embeddings: DeviceEmbeddings<'_>, request: Request) -> Result<Self> {
        let accelerator = embeddings.store.accelerator();
        let lookup = embeddings.lookup(request)?;
        let (staged, looked_up) = (&lookup.staged, &lookup.looked_up);
        let sequences = model.blocks.forward_on_device(accelerator, staged, looked_up)?;
        // Of no samples a batch does not know its dense features.
        let none = || accelerator.empty(&[staged.size(), model.dense_features], Kind::Float);
        let dense = staged.dense.as_ref().map_or_else(none, |dense| Ok(dense.shallow_clone()))?;
        let dense = match &model.normalization {
            Some(normalization) => normalization.forward(&dense),
            None => dense,
        };
        let bottom = model.bottom.as_ref().map(|bottom| bottom.forward(&dense));
        let rows_of = |part| match part {
            Part::Pooled => looked_up.pooled.as_ref(),
            Part::Block(pooling) => sequences.rows(pooling),
        };
        let dim = model.embeddings.dim() as i64;
        let vectors = expanded(accelerator, staged, dim, bottom.as_ref(), rows_of)?;
        let vectors = vectors.set_requires_grad(true);
        let gradients = DeviceGradients { pooled: None, sequences: None };
        Ok(Self { lookup, bottom, sequences, vectors, gradients, sent: None })
    }
}

/// `[B, N D]`, the vectors of every sample.
fn expanded<'a>(
    accelerator: &Accelerator,
    batch: &Staged,
    dim: i64,
    bottom: Option<&Tensor>,
    rows_of: impl Fn(Part) -> Option<&'a Tensor>,
) -> Result<Tensor> {
    let sources = sources(batch);
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

impl Passed for DevicePath {
    /// The samples' vectors where cross layers follow, otherwise the strict lower triangle of their products.
    fn input(&self, model: &Model) -> Tensor {
        let (vectors, dim) = (&self.vectors, model.embeddings.dim() as i64);
        if model.crosses.is_some() {
            return vectors.shallow_clone();
        }
        let (size, count) = (vectors.size()[0], vectors.size()[1] / dim);
        let matrices = model.compute.narrowed(&vectors.view([size, count, dim]));
        let products = matrices.bmm(&matrices.transpose(1, 2)).view([size, count * count]);
        let triangle = model.triangle.get_or_init(|| {
            // Row by row.
            let places: Vec<i64> =
                (1..count).flat_map(|row| (0..row).map(move |column| row * count + column)).collect();
            Tensor::from_slice(&places).to_device(vectors.device())
        });
        let products = products.index_select(1, triangle).to_kind(Kind::Float);
        match model.bottom {
            Some(_) => Tensor::cat(&[&vectors.narrow(1, 0, dim), &products], 1),
            None => products,
        }
    }

    fn backward(&mut self, model: &Model, _: &Batch) -> Result<()> {
        let accelerator = model.embeddings.device()?.store.accelerator();
        let (batch, dim) = (&self.lookup.staged, model.embeddings.dim() as i64);
        let upstream = self.vectors.grad().contiguous();
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
        let mut column = if self.bottom.is_some() { dim } else { 0 };
        for source in sources(batch) {
            let own = upstream.narrow(1, column, source.vectors * dim);
            let rows = source.of(gradient_of(source.part), dim);
            accelerator.fold(&own, source.inverse.map(|(_, sums)| sums), &rows)?;
            column += source.vectors * dim;
        }
        if let Some(bottom) = &self.bottom {
            shim::backward(bottom, &upstream.narrow(1, 0, dim));
        }
        let of_block = |pooling| gradient_of(Part::Block(pooling));
        let sequences = self.sequences.backward(accelerator, batch, of_block, pooled.as_ref())?;
        self.gradients = DeviceGradients { pooled, sequences };
        Ok(())
    }

    fn labels(&self) -> Option<(&Tensor, Option<&Tensor>)> {
        let staged = &self.lookup.staged;
        Some((staged.labels.as_ref()?, staged.weights.as_ref()))
    }

    fn finite(&self, model: &Model) -> Result<Finite> {
        let DeviceGradients { pooled, sequences } = &self.gradients;
        let gradients = pooled.iter().chain(sequences).map(Tensor::shallow_clone).collect::<Vec<_>>();
        let accelerator = model.embeddings.device()?.store.accelerator();
        Ok(Finite::OnDevice(accelerator.sum_of_squares(&gradients)?))
    }

    fn send(&mut self, embeddings: &Embeddings) -> Result<()> {
        self.sent = Some(embeddings.device()?.send_gradients(&self.lookup, &self.gradients)?);
        Ok(())
    }

    fn update(
        &mut self,
        embeddings: &mut Embeddings,
        optimizer: &TableOptimizerConfig,
        permit: Option<&Tensor>,
    ) -> Result<()> {
        let sent = match self.sent.take() {
            Some(sent) => sent,
            None => embeddings.device()?.send_gradients(&self.lookup, &self.gradients)?,
        };
        embeddings.update_on_device(&self.lookup, &self.gradients, sent, (optimizer, permit))
    }
}
