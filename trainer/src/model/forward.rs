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
//! goes in stages: through the top MLP to the interaction's leaf, through the interaction to its sources, through the
//! bottom MLP and the blocks that pool sequences to their leaves, and from there to the vectors of the tables. What is
//! below the top MLP is [`Passed`]: here for tables in memory, in [`on_device`](super::on_device) for those on a
//! device.

use std::time::Duration;

use onefold_ikjt::Batch;
use onefold_kernels::interaction::Source;
use tch::{Device, Kind, Tensor};

use super::on_device::DevicePath;
use super::sequences::Sequences;
use super::{Model, Stage};
use crate::config::TableOptimizerConfig;
use crate::device::guarded;
use crate::embedding::{
    Embeddings, HostEmbeddings, Lookup, LookupGradients, Lookups, Request, SentGradients, Status,
};
use crate::lockstep::{self, BEAT};
use crate::{Result, shim, tensors};

/// What one forward pass gives, and what its backward pass and its update go on with.
#[derive(Debug)]
pub struct Forward {
    /// `[B, tasks]`, logits.
    pub logits: Tensor,
    pub(super) passed: Box<dyn Passed>,
    /// The loss, if the pass has found it and has gone back from it to the leaf.
    computed: Option<Tensor>,
}

impl Forward {
    /// Whether the host waits for the loss before anything is updated: where it computes itself, and where other ranks have
    /// to know.
    pub(crate) fn waits(&self, model: &Model) -> bool {
        model.embeddings.on_device().is_none() || model.embeddings.collectives().size() > 1
    }

    /// Whether the gradients of the tables' vectors are finite numbers, once [`Model::backward`] has found them.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if the device fails.
    pub(crate) fn finite(&self, model: &Model) -> Result<Finite> {
        self.passed.finite(model)
    }
}

/// Whether numbers are finite.
#[derive(Debug)]
pub(crate) enum Finite {
    /// Of those in memory.
    Known(bool),
    /// Of those on a device the sum of their squares, `[1]`, a double, which is finite if they are.
    OnDevice(Tensor),
}

impl Finite {
    /// The value of a loss, and whether the numbers are finite: what the host waits for on a device, once for both.
    pub(crate) fn read(&self, loss: &Tensor) -> (f64, bool) {
        match self {
            Self::Known(finite) => (loss.double_value(&[]), *finite),
            Self::OnDevice(squares) => {
                let loss = loss.detach().to_kind(Kind::Double).view(1);
                let both = Tensor::cat(&[&loss, squares], 0).to_device(Device::Cpu);
                (both.double_value(&[0]), both.double_value(&[1]).is_finite())
            }
        }
    }

    /// The sum of squares.
    pub(crate) fn squares(&self) -> Option<&Tensor> {
        match self {
            Self::Known(_) => None,
            Self::OnDevice(squares) => Some(squares),
        }
    }
}

/// The part of the model below the cross layers and the top MLP, where the tables are: in memory, or on a device.
pub(super) trait Passed: std::fmt::Debug {
    /// What goes into the cross layers or the top MLP, `[B, width]`. Below it is a leaf of autograd's.
    fn input(&self, model: &Model) -> Tensor;

    /// From the gradient of the leaf to those of the parameters below it and of the tables' vectors, which are kept.
    fn backward(&mut self, model: &Model, batch: &Batch) -> Result<()>;

    /// Labels and, if there are any, weights of the samples, `[B, _]` and `[B]`, if they are on the model's device.
    fn labels(&self) -> Option<(&Tensor, Option<&Tensor>)>;

    /// Whether the gradients of the tables' vectors are finite numbers.
    fn finite(&self, model: &Model) -> Result<Finite>;

    /// Begins to send these gradients to the owners of the tables.
    fn send(&mut self, embeddings: &Embeddings) -> Result<()>;

    /// Updates the tables with them; they are sent first, if they were not. A device does so if `permit` is not 0.
    fn update(
        &mut self,
        embeddings: &mut Embeddings,
        optimizer: &TableOptimizerConfig,
        permit: Option<&Tensor>,
    ) -> Result<()>;
}

/// The way through tables in memory.
#[derive(Debug)]
struct HostPath {
    lookups: Lookups,
    bottom: Option<Tensor>,
    sequences: Sequences,
    /// The interaction's leaf.
    interacted: Tensor,
    gradients: Vec<LookupGradients>,
    sent: Option<SentGradients>,
}

