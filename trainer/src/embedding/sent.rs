//! Bytes that ranks send to each other.

use serde::{Deserialize, Serialize};

/// Bytes that a rank sent to others, by what they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentBytes {
    /// Table rows of distinct rows' ids.
    pub requests: u64,
    /// Pooled rows, and the vectors of sequences' elements.
    pub answers: u64,
    /// The gradients of both.
    pub gradients: u64,
    /// The gradients of the dense part, which are no embeddings': `2 (W - 1) / W` times their bytes in each
    /// step on W ranks, what a rank sends in an all-reduce on a ring (Patarasuk and Yuan 2009).
    pub dense: u64,
}

impl SentBytes {
    /// By name.
    pub fn named(&self) -> [(&'static str, u64); 4] {
        let Self { requests, answers, gradients, dense } = *self;
        [("requests", requests), ("answers", answers), ("gradients", gradients), ("dense", dense)]
    }
}

/// In the order of [`SentBytes::named`].
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

/// What was sent since an earlier count.
impl std::ops::Sub for SentBytes {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let (own, others) = (self.named(), earlier.named());
        std::array::from_fn(|kind| own[kind].1 - others[kind].1).into()
    }
}
