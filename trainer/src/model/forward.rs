//! A step through the model: forward, and backward through the parts that autograd does not see.
//!
//! ```text
//! tables ─▶ pooled rows ─┬──────────────────────────────────┐
//!        │               └═▶ projections of narrow tables ──┤
//!        ├▶ means of windows ═▶ attention block ═▶ rows ─────┤
//!        └▶ elements of windows ═▶ DIN, encoder ═▶ rows ─────┴▶ interaction ═▶ top MLP ═▶ logits
//! dense features ═▶ bottom MLP ════════════════════════════▶┘
//! ```
//!
//! A double arrow is a libtorch operation with autograd. A single arrow is one of our kernels; its output is a leaf
//! of autograd. Therefore `backward` has stages: through the top MLP to the interaction's leaf, through the
//! interaction to its sources, through the bottom MLP, the projections and the sequence blocks to their leaves, and
//! from there to the vectors of the tables. The part below the top MLP is a [`Passed`]: here for tables in host memory,
//! in [`on_device`](super::on_device) for tables on a device.

use std::time::Duration;

use onefold_ikjt::Batch;
use onefold_kernels::interaction::Source;
use tch::Tensor;

use super::on_device::DevicePath;
use super::passed::{Finite, Passed};
use super::projection::Projected;
use super::sequences::Sequences;
use super::{Model, Stage};
use crate::config::TableOptimizerConfig;
use crate::device::guarded;
use crate::embedding::{
    Embeddings, HostEmbeddings, Lookup, LookupGradients, Lookups, Request, SentGradients, Status,
};
use crate::lockstep::{self, BEAT};
use crate::{Result, shim, tensors};

/// The result of a forward pass, and the state that its backward pass and its update need.
#[derive(Debug)]
pub struct Forward {
    /// The logits, `[B, tasks]`.
    pub logits: Tensor,
    pub(super) passed: Box<dyn Passed>,
    /// The loss, if the forward pass has already computed it and its gradients down to the leaf.
    computed: Option<Tensor>,
}

impl Forward {
    /// Returns whether the host waits for the loss before the update: if the model is in host memory, or if there
    /// are other ranks, which must know the loss.
    pub(crate) fn waits(&self, model: &Model) -> bool {
        model.embeddings.on_device().is_none() || model.embeddings.collectives().size() > 1
    }

    /// Returns whether the gradients of the tables' vectors are finite. Must be called after [`Model::backward`].
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub(crate) fn finite(&self, model: &Model) -> Result<Finite> {
        self.passed.finite(model)
    }
}

/// The part of the model below the top MLP with tables in host memory.
#[derive(Debug)]
struct HostPath {
    lookups: Lookups,
    bottom: Option<Tensor>,
    /// For each lookup, the projected vectors, if a table is narrow.
    projected: Vec<Option<Projected>>,
    sequences: Sequences,
    /// The output of the interaction, a leaf of autograd.
    interacted: Tensor,
    gradients: Vec<LookupGradients>,
    sent: Option<SentGradients>,
}

/// The input of a batch in progress: its rows are being requested from their owners, and the batch is being copied
/// to the device, if there is one.
#[derive(Debug)]
pub struct Input(Request);

impl Model {
    /// Starts the input of a batch, which [`forward`](Self::forward) completes, and sends this rank's `status` to
    /// all ranks. Without a batch, nothing is requested. Every rank must call it once per batch.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if an id has no row in its table or the device fails,
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails.
    pub fn request(&self, batch: Option<&Batch>, status: Status) -> Result<Input> {
        let request = || self.profile.measure(Stage::Lookup, || self.embeddings.request_batch(batch, status));
        guarded(self.device(), request).map(Input)
    }

