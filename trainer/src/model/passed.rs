//! The part of a step that is in the memory of the tables.

use onefold_ikjt::Batch;
use tch::{Device, Kind, Tensor};

use super::Model;
use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::embedding::Embeddings;

/// The result of a check whether numbers are finite.
#[derive(Debug)]
pub(crate) enum Finite {
    /// The result for numbers in host memory.
    Known(bool),
    /// The sum of squares of numbers on a device, `[1]`, a double, which is finite if and only if the numbers are.
    OnDevice(Tensor),
}

impl Finite {
    /// Returns the value of a loss, and whether the numbers are finite. Waits for a device only once for both.
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

    /// Returns the sum of squares of numbers on a device.
    pub(crate) fn squares(&self) -> Option<&Tensor> {
        match self {
            Self::Known(_) => None,
            Self::OnDevice(squares) => Some(squares),
        }
    }
}

/// The part of the model below the cross layers and the top MLP, which is in the memory of the tables (host or
/// device).
pub(super) trait Passed: std::fmt::Debug {
    /// Returns the input of the cross layers or of the top MLP, `[B, width]`. Below it is a leaf of autograd.
    fn input(&self, model: &Model) -> Tensor;

    /// Computes the gradients of the parameters below the leaf and of the tables' vectors, given the gradient of
    /// the leaf, and keeps them.
    fn backward(&mut self, model: &Model, batch: &Batch) -> Result<()>;

    /// Returns the labels, `[B, _]`, and the optional weights, `[B]`, of the samples if they are on the model's
    /// device.
    fn labels(&self) -> Option<(&Tensor, Option<&Tensor>)>;

    /// Returns whether the gradients of the tables' vectors are finite.
    fn finite(&self, model: &Model) -> Result<Finite>;

    /// Starts sending these gradients to the owners of the tables.
    fn send(&mut self, embeddings: &Embeddings) -> Result<()>;

    /// Updates the tables with these gradients, and sends them first if they were not sent. If `permit` is 0 on a
    /// device, nothing changes.
    fn update(
        &mut self,
        embeddings: &mut Embeddings,
        optimizer: &TableOptimizerConfig,
        permit: Option<&Tensor>,
    ) -> Result<()>;
}
