//! A step through the model: forward, and backward through the parts that autograd does not see.
//!
//! ```text
//! tables ─▶ pooled rows ────────────────────────────────────┐
//!        ├▶ means of windows ═▶ attention block ═▶ rows ─────┤
//!        └▶ elements of windows ═▶ DIN, encoder ═▶ rows ─────┴▶ interaction ═▶ top MLP ═▶ logits
//! dense features ═▶ bottom MLP ════════════════════════════▶┘
//! ```
//!
//! A double arrow is libtorch's, with autograd; a single one is a kernel of ours, whose output is a leaf. So `backward`
//! goes in stages: through the top MLP to the interaction's leaf, through the interaction to its sources, through the bottom
//! MLP and the blocks that pool sequences to their leaves, and from there to the vectors of the tables.

use onefold_ikjt::Batch;
use tch::Tensor;

use super::interact::Interacted;
use super::on_device::Passed;
use super::sequences::Sequences;
use super::{Model, Stage};
use crate::embedding::{Lookup, LookupGradients};
use crate::kernels::interaction::Source;
use crate::{Result, tensors};

/// What one forward pass gives.
#[derive(Debug)]
pub struct Forward {
    /// `[B, tasks]`, logits.
    pub logits: Tensor,
    /// What was looked up, by group.
    pub lookups: Vec<Lookup>,
    bottom: Option<Tensor>,
    sequences: Sequences,
    /// By source: its vectors by sample, where they were expanded before the interaction.
    expanded: Vec<Option<Vec<f32>>>,
    interacted: Interacted,
    /// What is left on a device, instead of all of the above.
    on_device: Option<Passed>,
}

impl Forward {
    pub(super) fn on_device(logits: Tensor, lookup: Lookup, passed: Passed) -> Self {
        Self {
            logits,
            lookups: vec![lookup],
            bottom: None,
            sequences: Sequences::none(),
            expanded: Vec::new(),
            interacted: Interacted::none(),
            on_device: Some(passed),
        }
    }

    /// Products of pairs of vectors (and values that stand beside them) that were computed; 0 if there are cross layers, and
    /// on a device.
    pub fn products(&self) -> u64 {
        self.interacted.products()
    }
}

/// Vectors on their way into the interaction.
struct Vectors<'a> {
    /// `[U, F, D]`.
    values: &'a [f32],
    /// F.
    vectors: usize,
    inverse: Option<&'a [i32]>,
}

impl Model {
    /// The logits of a batch.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for.
    pub fn forward(&self, batch: &Batch) -> Result<Forward> {
        let profile = &self.profile;
        if !self.steps.lookups && batch.groups().iter().any(|group| group.inverse().is_some()) {
            return self.forward(&profile.measure(Stage::Expansion, || batch.expand()));
        }
        if let Some(device) = self.embeddings.on_device() {
            return self.forward_on_device(device, batch);
        }
        let lookups =
            profile.measure(Stage::Lookup, || self.embeddings.lookup(batch.groups(), self.steps))?;
        let sequences = profile.measure(Stage::Attention, || {
            self.blocks.forward(batch, &lookups, &*self.embeddings, self.steps.sequences)
        });
        let size = batch.size() as i64;
        let bottom = self.bottom.as_ref().map(|bottom| {
            let dense = tensors::from_f32(batch.dense(), &[size, batch.dense_width() as i64]);
            profile.measure(Stage::Mlps, || bottom.forward(&dense))
        });
        let rows = Detached::new(bottom.as_ref(), &sequences);
        let vectors = self.vectors(batch, &lookups, &rows);
        let expanded = profile.measure(Stage::Expansion, || self.expanded(&vectors));
        let interacted = self.interact(&sources(&vectors, &expanded), batch.size());
        let logits = profile.measure(Stage::Mlps, || match &self.crosses {
            None => self.top.forward_after_first(&interacted.leaf),
            Some(crosses) => self.top.forward(&crosses.forward(&interacted.leaf)),
        });
        Ok(Forward { logits, lookups, bottom, sequences, expanded, interacted, on_device: None })
    }

    /// The gradients of `loss`, a scalar computed from `forward`'s logits: those of the dense part are added to its
    /// parameters', those of the tables' vectors are returned for [`Embeddings::update`](crate::embedding::Embeddings::update).
    /// `batch` is the one that `forward` was given.
    ///
    /// # Errors
    ///
    /// [`Error::Device`](crate::Error::Device) if the model is on a device, and that fails.
    pub fn backward(&self, batch: &Batch, forward: &Forward, loss: &Tensor) -> Result<Vec<LookupGradients>> {
        let profile = &self.profile;
        if let (Some(device), Some(passed)) = (self.embeddings.on_device(), &forward.on_device) {
            return self.backward_on_device(device, forward, passed, loss);
        }
        if !self.steps.lookups && batch.groups().iter().any(|group| group.inverse().is_some()) {
            let expanded = profile.measure(Stage::Expansion, || batch.expand());
            return self.backward(&expanded, forward, loss);
        }
        profile.measure(Stage::MlpsBackward, || loss.backward());
        let rows = Detached::new(forward.bottom.as_ref(), &forward.sequences);
        let vectors = self.vectors(batch, &forward.lookups, &rows);
        let gradients = self.interact_backward(&forward.interacted, &sources(&vectors, &forward.expanded));
        let gradients =
            profile.measure(Stage::ExpansionBackward, || self.folded(&vectors, &forward.expanded, gradients));
        Ok(self.backward_sources(forward, gradients))
    }

