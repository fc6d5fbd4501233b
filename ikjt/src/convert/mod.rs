//! Batches as other systems hold them.

mod arrow;
mod kjt;

pub use arrow::{GROUP_KEY, KEPT_KEY};
pub(crate) use arrow::{WEIGHTS, WEIGHTS_SUFFIX};
pub use kjt::KeyedJaggedTensor;
