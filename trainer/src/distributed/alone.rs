//! The collectives of a job of one rank.

use tch::{Device, Tensor};

use super::{Collectives, Operation, Pending};
use crate::Result;

/// The collectives of a job of one rank, which receives the data that it sends. Tensors may be on any device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Collectives for Alone {
    fn rank(&self) -> u32 {
        0
    }

    fn size(&self) -> u32 {
        1
    }

    fn device_of(&self, device: Device) -> Device {
        device
    }

    fn start(&self, operation: Operation) -> Result<Pending> {
        let copy = |mut to: Tensor, from: &Tensor| tch::no_grad(|| to.f_copy_(from));
        match operation {
            Operation::AllToAll { received, sent, .. } => copy(received, &sent)?,
            Operation::AllGather { gathered, tensor } => copy(gathered, &tensor)?,
            Operation::AllReduce { .. } | Operation::Barrier => {}
        }
        Ok(Pending::done())
    }
}