    /// Waits for this rank's next batch, until `is_ready` returns true. `is_ready` waits for up to the given
    /// duration. Meanwhile, this rank tells the other ranks that it is still reading, so that they do not consider
    /// it lost. A request must follow.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank is lost,
    /// [`Error::ReportedElsewhere`](crate::Error::ReportedElsewhere) if it has failed.
    pub fn wait_for_batch(&self, mut is_ready: impl FnMut(Duration) -> bool) -> Result<()> {
        if self.embeddings.collectives().size() == 1 {
            return Ok(());
        }
        while !is_ready(BEAT) {
            lockstep::go_on(&self.embeddings.say_waiting()?)?;
        }
        Ok(())
    }

    /// Calls [`request`](Self::request) with the weight of the batch as its status. If there is an error instead of
    /// a batch, tells the other ranks that this rank has failed.
    ///
    /// # Errors
    ///
    /// The error of the batch, or of its request.
    pub fn request_or_fail(&self, batch: Result<Batch>, flags: i64) -> Result<(Batch, Input)> {
        let requested = batch.and_then(|batch| {
            let status = Status { flags, weight: Self::weight(&batch) };
            let input = self.request(Some(&batch), status)?;
            Ok((batch, input))
        });
        if let Err(error) = &requested
            && error.is_own()
        {
            let mut failed = self.request(None, Status { flags: Status::FAILED, weight: 0.0 })?;
            self.statuses(&mut failed)?;
        }
        requested
    }

    /// Waits until all ranks have made their requests. Returns their statuses, by rank.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails.
    pub fn statuses<'a>(&self, input: &'a mut Input) -> Result<&'a [Status]> {
        self.profile.measure(Stage::Exchange, || self.embeddings.statuses(&mut input.0))
    }

    /// Computes the logits of a batch; `input` is its request.
    ///
    /// # Errors
    ///
    /// See [`request`](Self::request).
    pub fn forward(&self, batch: &Batch, input: Input) -> Result<Forward> {
        self.pass(batch, input, None)
    }

    /// Computes the logits of a batch, and its [`loss`](Self::loss), as input for [`backward`](Self::backward).
    ///
    /// # Errors
    ///
    /// See [`request`](Self::request).
    pub fn learn(&self, batch: &Batch, input: Input, weight: f64) -> Result<(Forward, Tensor)> {
        let forward = self.pass(batch, input, Some(weight))?;
        let loss = match &forward.computed {
            Some(loss) => loss.shallow_clone(),
            None => guarded(self.device(), || {
                Ok(self.profile.measure(Stage::Mlps, || self.loss(&forward, batch, weight)))
            })?,
        };
        Ok((forward, loss))
    }

    fn pass(&self, batch: &Batch, input: Input, weight: Option<f64>) -> Result<Forward> {
        guarded(self.device(), || {
            let passed: Box<dyn Passed> = match self.embeddings.on_device() {
                None => Box::new(HostPath::new(self, self.embeddings.host()?, batch, input.0)?),
                Some(embeddings) => {
                    let path = DevicePath::new(self, embeddings, input.0, weight)?;
                    if let Some((logits, loss)) = path.computed() {
                        return Ok(Forward { logits, passed: Box::new(path), computed: Some(loss) });
                    }
                    Box::new(path)
                }
            };
            let logits = self.profile.measure(Stage::Mlps, || self.logits_of(&passed.input(self)));
            Ok(Forward { logits, passed, computed: None })
        })
    }

    /// Computes the gradients of `loss`, a scalar that was computed from `forward`'s logits. The gradients of the
    /// dense part are added to its parameters; the gradients of the tables' vectors are kept in `forward` for
    /// [`update`](Model::update). `top_is_ready` is called when the gradients of the parameters after the
    /// interaction are complete. `batch` is the batch of `forward`.
    ///
    /// # Errors
    ///
    /// The first error of `top_is_ready`; [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub fn backward(
        &self,
        batch: &Batch,
        forward: &mut Forward,
        loss: &Tensor,
        top_is_ready: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        guarded(self.device(), || {
            if forward.computed.is_none() {
                self.profile.measure(Stage::MlpsBackward, || loss.backward());
            }
            top_is_ready()?;
            forward.passed.backward(self, batch)
        })
    }

    /// Starts sending the gradients that [`backward`](Self::backward) has computed to the ranks that own the
    /// tables.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails, [`Error::Fault`](crate::Error::Fault) if
    /// the device fails.
    pub fn send_gradients(&self, forward: &mut Forward) -> Result<()> {
        forward.passed.send(&self.embeddings)
    }

    /// Updates the tables with the gradients of [`backward`](Self::backward), and sends them first if they were not
    /// sent.
    ///
    /// # Errors
    ///
    /// See [`send_gradients`](Self::send_gradients).
    pub fn update(&mut self, mut forward: Forward, optimizer: &TableOptimizerConfig) -> Result<()> {
        self.update_if(&mut forward, optimizer, None)
    }

    /// Does the same as [`update`](Self::update), except that tables on a device do not change if `permit`, an
    /// `int` on the device, is 0.
    pub(crate) fn update_if(
        &mut self,
        forward: &mut Forward,
        optimizer: &TableOptimizerConfig,
        permit: Option<&Tensor>,
    ) -> Result<()> {
        forward.passed.update(&mut self.embeddings, optimizer, permit)
    }
}

