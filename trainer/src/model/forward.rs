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

use super::on_device::Passed;
use super::sequences::Sequences;
use super::{Model, Stage};
use crate::embedding::{
    DeviceGradients, DeviceSentGradients, Lookup, LookupGradients, Lookups, Request, SentGradients, Status,
};
use crate::kernels::interaction::Source;
use crate::lockstep::FAILED;
use crate::{Result, tensors};

/// What one forward pass gives.
#[derive(Debug)]
pub struct Forward {
    /// `[B, tasks]`, logits.
    pub logits: Tensor,
    pub(super) path: Path,
}

/// What a forward pass leaves for backward, by where the tables are.
#[derive(Debug)]
pub(super) enum Path {
    Host(Box<HostPath>),
    Device(Box<Passed>),
}

#[derive(Debug)]
pub(super) struct HostPath {
    pub(super) lookups: Lookups,
    bottom: Option<Tensor>,
    sequences: Sequences,
    /// The interaction's leaf.
    interacted: Tensor,
}

/// The gradients of a batch's lookups.
#[derive(Debug)]
pub struct Gradients(pub(super) OfTables);

impl Gradients {
    /// Whether all are finite numbers.
    pub fn are_finite(&self) -> bool {
        let of_tensor = |tensor: &Option<Tensor>| {
            tensor.as_ref().is_none_or(|values| values.isfinite().all().int64_value(&[]) != 0)
        };
        match &self.0 {
            OfTables::Host(gradients) => gradients.iter().all(|of_group| {
                tensors::are_finite(&of_group.pooled)
                    && of_group.sequences.iter().all(|values| tensors::are_finite(values))
            }),
            OfTables::Device(DeviceGradients { pooled, sequences }) => {
                of_tensor(pooled) && of_tensor(sequences)
            }
        }
    }
}

#[derive(Debug)]
pub(super) enum OfTables {
    Host(Vec<LookupGradients>),
    Device(DeviceGradients),
}

/// Gradients on their way to the ranks that own the tables.
#[derive(Debug)]
pub struct Sent(pub(super) Way);

#[derive(Debug)]
pub(super) enum Way {
    Host(SentGradients),
    Device(DeviceSentGradients),
}

/// A batch's input on its way: rows are asked for at their owners, and the batch is copied to the device, if there is one.
#[derive(Debug)]
pub struct Input(Request);

impl Model {
    /// Begins the input of a batch, which [`forward`](Self::forward) ends, and tells all ranks this one's `status`. Without a batch
    /// nothing is asked for. Every rank calls it, once for every batch.
    ///
    /// # Errors
    ///
    /// [`Error::Id`](crate::Error::Id) for an id that its table has no row for, [`Error::RankLost`](crate::Error::RankLost) if another rank
    /// fails, [`Error::Device`](crate::Error::Device) if the device does.
    pub fn request(&self, batch: Option<&Batch>, status: Status) -> Result<Input> {
        self.profile.measure(Stage::Lookup, || self.embeddings.request_batch(batch, status)).map(Input)
    }

    /// As [`request`](Self::request) with the weight of the batch as its status. If there is an error instead of a batch, the other
    /// ranks learn that this one has failed.
    ///
    /// # Errors
    ///
    /// That of the batch, or of its request.
    pub fn request_or_fail(&self, batch: Result<Batch>, flags: i64) -> Result<(Batch, Input)> {
        let requested = batch.and_then(|batch| {
            let status = Status { flags, weight: Self::weight(&batch) };
            let input = self.request(Some(&batch), status)?;
            Ok((batch, input))
        });
        if let Err(error) = &requested
            && error.is_own()
        {
            let mut failed = self.request(None, Status { flags: FAILED, weight: 0.0 })?;
            self.statuses(&mut failed)?;
        }
        requested
    }

