//! The dense part of a step as one graph. For batches of one size, it is always the same work on the same memory.
//!
//! ```text
//! dense features ─▶ bottom MLP ─┐
//! vectors of tables and blocks ─┴▶ interaction, top MLP ─▶ logits ─▶ loss ─▶ backward pass
//! ```
//!
//! The first steps with batches of a size run without a graph, so that libtorch makes its choices and allocations
//! for them. Then a step is recorded as a graph, and all later steps replay the graph.

use std::rc::Rc;

use tch::{Kind, Tensor};

use super::super::{Model, divisor};
use crate::device::{Accelerator, Graph, Staged};
use crate::{Result, shim};

/// The number of steps with a batch size before a graph is recorded.
const BEFORE: u32 = 2;
/// The maximum number of graphs; each has its own memory.
const MOST: usize = 2;
/// The maximum number of batch sizes that are counted.
const MOST_SEEN: usize = 16;

/// The graphs of a model, by key.
#[derive(Debug, Default)]
pub(in super::super) struct Recordings {
    seen: Vec<(Key, u32)>,
    recorded: Vec<(Key, Rc<Recorded>)>,
}

/// The properties that all steps of a graph share: the number of samples, and whether they have weights.
type Key = (i64, bool);

/// The recorded dense part of a step, with fixed memory.
#[derive(Debug)]
pub(super) struct Recorded {
    given: Given,
    found: Found,
    graph: Box<dyn Graph>,
}

/// The inputs of a step.
#[derive(Debug)]
struct Given {
    /// The dense features, `[B, F]`.
    dense: Option<Tensor>,
    /// The vectors without the bottom MLP's output, `[B, N D]`, a leaf.
    vectors: Tensor,
    labels: Tensor,
    weights: Option<Tensor>,
    /// The factor of the loss, `[]`.
    factor: Tensor,
}

/// The results of a step.
#[derive(Debug)]
struct Found {
    logits: Tensor,
    loss: Tensor,
    /// The gradient of the vectors.
    vectors: Tensor,
    /// The parameters and their gradients.
    parameters: Vec<(Tensor, Tensor)>,
}

impl Recordings {
    /// Returns the graph for a batch, or `None` if the step runs without a graph. `width` is the width of the
    /// vectors without the bottom MLP's output.
    pub(super) fn of(
        &mut self,
        model: &Model,
        accelerator: &Accelerator,
        batch: &Staged,
        width: i64,
    ) -> Result<Option<Rc<Recorded>>> {
        let Some(labels) = batch.labels.as_ref().filter(|_| accelerator.records() && batch.size > 0) else {
            return Ok(None);
        };
        let key = (batch.size, batch.weights.is_some());
        if let Some((_, recorded)) = self.recorded.iter().find(|(other, _)| *other == key) {
            return Ok(Some(Rc::clone(recorded)));
        }
        if self.recorded.len() == MOST || self.count(key) <= BEFORE {
            return Ok(None);
        }
        let given = Given {
            dense: batch.dense.as_ref().map(Tensor::copy),
            vectors: accelerator.zeros(&[batch.size, width], Kind::Float)?.set_requires_grad(true),
            labels: labels.copy(),
            weights: batch.weights.as_ref().map(Tensor::copy),
            factor: accelerator.zeros(&[], Kind::Float)?,
        };
        let (graph, found) = accelerator.record(|| given.pass(model))?;
        let recorded = Rc::new(Recorded { given, found, graph });
        self.recorded.push((key, Rc::clone(&recorded)));
        Ok(Some(recorded))
    }

    /// Returns how often the key was requested, including this call.
    fn count(&mut self, key: Key) -> u32 {
        let place = self.seen.iter().position(|(other, _)| *other == key).unwrap_or_else(|| {
            if self.seen.len() == MOST_SEEN {
                self.seen.remove(0);
            }
            self.seen.push((key, 0));
            self.seen.len() - 1
        });
        self.seen[place].1 += 1;
        self.seen[place].1
    }
}

impl Given {
    /// Runs the pass on these tensors; the results are new tensors.
    fn pass(&self, model: &Model) -> Found {
        model.dense_parameters().iter().for_each(|parameter| shim::set_gradient(parameter, None));
        shim::set_gradient(&self.vectors, None);
        let logits = model.logits_of(&model.interacted(self.dense.as_ref(), &self.vectors));
        let loss = model.loss_of(&logits, &self.labels, self.weights.as_ref(), |sum, of_task| {
            sum * of_task * &self.factor
        });
        loss.backward();
        let parameters = model.dense_parameters().into_iter().map(|parameter| {
            let gradient = parameter.grad();
            (parameter, gradient)
        });
        Found {
            parameters: parameters.filter(|(_, gradient)| gradient.defined()).collect(),
            logits: logits.detach(),
            loss: loss.detach(),
            vectors: self.vectors.grad(),
        }
    }
}

impl Recorded {
    /// Returns the tensor to which the vectors of tables and blocks must be written.
    pub(super) fn vectors(&self) -> Tensor {
        self.given.vectors.detach()
    }

    /// Enqueues the pass for a batch whose vectors have been written, with a loss that is divided by `weight`. Then
    /// sets the gradients of the parameters.
    pub(super) fn enqueue(
        &self,
        model: &Model,
        accelerator: &Accelerator,
        batch: &Staged,
        weight: f64,
    ) -> Result<()> {
        let Self { given, found, graph } = self;
        tch::no_grad(|| {
            let _ = given.factor.shallow_clone().fill_(1.0 / divisor(weight));
            let tensors = [
                (given.dense.as_ref(), batch.dense.as_ref()),
                (Some(&given.labels), batch.labels.as_ref()),
                (given.weights.as_ref(), batch.weights.as_ref()),
            ];
            for (place, own) in tensors {
                place.zip(own).into_iter().for_each(|(place, own)| place.shallow_clone().copy_(own));
            }
        });
        accelerator.replay(&**graph, || found.overwrite(&given.pass(model)))?;
        found.parameters.iter().for_each(|(parameter, own)| shim::set_gradient(parameter, Some(own)));
        Ok(())
    }

    pub(super) fn logits(&self) -> Tensor {
        self.found.logits.shallow_clone()
    }

    pub(super) fn loss(&self) -> Tensor {
        self.found.loss.shallow_clone()
    }

    /// Returns the gradient of [`vectors`](Self::vectors).
    pub(super) fn gradient(&self) -> Tensor {
        self.found.vectors.shallow_clone()
    }
}

impl Found {
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let gradients = self.parameters.iter().map(|(_, gradient)| gradient);
        [&self.logits, &self.loss, &self.vectors].into_iter().chain(gradients)
    }

    /// Copies the results of another pass to these tensors.
    fn overwrite(&self, other: &Self) {
        self.tensors().zip(other.tensors()).for_each(|(place, own)| place.shallow_clone().copy_(own));
    }
}