impl HostPath {
    fn new(model: &Model, embeddings: HostEmbeddings<'_>, batch: &Batch, request: Request) -> Result<Self> {
        let profile = &model.profile;
        let lookups = profile.measure(Stage::Lookup, || embeddings.lookup(request))?;
        let sequences =
            profile.measure(Stage::Attention, || model.blocks.forward(batch, (&lookups.groups, embeddings)));
        let bottom = model.bottom.as_ref().map(|bottom| {
            let dense = model.dense_of(batch);
            profile.measure(Stage::Mlps, || bottom.forward(&dense))
        });
        let project = || lookups.groups.iter().map(|lookup| model.projections.forward(lookup)).collect();
        let projected: Vec<_> = profile.measure(Stage::Mlps, project);
        let rows = Detached::new(bottom.as_ref(), &projected, &sequences);
        let interacted = model.interact(&sources(batch, &lookups.groups, &rows), batch.size());
        Ok(Self { lookups, bottom, projected, sequences, interacted, gradients: Vec::new(), sent: None })
    }

    /// Computes the gradients of the tables' vectors, given the gradients of the interaction's sources.
    fn backward_sources(&self, model: &Model, gradients: Vec<Vec<f32>>) -> Result<Vec<LookupGradients>> {
        let embeddings = model.embeddings.host()?;
        let Self { lookups, bottom, projected, sequences, .. } = self;
        let (lookups, profile) = (&lookups.groups, &model.profile);
        let mut gradients = gradients.into_iter();
        let bottom_gradient = bottom.as_ref().and_then(|_| gradients.next());
        let (mut pooled, mut sequence_gradients) = (Vec::new(), Vec::new());
        for lookup in lookups {
            let has_pooled = !lookup.pooled_features.is_empty();
            pooled.push(if has_pooled { gradients.next().unwrap_or_default() } else { Vec::new() });
            sequence_gradients.extend(gradients.by_ref().take(lookup.sequences.len()));
        }
        profile.measure(Stage::MlpsBackward, || {
            if let (Some(bottom), Some(gradient)) = (bottom, &bottom_gradient) {
                let gradient = tensors::from_f32(gradient, &bottom.size());
                shim::backward(bottom, &gradient);
            }
            for (projected, pooled) in projected.iter().zip(&mut pooled) {
                if let Some(projected) = projected {
                    *pooled = projected.backward(pooled);
                }
            }
        });
        let sequences = profile.measure(Stage::AttentionBackward, || {
            sequences.backward((lookups, embeddings), &sequence_gradients, &mut pooled)
        });
        let mut sequences = sequences.into_iter();
        let of_lookup = |(lookup, pooled): (&Lookup, Vec<f32>)| LookupGradients {
            pooled,
            sequences: sequences.by_ref().take(lookup.sequences.len()).collect(),
        };
        Ok(lookups.iter().zip(pooled).map(of_lookup).collect())
    }
}

