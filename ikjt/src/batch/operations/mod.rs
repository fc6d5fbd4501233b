//! Operations on batches, groups and features, beside [deduplication](crate::deduplicate).
//!
//! An operation means what it does to the expanded batch, and does it to distinct rows: it commutes with
//! [`Batch::expand`](crate::Batch::expand).

mod compact;
mod concat;
mod take;
mod trim;
mod used;

pub(crate) use used::UsedValues;
