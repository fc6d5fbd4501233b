//! A step through the model with tables on a device: libtorch's operations between our kernels.
//!
//! ```text
//! tables ─▶ pooled rows ─────────────────────────────────────────────────┐
//!        └▶ elements ═▶ work per element ─▶ padded rows ═▶ work per row ─┴▶ samples ═▶ interaction, top MLP ═▶ logits
//! dense features ═▶ bottom MLP ═════════════════════════════════════════════════════▶┘
//! ```
//!
//! A double arrow is a libtorch operation with autograd; a single arrow is one of our kernels. Each autograd graph
//! begins at a leaf, and `backward` proceeds from leaf to leaf. The work after the expansion to samples is the same
//! in every step; [`recorded`] records it as one graph if the device supports graphs.

use std::rc::Rc;

use onefold_ikjt::Batch;
use onefold_sharding::Pooling;
use tch::{Kind, Tensor};

use self::blocks::Pooled;
use self::recorded::Recorded;
use super::Model;
use super::passed::{Finite, Passed};
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::device::{Accelerator, Staged, Sums};
use crate::embedding::{
    DeviceEmbeddings, DeviceGradients, DeviceLookup, DeviceSentGradients, Embeddings, Request,
};

mod blocks;
mod recorded;

pub(super) use self::recorded::Recordings;

/// The part of the model below the top MLP with tables on a device.
#[derive(Debug)]
pub(super) struct DevicePath {
    lookup: DeviceLookup,
    sequences: Pooled,
    /// The vectors of every sample without the bottom MLP's output, `[B, N D]`, a leaf.
    vectors: Tensor,
    /// The graph that has computed the rest of the step.
    recorded: Option<Rc<Recorded>>,
    gradients: DeviceGradients,
    sent: Option<DeviceSentGradients>,
}

/// Rows that are expanded to samples.
struct Source<'a> {
    part: Part,
    /// The index of the first row.
    first: i64,
    rows: i64,
    /// The number of vectors per row.
    vectors: i64,
    /// The inverse index and the samples of every row; `None` if rows are samples.
    inverse: Option<&'a (Tensor, Sums)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The features that are pooled by sum or mean.
    Pooled,
    /// The result of a sequence block.
    Block(Pooling),
}

/// Returns the sources of a sample's vectors after the bottom MLP's output, in the model's order.
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
            // With `din`, every sample has its own vector, because it has its own target.
            let by_sample = *pooling == Pooling::Din;
            let rows = if by_sample { batch.size } else { group.rows };
            let inverse = inverse.filter(|_| !by_sample);
            let next = next.iter_mut().find(|(other, _)| other == pooling);
            let first = next.map_or(0, |(_, next)| std::mem::replace(next, *next + rows));
            sources.push(Source { part: Part::Block(*pooling), first, rows, vectors: 1, inverse });
        }
    }
    sources
}

impl Source<'_> {
    /// Returns this source's rows of all vectors of its part, `[rows, vectors D]`.
    fn of(&self, vectors: &Tensor, dim: i64) -> Tensor {
        vectors.narrow(0, self.first, self.rows * self.vectors).view([self.rows, self.vectors * dim])
    }
}

impl DevicePath {
    /// Looks up a batch. If `weight` is given, this is a training step with a loss that is divided by `weight`, and
    /// a graph may compute it.
    pub(super) fn new(
        model: &Model,
        embeddings: DeviceEmbeddings<'_>,
        request: Request,
        weight: Option<f64>,
    ) -> Result<Self> {
        let accelerator = embeddings.store.accelerator();
        let lookup = embeddings.lookup(request)?;
        let (staged, looked_up) = (&lookup.staged, &lookup.looked_up);
        let sequences = model.blocks.forward_on_device(accelerator, staged, looked_up)?;
        let rows_of = |part| match part {
            Part::Pooled => looked_up.pooled.as_ref(),
            Part::Block(pooling) => sequences.rows(pooling),
        };
        let dim = model.embeddings.dim() as i64;
        let sources = sources(staged);
        let width = dim * sources.iter().map(|source| source.vectors).sum::<i64>();
        let recorded = match weight {
            Some(weight) => {
                let recorded = model.recordings.borrow_mut().of(model, accelerator, staged, width)?;
                recorded.map(|recorded| (recorded, weight))
            }
            None => None,
        };
        let vectors = match &recorded {
            Some((recorded, _)) => recorded.vectors(),
            None => accelerator.empty(&[staged.size, width], Kind::Float)?.set_requires_grad(true),
        };
        expand(accelerator, &sources, rows_of, (&vectors.detach(), dim))?;
        if let Some((recorded, weight)) = &recorded {
            recorded.enqueue(model, accelerator, staged, *weight)?;
        }
        let recorded = recorded.map(|(recorded, _)| recorded);
        let gradients = DeviceGradients { pooled: None, sequences: None };
        Ok(Self { vectors, recorded, lookup, sequences, gradients, sent: None })
    }

