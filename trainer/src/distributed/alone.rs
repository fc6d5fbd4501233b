//! The collectives of a job of one rank.

use tch::Tensor;

use super::{
    Collectives, Pending, Reduce, check_all_gather, check_all_to_all, check_broadcast, check_tensor, flat,
};
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

    fn all_to_all(
        &self,
        received: &Tensor,
        received_splits: &[i64],
        sent: &Tensor,
        sent_splits: &[i64],
    ) -> Result<Pending> {
        check_all_to_all((1, sent.device()), (received, received_splits), (sent, sent_splits))?;
        tch::no_grad(|| flat(received)?.f_copy_(&flat(sent)?).map_err(crate::Error::from))?;
        Ok(Pending::done())
    }

    fn all_reduce(&self, tensor: &Tensor, _operation: Reduce) -> Result<Pending> {
        check_tensor("all_reduce", "tensor", tensor, tensor.device())?;
        Ok(Pending::done())
    }

    fn all_gather(&self, gathered: &Tensor, tensor: &Tensor) -> Result<Pending> {
        check_all_gather((1, tensor.device()), gathered, tensor)?;
        tch::no_grad(|| flat(gathered)?.f_copy_(&flat(tensor)?).map_err(crate::Error::from))?;
        Ok(Pending::done())
    }

    fn broadcast(&self, tensor: &Tensor, root: u32) -> Result<Pending> {
        check_broadcast((1, tensor.device()), tensor, root)?;
        Ok(Pending::done())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}
