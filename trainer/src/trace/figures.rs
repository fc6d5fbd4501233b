//! Compares times and bytes of a job's ranks.

use std::time::Duration;

use serde::Serialize;

use super::Kind;
use crate::Result;
use crate::distributed::Collectives;
use crate::embedding::SentBytes;

/// A statistic of a value over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OverRanks {
    /// The mean over the ranks.
    pub mean: f64,
    /// The maximum.
    pub max: f64,
    /// The rank with the maximum; the lowest of several.
    pub max_rank: u32,
}

/// The times of the ranks' steps by kind, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankTimes {
    /// The time of waiting for the reader.
    pub waiting_ms: OverRanks,
    /// The time of waiting for requests, answers and gradients of table rows.
    pub exchange_ms: OverRanks,
    /// The remaining time.
    pub compute_ms: OverRanks,
    /// The time of waiting for the sum of the dense part's gradients, and for the ranks' losses and counts.
    pub all_reduce_ms: OverRanks,
}

/// The average step of a job with several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankFigures {
    /// The times by kind.
    #[serde(flatten)]
    pub times: RankTimes,
    /// The bytes that ranks sent to other ranks, summed over the ranks.
    pub sent_bytes: SentBytes,
}

/// The accumulated times and bytes of a rank's steps.
#[derive(Debug, Clone, Default)]
pub(crate) struct Work {
    pub(super) steps: u64,
    /// The times by kind, in the order of [`Kind::ALL`].
    pub(super) times: [Duration; 4],
    pub(super) sent: SentBytes,
}

impl OverRanks {
    /// Computes the statistic from the ranks' values.
    fn new(of_ranks: impl Iterator<Item = (u32, f64)>) -> Self {
        let (mut sum, mut count, mut max, mut max_rank) = (0.0, 0_u32, f64::NEG_INFINITY, 0);
        for (rank, value) in of_ranks {
            if value > max {
                (max, max_rank) = (value, rank);
            }
            sum += value;
            count += 1;
        }
        Self { mean: sum / f64::from(count), max, max_rank }
    }
}

impl RankTimes {
    /// Computes the statistics from the ranks' milliseconds by kind, in the order of [`Kind::ALL`].
    pub(super) fn new(of_ranks: impl Iterator<Item = (u32, [f64; 4])> + Clone) -> Self {
        let of =
            |kind: Kind| OverRanks::new(of_ranks.clone().map(|(rank, times)| (rank, times[kind as usize])));
        Self {
            waiting_ms: of(Kind::Waiting),
            exchange_ms: of(Kind::Exchange),
            compute_ms: of(Kind::Compute),
            all_reduce_ms: of(Kind::AllReduce),
        }
    }

    /// Returns the names and values, in the order of the fields.
    pub fn named(&self) -> [(&'static str, OverRanks); 4] {
        [
            ("waiting_ms", self.waiting_ms),
            ("exchange_ms", self.exchange_ms),
            ("compute_ms", self.compute_ms),
            ("all_reduce_ms", self.all_reduce_ms),
        ]
    }
}

impl RankFigures {
    /// Returns scalars for TensorBoard, with tags such as `ranks/waiting_ms/mean`.
    pub(crate) fn scalars(&self) -> Vec<(String, f64)> {
        let times = self.times.named().into_iter().flat_map(|(name, OverRanks { mean, max, max_rank })| {
            [("mean", mean), ("max", max), ("max_rank", f64::from(max_rank))]
                .map(|(figure, value)| (format!("ranks/{name}/{figure}"), value))
        });
        let sent = self.sent_bytes.named().into_iter();
        times.chain(sent.map(|(kind, bytes)| (format!("ranks/sent_bytes/{kind}"), bytes as f64))).collect()
    }
}

impl Work {
    /// Adds a step.
    pub(super) fn add(&mut self, times: [Duration; 4], sent: SentBytes) {
        self.steps += 1;
        self.times.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
        self.sent = self.sent + sent;
    }

    /// Returns the milliseconds of all ranks by kind, and the bytes that all ranks sent. Every rank must call
    /// it.
    fn gathered(&self, collectives: &dyn Collectives) -> Result<(Vec<[f64; 4]>, SentBytes)> {
        let times = self.times.map(|time| 1e3 * time.as_secs_f64());
        let sent = self.sent.named().map(|(_, bytes)| bytes as f64);
        let all = collectives.gather(&[times, sent].concat())?;
        let times = all.iter().map(|of_rank| std::array::from_fn(|kind| of_rank[kind])).collect();
        let sum = |kind: usize| all.iter().map(|of_rank| of_rank[4 + kind] as u64).sum();
        Ok((times, SentBytes::from(std::array::from_fn(sum))))
    }

    /// Returns the times over all ranks, or `None` for one rank. Every rank must call it.
    pub(crate) fn totals(&self, collectives: &dyn Collectives) -> Result<Option<RankTimes>> {
        if collectives.size() == 1 {
            return Ok(None);
        }
        Ok(Some(RankTimes::new((0..).zip(self.gathered(collectives)?.0))))
    }

    /// Returns the average step over all ranks, or `None` for one rank. Every rank must call it.
    pub(crate) fn per_step(&self, collectives: &dyn Collectives) -> Result<Option<RankFigures>> {
        if collectives.size() == 1 || self.steps == 0 {
            return Ok(None);
        }
        let (mut times, sent) = self.gathered(collectives)?;
        times.iter_mut().flatten().for_each(|time| *time /= self.steps as f64);
        let sent = sent.named().map(|(_, bytes)| (bytes as f64 / self.steps as f64).round() as u64);
        Ok(Some(RankFigures { times: RankTimes::new((0..).zip(times)), sent_bytes: sent.into() }))
    }
}
