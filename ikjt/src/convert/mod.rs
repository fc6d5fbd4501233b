//! Batches as other systems hold them.

mod arrow;
mod kjt;
mod layout;

pub use arrow::GROUP_KEY;
pub use kjt::{KeyedJaggedTensor, KjtParts};
