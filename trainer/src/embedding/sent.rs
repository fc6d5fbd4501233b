//! The bytes that ranks send to each other.

use serde::{Deserialize, Serialize};

/// The bytes that a rank sent to other ranks, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentBytes {
    /// Requests: the table rows of the ids of distinct rows.
    pub requests: u64,
    /// Answers: pooled rows, and the vectors of sequences' elements.
    pub answers: u64,
    /// The gradients of the answers.
    pub gradients: u64,
    /// The gradients of the dense part: `2 (W - 1) / W` times their size per step on W ranks, the bytes that a rank
    /// sends in a ring all-reduce (Patarasuk and Yuan 2009).
    pub dense: u64,
}

impl SentBytes {
    /// Returns the bytes with the names of their kinds.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        let Self { requests, answers, gradients, dense } = *self;
        [("requests", requests), ("answers", answers), ("gradients", gradients), ("dense", dense)]
    }
}

/// Creates the counts from an array in the order of [`SentBytes::named`].
impl From<[u64; 4]> for SentBytes {
    fn from([requests, answers, gradients, dense]: [u64; 4]) -> Self {
        Self { requests, answers, gradients, dense }
    }
}

impl std::ops::Add for SentBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (own, others) = (self.named(), other.named());
        std::array::from_fn(|kind| own[kind].1 + others[kind].1).into()
    }
}

/// Subtracts an earlier count.
impl std::ops::Sub for SentBytes {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let (own, others) = (self.named(), earlier.named());
        std::array::from_fn(|kind| own[kind].1 - others[kind].1).into()
    }
}