    /// From the gradients of the interaction's sources to those of the tables' vectors.
    fn backward_sources(&self, forward: &Forward, gradients: Vec<Vec<f32>>) -> Vec<LookupGradients> {
        let mut gradients = gradients.into_iter();
        let bottom_gradient = forward.bottom.as_ref().and_then(|_| gradients.next());
        let (mut pooled, mut sequence_gradients) = (Vec::new(), Vec::new());
        for lookup in &forward.lookups {
            let has_pooled = !lookup.pooled_features.is_empty();
            pooled.push(if has_pooled { gradients.next().unwrap_or_default() } else { Vec::new() });
            sequence_gradients.extend(gradients.by_ref().take(lookup.sequences.len()));
        }
        self.profile.measure(Stage::MlpsBackward, || {
            if let (Some(bottom), Some(gradient)) = (&forward.bottom, &bottom_gradient) {
                let gradient = tensors::from_f32(gradient, &bottom.size());
                (bottom * gradient).sum(tch::Kind::Float).backward();
            }
        });
        let sequences = self.profile.measure(Stage::AttentionBackward, || {
            let Forward { sequences, lookups, .. } = forward;
            self.blocks.backward(sequences, lookups, &*self.embeddings, &sequence_gradients, &mut pooled)
        });
        let mut sequences = sequences.into_iter();
        let of_lookup = |(lookup, pooled): (&Lookup, Vec<f32>)| LookupGradients {
            pooled: pooled.into(),
            sequences: sequences.by_ref().take(lookup.sequences.len()).map(Into::into).collect(),
        };
        forward.lookups.iter().zip(pooled).map(of_lookup).collect()
    }

    /// All vectors of a batch: the bottom MLP's, then those of each group, pooled ones first.
    fn vectors<'a>(&self, batch: &'a Batch, lookups: &'a [Lookup], rows: &'a Detached) -> Vec<Vectors<'a>> {
        let mut vectors = Vec::new();
        if let Some(bottom) = &rows.bottom {
            vectors.push(Vectors { values: tensors::as_slice(bottom), vectors: 1, inverse: None });
        }
        let mut sequences = rows.sequences.iter();
        for (group, lookup) in batch.groups().iter().zip(lookups) {
            let inverse =
                |by_sample: bool| group.inverse().map(|inverse| &inverse[..]).filter(|_| !by_sample);
            if !lookup.pooled_features.is_empty() {
                let inverse = inverse(lookup.pooled_by_sample);
                let vectors_each = lookup.pooled_features.len();
                vectors.push(Vectors { values: &lookup.pooled, vectors: vectors_each, inverse });
            }
            for (rows, by_sample) in sequences.by_ref().take(lookup.sequences.len()) {
                let values = tensors::as_slice(rows);
                vectors.push(Vectors { values, vectors: 1, inverse: inverse(*by_sample) });
            }
        }
        vectors
    }

    fn expanded(&self, vectors: &[Vectors<'_>]) -> Vec<Option<Vec<f32>>> {
        let dim = self.embeddings.dim();
        let expanded = |vectors: &Vectors<'_>| {
            let inverse = vectors.inverse.filter(|_| !self.steps.late_expansion)?;
            let size = vectors.vectors * dim;
            let mut samples = vec![0.0; inverse.len() * size];
            self.embeddings.expand(vectors.values, size, inverse, &mut samples);
            Some(samples)
        };
        vectors.iter().map(expanded).collect()
    }

    fn folded(
        &self,
        vectors: &[Vectors<'_>],
        expanded: &[Option<Vec<f32>>],
        gradients: Vec<Vec<f32>>,
    ) -> Vec<Vec<f32>> {
        let dim = self.embeddings.dim();
        let folded = |((vectors, expanded), gradient): ((&Vectors<'_>, &Option<Vec<f32>>), Vec<f32>)| {
            let Some(inverse) = vectors.inverse.filter(|_| expanded.is_some()) else { return gradient };
            let size = vectors.vectors * dim;
            let mut rows = vec![0.0; vectors.values.len()];
            self.embeddings.fold(&gradient, size, inverse, &mut rows);
            rows
        };
        vectors.iter().zip(expanded).zip(gradients).map(folded).collect()
    }
}

/// The parts of the graph that the interaction reads, outside of it.
struct Detached {
    bottom: Option<Tensor>,
    /// Of every sequence feature, and whether its vectors are of samples.
    sequences: Vec<(Tensor, bool)>,
}

impl Detached {
    fn new(bottom: Option<&Tensor>, sequences: &Sequences) -> Self {
        Self { bottom: bottom.map(|tensor| tensor.detach().contiguous()), sequences: sequences.vectors() }
    }
}

fn sources<'a>(vectors: &'a [Vectors<'a>], expanded: &'a [Option<Vec<f32>>]) -> Vec<Source<'a>> {
    let source = |(vectors, expanded): (&'a Vectors<'a>, &'a Option<Vec<f32>>)| match expanded {
        None => Source { values: vectors.values, vectors: vectors.vectors, inverse: vectors.inverse },
        Some(expanded) => Source { values: expanded, vectors: vectors.vectors, inverse: None },
    };
    vectors.iter().zip(expanded).map(source).collect()
}
