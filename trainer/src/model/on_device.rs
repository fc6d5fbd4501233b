//! A step through the model where the tables are on a device: libtorch's operations between our kernels.
//!
//! ```text
//! tables ─▶ pooled rows ─────────────────────────────────────────────────┐
//!        └▶ elements ═▶ projected ─▶ rows, padded ═▶ attention ═▶ rows ──┴▶ samples ═▶ interaction, top MLP ═▶ logits
//! dense features ═▶ bottom MLP ─────────────────────────────────────────▶┘
//! ```
//!
//! A double arrow is libtorch's, with autograd; a single one is a kernel of ours. Between two pieces of autograd is a leaf,
//! and `backward` goes from leaf to leaf.

use std::sync::PoisonError;

use onefold_datasets::Schema;
use onefold_ikjt::Batch;
use onefold_sharding::TableConfig;
use tch::nn::Module;
use tch::{Kind, Tensor};

use super::attention::SelfAttention;
use super::{Forward, Model};
use crate::checkpoint::Touched;
use crate::device::{Accelerator, Jagged, Staged, Sums, guarded};
use crate::embedding::{DeviceEmbeddings, LookupGradients, Vectors};
use crate::{Result, TrainConfig};

/// What is added to the score of a key that a row does not have; a row without elements has no key, and a sum of nothing.
const MASKED: f64 = 1e30;

/// What a forward pass leaves for backward.
#[derive(Debug)]
pub(super) struct Passed {
    /// `[B, D]`.
    bottom: Option<Tensor>,
    attended: Option<Attended>,
    /// `[B, N D]`, the leaf that holds the vectors of every sample.
    vectors: Tensor,
}

/// The attention block's leaves and what autograd made of them.
#[derive(Debug)]
struct Attended {
    /// `[T, D]`, leaf: the elements' vectors.
    elements: Tensor,
    /// `[T, 3 D]`, of `elements`.
    projected: Tensor,
    /// `[U, longest, 3 D]`, leaf: the same by row.
    padded: Tensor,
    /// `[U, D]`, of `padded`.
    rows: Tensor,
}

/// Rows on their way to the samples that have them.
struct Source<'a> {
    part: Part,
    /// The first of them.
    first: i64,
    rows: i64,
    /// Vectors of a row.
    vectors: i64,
    inverse: Option<&'a (Tensor, Sums)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Pooled,
    Attended,
}

/// The sources of a sample's vectors after the bottom MLP's, in the model's order.
fn sources(batch: &Staged) -> Vec<Source<'_>> {
    let (mut bag, mut row) = (0, 0);
    let mut sources = Vec::new();
    for group in &batch.groups {
        let inverse = group.inverse.as_ref();
        let (rows, vectors) = (group.rows, group.pooled);
        if vectors > 0 {
            sources.push(Source { part: Part::Pooled, first: bag, rows, vectors, inverse });
            bag += rows * vectors;
        }
        for _ in 0..group.sequences {
            sources.push(Source { part: Part::Attended, first: row, rows, vectors: 1, inverse });
            row += rows;
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
    /// As [`new`](Self::new), and [`Error::Device`](crate::Error::Device) if the device lacks the memory, or a table's
    /// settings are not those of a device's tables.
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
            let attended = match (self.blocks.attention(), &looked_up.sequences, &staged.sequences) {
                (Some(attention), Some(elements), Some(rows)) => {
                    Some(attention.forward_on_device(accelerator, elements, rows)?)
                }
                _ => None,
            };
            let dense = staged.dense.as_ref();
            let bottom = self.bottom.as_ref().zip(dense).map(|(bottom, dense)| bottom.forward(dense));
            let rows = [looked_up.pooled.as_ref(), attended.as_ref().map(|attended| &attended.rows)];
            let vectors = self.expand_on_device(accelerator, staged, bottom.as_ref(), rows)?;
            let vectors = vectors.set_requires_grad(true);
            let logits = self.logits_on_device(&vectors, staged.size());
            drop(kept);
            Ok(Forward::on_device(logits, lookup, Passed { bottom, attended, vectors }))
        })
    }

    /// `[B, N D]`, the vectors of every sample.
    fn expand_on_device(
        &self,
        accelerator: &Accelerator,
        batch: &Staged,
        bottom: Option<&Tensor>,
        [pooled, attended]: [Option<&Tensor>; 2],
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
            let all = if source.part == Part::Pooled { pooled } else { attended };
            let rows = source.of(&all.expect("every group has been looked up").detach(), dim);
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
        let zero = |rows: i64| accelerator.empty(&[rows, dim], Kind::Float);
        let bags = batch.bags.as_ref().map(|bags| zero(bags.jagged.rows)).transpose()?;
        let attended = passed.attended.as_ref().map(|attended| zero(attended.rows.size()[0])).transpose()?;
        let mut column = if passed.bottom.is_some() { dim } else { 0 };
        for source in sources(batch) {
            let all = if source.part == Part::Pooled { &bags } else { &attended };
            let rows = source.of(all.as_ref().expect("every group has been looked up"), dim);
            let own = upstream.narrow(1, column, source.vectors * dim);
            accelerator.fold(&own, source.inverse.map(|(_, sums)| sums), &rows)?;
            column += source.vectors * dim;
        }
        if let Some(bottom) = &passed.bottom {
            weighted(bottom, &upstream.narrow(1, 0, dim)).backward();
        }
        let elements = match (self.blocks.attention(), &passed.attended, &batch.sequences, attended) {
            (Some(attention), Some(attended), Some(rows), Some(gradient)) => {
                Some(attention.backward_on_device(accelerator, attended, rows, &gradient)?)
            }
            _ => None,
        };
        let pooled = bags.map_or_else(|| Vectors::from(Vec::new()), Vectors::Tensor);
        Ok(LookupGradients { pooled, sequences: elements.into_iter().map(Vectors::Tensor).collect() })
    }
}