/// A batch's input on its way: rows are asked for at their owners, and the batch is copied to the device, if there is
/// one.
#[derive(Debug)]
pub struct Input(Request);

impl Model {
    /// Begins the input of a batch, which [`forward`](Self::forward) ends, and tells all ranks this one's `status`.
    /// Without a batch nothing is asked for. Every rank calls it, once for every batch.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) for an id that its table has no row for,
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails, [`Error::Fault`](crate::Error::Fault) if
    /// the device does.
    pub fn request(&self, batch: Option<&Batch>, status: Status) -> Result<Input> {
        let request = || self.profile.measure(Stage::Lookup, || self.embeddings.request_batch(batch, status));
        guarded(self.device(), request).map(Input)
    }

    /// Waits until `is_ready`, which waits for as long as it is told, finds this rank's next batch. The other ranks
    /// hear meanwhile that this one reads, so that a slow store does not make it a lost rank. A request follows.
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

    /// As [`request`](Self::request) with the weight of the batch as its status. If there is an error instead of a
    /// batch, the other ranks learn that this one has failed.
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
            let mut failed = self.request(None, Status { flags: Status::FAILED, weight: 0.0 })?;
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
        self.pass(batch, input, None)
    }

    /// The logits of a batch, and its [`loss`](Self::loss), from which [`backward`](Self::backward) goes on.
    ///
    /// # Errors
    ///
    /// As [`request`](Self::request).
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

    /// The gradients of `loss`, a scalar computed from `forward`'s logits: those of the dense part are added to its
    /// parameters', those of the tables' vectors are kept in `forward` for [`update`](Model::update). `top_is_ready` is
    /// called when the gradients of the parameters after the interaction are complete. `batch` is the one that
    /// `forward` was given.
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

    /// Begins to send the gradients that [`backward`](Self::backward) has found to the ranks that own the tables.
    ///
    /// # Errors
    ///
    /// [`Error::RankLost`](crate::Error::RankLost) if another rank fails, [`Error::Fault`](crate::Error::Fault) if
    /// the device does.
    pub fn send_gradients(&self, forward: &mut Forward) -> Result<()> {
        forward.passed.send(&self.embeddings)
    }

    /// Updates the tables with what [`backward`](Self::backward) has found; it is sent first, if it was not.
    ///
    /// # Errors
    ///
    /// As [`send_gradients`](Self::send_gradients).
    pub fn update(&mut self, mut forward: Forward, optimizer: &TableOptimizerConfig) -> Result<()> {
        self.update_if(&mut forward, optimizer, None)
    }

    /// As [`update`](Self::update); tables on a device stay as they are if `permit`, one `int` there, is 0.
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
        let rows = Detached::new(bottom.as_ref(), &sequences);
        let interacted = model.interact(&sources(batch, &lookups.groups, &rows), batch.size());
        Ok(Self { lookups, bottom, sequences, interacted, gradients: Vec::new(), sent: None })
    }

    /// From the gradients of the interaction's sources to those of the tables' vectors.
    fn backward_sources(&self, model: &Model, gradients: Vec<Vec<f32>>) -> Result<Vec<LookupGradients>> {
        let embeddings = model.embeddings.host()?;
        let Self { lookups, bottom, sequences, .. } = self;
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
        let rows = Detached::new(self.bottom.as_ref(), &self.sequences);
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
    // SAFETY: no operation writes the output of another one in place.
    let values = |output: &'a Tensor| unsafe { tensors::as_slice(output) };
    let mut sources = Vec::new();
    if let Some(bottom) = &rows.bottom {
        sources.push(Source { values: values(bottom), vectors: 1, inverse: None });
    }
    let mut sequences = rows.sequences.iter();
    for (group, lookup) in batch.groups().iter().zip(lookups) {
        let inverse = group.inverse().map(|inverse| &inverse[..]);
        if !lookup.pooled_features.is_empty() {
            sources.push(Source { values: &lookup.pooled, vectors: lookup.pooled_features.len(), inverse });
        }
        for (rows, by_sample) in sequences.by_ref().take(lookup.sequences.len()) {
            let inverse = inverse.filter(|_| !by_sample);
            sources.push(Source { values: values(rows), vectors: 1, inverse });
        }
    }
    sources
}