    /// The statuses of all ranks, by rank, which are known when all have made their requests.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails.
    pub fn statuses<'a>(&self, input: &'a mut Input) -> Result<&'a [Status]> {
        self.profile.measure(Stage::Exchange, || self.embeddings.statuses(&mut input.0))
    }

    /// The logits of a batch that was not requested before.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub fn predict(&self, batch: &Batch) -> Result<Forward> {
        let input = self.request(Some(batch), Status::default())?;
        self.forward(batch, input)
    }

    /// The logits of a batch; `input` is its request.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
    pub fn forward(&self, batch: &Batch, input: Input) -> Result<Forward> {
        let profile = &self.profile;
        let request = input.0;
        if self.embeddings.on_device().is_some() {
            return self.forward_on_device(request);
        }
        let lookups = profile.measure(Stage::Lookup, || self.embeddings.lookup(request))?;
        let sequences = profile
            .measure(Stage::Attention, || self.blocks.forward(batch, &lookups.groups, &self.embeddings));
        let size = batch.size() as i64;
        let bottom = self.bottom.as_ref().map(|bottom| {
            // Of no samples a batch does not know its dense features.
            let dense = tensors::from_f32(batch.dense(), &[size, self.dense_features]);
            profile.measure(Stage::Mlps, || bottom.forward(&dense))
        });
        let rows = Detached::new(bottom.as_ref(), &sequences);
        let interacted = self.interact(&sources(batch, &lookups.groups, &rows), batch.size());
        let logits = profile.measure(Stage::Mlps, || match &self.crosses {
            None => self.top.forward(&interacted),
            Some(crosses) => self.top.forward(&crosses.forward(&interacted)),
        });
        let path = Path::Host(Box::new(HostPath { lookups, bottom, sequences, interacted }));
        Ok(Forward { logits, path })
    }

    /// The gradients of `loss`, a scalar computed from `forward`'s logits: those of the dense part are added to its
    /// parameters', those of the tables' vectors are returned for [`update`](Model::update). `top_is_ready` is called when the
    /// gradients of the parameters after the interaction are complete. `batch` is the one that `forward` was given.
    ///
    /// # Errors
    ///
    /// The first error of `top_is_ready`; [`Error::Device`](crate::Error::Device) if the device fails.
    pub fn backward(
        &self,
        batch: &Batch,
        forward: &Forward,
        loss: &Tensor,
        top_is_ready: impl FnOnce() -> Result<()>,
    ) -> Result<Gradients> {
        let path = match &forward.path {
            Path::Host(path) => path,
            Path::Device(passed) => {
                let gradients = self.backward_on_device(passed, loss)?;
                top_is_ready()?;
                return Ok(Gradients(OfTables::Device(gradients)));
            }
        };
        self.profile.measure(Stage::MlpsBackward, || loss.backward());
        top_is_ready()?;
        let rows = Detached::new(path.bottom.as_ref(), &path.sequences);
        let sources = sources(batch, &path.lookups.groups, &rows);
        let gradients = self.interact_backward(&path.interacted, &sources);
        Ok(Gradients(OfTables::Host(self.backward_sources(path, gradients))))
    }

    /// From the gradients of the interaction's sources to those of the tables' vectors.
    fn backward_sources(&self, path: &HostPath, gradients: Vec<Vec<f32>>) -> Vec<LookupGradients> {
        let HostPath { lookups, bottom, sequences, .. } = path;
        let lookups = &lookups.groups;
        let mut gradients = gradients.into_iter();
        let bottom_gradient = bottom.as_ref().and_then(|_| gradients.next());
        let (mut pooled, mut sequence_gradients) = (Vec::new(), Vec::new());
        for lookup in lookups {
            let has_pooled = !lookup.pooled_features.is_empty();
            pooled.push(if has_pooled { gradients.next().unwrap_or_default() } else { Vec::new() });
            sequence_gradients.extend(gradients.by_ref().take(lookup.sequences.len()));
        }
        self.profile.measure(Stage::MlpsBackward, || {
            if let (Some(bottom), Some(gradient)) = (bottom, &bottom_gradient) {
                let gradient = tensors::from_f32(gradient, &bottom.size());
                (bottom * gradient).sum(tch::Kind::Float).backward();
            }
        });
        let sequences = self.profile.measure(Stage::AttentionBackward, || {
            self.blocks.backward(sequences, lookups, &self.embeddings, &sequence_gradients, &mut pooled)
        });
        let mut sequences = sequences.into_iter();
        let of_lookup = |(lookup, pooled): (&Lookup, Vec<f32>)| LookupGradients {
            pooled,
            sequences: sequences.by_ref().take(lookup.sequences.len()).collect(),
        };
        lookups.iter().zip(pooled).map(of_lookup).collect()
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

/// All vectors of a batch: the bottom MLP's, then those of each group, pooled ones first.
fn sources<'a>(batch: &'a Batch, lookups: &'a [Lookup], rows: &'a Detached) -> Vec<Source<'a>> {
    let mut sources = Vec::new();
    if let Some(bottom) = &rows.bottom {
        sources.push(Source { values: tensors::as_slice(bottom), vectors: 1, inverse: None });
    }
    let mut sequences = rows.sequences.iter();
    for (group, lookup) in batch.groups().iter().zip(lookups) {
        let inverse = group.inverse().map(|inverse| &inverse[..]);
        if !lookup.pooled_features.is_empty() {
            sources.push(Source { values: &lookup.pooled, vectors: lookup.pooled_features.len(), inverse });
        }
        for (rows, by_sample) in sequences.by_ref().take(lookup.sequences.len()) {
            let values = tensors::as_slice(rows);
            sources.push(Source { values, vectors: 1, inverse: inverse.filter(|_| !by_sample) });
        }
    }
    sources
}