impl Passed for HostPath {
    fn input(&self, _: &Model) -> Tensor {
        self.interacted.shallow_clone()
    }

    fn backward(&mut self, model: &Model, batch: &Batch) -> Result<()> {
        let rows = Detached::new(self.bottom.as_ref(), &self.projected, &self.sequences);
        let sources = sources(batch, &self.lookups.groups, &rows);
        let gradients = model.interact_backward(&self.interacted, &sources);
        drop(sources);
        self.gradients = self.backward_sources(model, gradients)?;
        Ok(())
    }

    fn labels(&self) -> Option<(&Tensor, Option<&Tensor>)> {
        None
    }

    fn finite(&self, _: &Model) -> Result<Finite> {
        let finite = self.gradients.iter().all(|of_group| {
            tensors::are_finite(&of_group.pooled)
                && of_group.sequences.iter().all(|values| tensors::are_finite(values))
        });
        Ok(Finite::Known(finite))
    }

    fn send(&mut self, embeddings: &Embeddings) -> Result<()> {
        self.sent = Some(embeddings.host()?.send_gradients(&self.lookups, &self.gradients)?);
        Ok(())
    }

    fn update(
        &mut self,
        embeddings: &mut Embeddings,
        optimizer: &TableOptimizerConfig,
        _: Option<&Tensor>,
    ) -> Result<()> {
        let sent = match self.sent.take() {
            Some(sent) => sent,
            None => embeddings.host()?.send_gradients(&self.lookups, &self.gradients)?,
        };
        embeddings.update(&self.lookups, &self.gradients, sent, optimizer)
    }
}

/// The inputs of the interaction, detached from the graph.
struct Detached {
    bottom: Option<Tensor>,
    /// The projected vectors of every lookup with a narrow table.
    projected: Vec<Option<Tensor>>,
    /// The vectors of every sequence feature, and whether they are per sample.
    sequences: Vec<(Tensor, bool)>,
}

impl Detached {
    fn new(bottom: Option<&Tensor>, projected: &[Option<Projected>], sequences: &Sequences) -> Self {
        let detached = |tensor: &Tensor| tensor.detach().contiguous();
        let of_lookup = |projected: &Option<Projected>| projected.as_ref().map(|own| detached(&own.rows));
        Self {
            bottom: bottom.map(detached),
            projected: projected.iter().map(of_lookup).collect(),
            sequences: sequences.vectors(),
        }
    }
}

/// Returns all vectors of a batch: the bottom MLP's output, then the vectors of each group, pooled vectors first.
fn sources<'a>(batch: &'a Batch, lookups: &'a [Lookup], rows: &'a Detached) -> Vec<Source<'a>> {
    // SAFETY: no operation writes in place to the output of another operation.
    let values = |output: &'a Tensor| unsafe { tensors::as_slice(output) };
    let mut sources = Vec::new();
    if let Some(bottom) = &rows.bottom {
        sources.push(Source { values: values(bottom), vectors: 1, inverse: None });
    }
    let mut sequences = rows.sequences.iter();
    for ((group, lookup), projected) in batch.groups().iter().zip(lookups).zip(&rows.projected) {
        let inverse = group.inverse().map(|inverse| &inverse[..]);
        if !lookup.pooled_features.is_empty() {
            let values = projected.as_ref().map_or(&lookup.pooled[..], values);
            sources.push(Source { values, vectors: lookup.pooled_features.len(), inverse });
        }
        for (rows, by_sample) in sequences.by_ref().take(lookup.sequences.len()) {
            let inverse = inverse.filter(|_| !by_sample);
            sources.push(Source { values: values(rows), vectors: 1, inverse });
        }
    }
    sources
}
