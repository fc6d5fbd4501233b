//! Batches as other systems hold them.

mod arrow;
mod kjt;

pub use arrow::GROUP_KEY;
pub use kjt::KeyedJaggedTensor;
