//! Operations on batches, groups and features, besides [deduplication](crate::deduplicate).
//!
//! Each operation commutes with [`Batch::expand`](crate::Batch::expand): it processes distinct rows, and the result
//! is the same as if it processed the expanded batch.

mod compact;
mod concat;
mod take;
mod used;

pub(crate) use used::{UsedRows, UsedValues, listed};