    /// Returns the logits and the loss if a graph has computed them. The gradients of the parameters after the
    /// expansion to samples are then computed too.
    pub(super) fn computed(&self) -> Option<(Tensor, Tensor)> {
        self.recorded.as_ref().map(|recorded| (recorded.logits(), recorded.loss()))
    }
}

/// Writes the vectors of every sample, `[B, N D]`.
fn expand<'a>(
    accelerator: &Accelerator,
    sources: &[Source<'_>],
    rows_of: impl Fn(Part) -> Option<&'a Tensor>,
    (samples, dim): (&Tensor, i64),
) -> Result<()> {
    let mut column = 0;
    for source in sources {
        let all = rows_of(source.part).expect("every group has been looked up");
        let rows = source.of(&all.detach().contiguous(), dim);
        let index = source.inverse.map(|(inverse, _)| inverse);
        accelerator.expand(&rows, index, &samples.narrow(1, column, source.vectors * dim))?;
        column += source.vectors * dim;
    }
    Ok(())
}

impl Model {
    /// Returns the normalized dense features of a batch on the model's device, `[B, F]`. A batch without samples
    /// does not know its number of dense features.
    fn normalized(&self, dense: Option<&Tensor>, samples: i64) -> Tensor {
        let none = || Tensor::zeros([samples, self.dense_features], (Kind::Float, self.device()));
        let dense = dense.map_or_else(none, Tensor::shallow_clone);
        match &self.normalization {
            Some(normalization) => normalization.forward(&dense),
            None => dense,
        }
    }

    /// Returns the input of the cross layers or the top MLP, `[B, width]`: all vectors of the samples if cross
    /// layers follow, otherwise the bottom MLP's output and the strict lower triangle of the vectors' products.
    /// `vectors` contains the vectors without the bottom MLP's output, `[B, N D]`.
    fn interacted(&self, dense: Option<&Tensor>, vectors: &Tensor) -> Tensor {
        let (size, dim) = (vectors.size()[0], self.embeddings.dim() as i64);
        let bottom = self.bottom.as_ref().map(|bottom| bottom.forward(&self.normalized(dense, size)));
        let vectors = match &bottom {
            Some(bottom) => Tensor::cat(&[bottom, vectors], 1),
            None => vectors.shallow_clone(),
        };
        if self.crosses.is_some() {
            return vectors;
        }
        let count = vectors.size()[1] / dim;
        let matrices = self.compute.narrowed(&vectors.view([size, count, dim]));
        let products = matrices.bmm(&matrices.transpose(1, 2)).view([size, count * count]);
        let triangle = self.triangle.get_or_init(|| {
            // The triangle, row by row.
            let places: Vec<i64> =
                (1..count).flat_map(|row| (0..row).map(move |column| row * count + column)).collect();
            Tensor::from_slice(&places).to_device(vectors.device())
        });
        let products = products.index_select(1, triangle).to_kind(Kind::Float);
        match bottom {
            Some(bottom) => Tensor::cat(&[bottom, products], 1),
            None => products,
        }
    }
}

impl Passed for DevicePath {
    fn input(&self, model: &Model) -> Tensor {
        model.interacted(self.lookup.staged.dense.as_ref(), &self.vectors)
    }

    fn backward(&mut self, model: &Model, _: &Batch) -> Result<()> {
        let accelerator = model.embeddings.device()?.store.accelerator();
        let (batch, dim) = (&self.lookup.staged, model.embeddings.dim() as i64);
        let upstream = match &self.recorded {
            Some(recorded) => recorded.gradient(),
            None => self.vectors.grad().contiguous(),
        };
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
        let mut column = 0;
        for source in sources(batch) {
            let own = upstream.narrow(1, column, source.vectors * dim);
            let rows = source.of(gradient_of(source.part), dim);
            accelerator.fold(&own, source.inverse.map(|(_, sums)| sums), &rows)?;
            column += source.vectors * dim;
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
