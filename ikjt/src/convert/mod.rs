//! Batches as other systems hold them.

mod arrow;

pub use arrow::GROUP_KEY;