/// A scalar whose gradient with regard to `values` is `gradient`.
fn weighted(values: &Tensor, gradient: &Tensor) -> Tensor {
    (values * gradient).sum(Kind::Float)
}

impl SelfAttention {
    /// All sequences of a batch: elements are projected once, however many rows have them.
    fn forward_on_device(
        &self,
        accelerator: &Accelerator,
        elements: &Tensor,
        rows: &Jagged,
    ) -> Result<Attended> {
        let elements = elements.detach().set_requires_grad(true);
        let projected = self.project.forward(&elements);
        let padded = accelerator.pad(&projected.detach().contiguous(), rows)?.set_requires_grad(true);
        let (heads, head_dim) = (self.heads, self.dim / self.heads);
        let part = |i: i64| {
            let part = padded.narrow(2, i * self.dim, self.dim);
            part.reshape([rows.rows, rows.longest, heads, head_dim]).transpose(1, 2)
        };
        let [queries, keys, values] = [0, 1, 2].map(part);
        let positions = Tensor::arange(rows.longest, (Kind::Int, accelerator.torch())).unsqueeze(0);
        let valid = positions.lt_tensor(&rows.sizes.unsqueeze(1)).to_kind(Kind::Float);
        let mask = ((&valid - 1.0) * MASKED).view([rows.rows, 1, 1, rows.longest]);
        let scores = queries.matmul(&keys.transpose(2, 3)) / (head_dim as f64).sqrt() + mask;
        // The mean over the queries is taken of the weights, before they meet the values.
        let share = &valid / rows.sizes.clamp_min(1).unsqueeze(1);
        let means = share.view([rows.rows, 1, 1, rows.longest]).matmul(&scores.softmax(3, Kind::Float));
        let attended = means.matmul(&values).reshape([rows.rows, self.dim]);
        Ok(Attended { rows: self.output.forward(&attended), elements, projected, padded })
    }

    /// The gradient of the elements, `[T, D]`, from that of the rows.
    fn backward_on_device(
        &self,
        accelerator: &Accelerator,
        attended: &Attended,
        rows: &Jagged,
        gradient: &Tensor,
    ) -> Result<Tensor> {
        weighted(&attended.rows, gradient).backward();
        let padded = attended.padded.grad().contiguous();
        let projected = accelerator.unpad(&padded, rows, attended.elements.size()[0])?;
        weighted(&attended.projected, &projected).backward();
        if let Some(bias) = &self.project.bs {
            // The bias of keys has no influence, and no gradient: not even rounding's.
            let _ = tch::no_grad(|| bias.grad().narrow(0, self.dim, self.dim).zero_());
        }
        Ok(attended.elements.grad().contiguous())
    }
}
