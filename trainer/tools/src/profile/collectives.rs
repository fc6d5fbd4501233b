//! Measures the exchange between ranks, as training data for the forward and backward models of a learned cost
//! model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use onefold_base::fault::{Fault, Kind as FaultKind};
use onefold_base::progress::Reporter;
use onefold_sharding::{Direction, ExchangeRank, ExchangeSample};
use onefold_trainer::Result;
use onefold_trainer::distributed::Collectives;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use super::median;

/// The options of a measurement.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExchangeOptions {
    /// The number of exchanges.
    pub(crate) exchanges: usize,
    /// The maximum bytes per rank, on average, in one exchange.
    pub(crate) most_bytes: u64,
    /// The seed of the random exchanges.
    pub(crate) seed: u64,
}

/// The minimum bytes per rank, on average.
const LEAST_BYTES: f64 = 4096.0;
/// The maximum delay of a rank's start after the first rank, in milliseconds.
const LATEST_MS: f64 = 20.0;
/// The number of measurements of each exchange, after one warm-up; the median counts. Short exchanges have
/// random delays.
const REPEATS: usize = 9;
/// The average number of bytes above which an exchange is measured less often.
const LONG_BYTES: f64 = 4e6;
const LONG_REPEATS: usize = 3;
/// The number of words in the header of a request, per rank.
const HEADER: i64 = 3;

/// Measures exchanges between the ranks of `collectives`. Every rank must call it, and all get the same
/// samples.
///
/// * A forward exchange is the one before a step's vectors are available: a header, requests to the ranks that
///   own tables, and their answers. The bytes of a rank are the requests that it receives and the answers that
///   it sends as an owner.
/// * A backward exchange is an all-to-all of gradients to the owners. The bytes of a rank are the gradients
///   that it receives.
/// * A gather, one exchange in five, sends every rank's part of the summed gradients of data-parallel tables to
///   all ranks. Together with a preceding backward exchange it is an all-reduce. Its bytes are equal on all
///   ranks.
///
/// The average bytes per rank are from 4 KiB to `most_bytes`. They are equal on all ranks in one of four
/// exchanges; in the others, up to all bytes belong to one rank. In half of the exchanges, ranks start up to 20
/// ms after each other, as after unequal work. The time of a rank is from its start to its end.
pub(crate) fn profile_collectives(
    options: &ExchangeOptions,
    collectives: &Arc<dyn Collectives>,
    reporter: &dyn Reporter,
) -> Result<Vec<ExchangeSample>> {
    if collectives.size() == 1 {
        let hint = "start several: `onefold-train-tools launch --ranks 4 -- profile --collectives …`, or with `torchrun`";
        let message = "there is one rank, which exchanges nothing";
        return Err(Fault::new(FaultKind::Failed, message).hint(hint).into());
    }
    reporter.begin("Measuring exchanges", Some(options.exchanges as u64), "exchanges");
    let mut samples = Vec::with_capacity(options.exchanges);
    for number in 0..options.exchanges {
        // All ranks draw the same exchange.
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(number as u64);
        let drawn = Drawn::draw(&mut rng, options, collectives.size() as usize, number);
        samples.push(drawn.measure(collectives)?);
        reporter.advance(1);
    }
    reporter.end();
    Ok(samples)
}

/// An exchange to be measured.
#[derive(Debug)]
struct Drawn {
    direction: Direction,
    /// The bytes by rank: requests that it receives, and vectors that it sends (or whose gradients it
    /// receives).
    bytes: Vec<[f64; 2]>,
    starts_ms: Vec<f64>,
}

impl Drawn {
    fn draw(rng: &mut ChaCha8Rng, options: &ExchangeOptions, ranks: usize, number: usize) -> Self {
        let most = (options.most_bytes as f64).max(LEAST_BYTES);
        let mean = LEAST_BYTES * (most / LEAST_BYTES).powf(rng.random::<f64>());
        let direction = match rng.random_range(0..5) {
            0 => Direction::Gather,
            1 | 2 => Direction::Forward,
            _ => Direction::Backward,
        };
        // Powers of exponential variates: the higher the power, the larger the share of a single rank.
        let is_even = direction == Direction::Gather || number.is_multiple_of(4);
        let power = if is_even { 0.0 } else { rng.random_range(0.2..3.0) };
        let shares: Vec<f64> =
            (0..ranks).map(|_| (-rng.random::<f64>().max(1e-9).ln()).powf(power)).collect();
        let sum: f64 = shares.iter().sum();
        let latest = if rng.random_bool(0.5) { 0.0 } else { LATEST_MS * rng.random::<f64>().powi(2) };
        let mut of_rank = |share: &f64| {
            let bytes = mean * ranks as f64 * share / sum;
            let requests = match direction {
                Direction::Forward => bytes * rng.random_range(0.02..0.5),
                Direction::Backward | Direction::Gather => 0.0,
            };
            [requests, bytes - requests]
        };
        let bytes = shares.iter().map(&mut of_rank).collect();
        Self { direction, bytes, starts_ms: (0..ranks).map(|_| latest * rng.random::<f64>()).collect() }
    }

    fn measure(&self, collectives: &Arc<dyn Collectives>) -> Result<ExchangeSample> {
        let rank = collectives.rank() as usize;
        let bytes: f64 = self.bytes.iter().flatten().sum();
        let repeats = if bytes > LONG_BYTES * self.bytes.len() as f64 { LONG_REPEATS } else { REPEATS };
        let mut times = Vec::with_capacity(repeats);
        for repeat in 0..=repeats {
            let messages = self.messages(rank);
            collectives.barrier()?;
            std::thread::sleep(Duration::from_secs_f64(self.starts_ms[rank] / 1e3));
            let started = Instant::now();
            for message in &messages {
                message.send(collectives)?;
            }
            if repeat > 0 {
                times.push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
        let all = collectives.gather(&[median(times)])?;
        let first = self.starts_ms.iter().copied().fold(f64::INFINITY, f64::min);
        let of_rank = |((ms, bytes), start): ((&Vec<f64>, &[f64; 2]), &f64)| ExchangeRank {
            bytes: bytes.iter().sum(),
            start_ms: start - first,
            ms: ms[0],
        };
        let ranks = all.iter().zip(&self.bytes).zip(&self.starts_ms).map(of_rank).collect();
        Ok(ExchangeSample { direction: self.direction, ranks })
    }

    /// Returns the operations of the exchange, in sequence.
    fn messages(&self, rank: usize) -> Vec<Message> {
        let ranks = self.bytes.len();
        let owned = |kind: usize| -> Vec<f64> { self.bytes.iter().map(|bytes| bytes[kind]).collect() };
        match self.direction {
            Direction::Forward => vec![
                Message::even(HEADER, ranks),
                Message::to_owners(&owned(0), rank),
                Message::to_owners(&owned(1), rank).reversed(),
            ],
            Direction::Backward => vec![Message::to_owners(&owned(1), rank)],
            Direction::Gather => vec![Message::to_all(self.bytes[rank][1], ranks)],
        }
    }
}

/// An operation from the point of view of one rank, in words of 4 bytes.
struct Message {
    /// The words to each rank.
    sent: Vec<i64>,
    received: Vec<i64>,
    /// Whether the operation is an all-gather, which sends the same words to all ranks, and not an all-to-all.
    is_gather: bool,
}

impl Message {
    fn even(words: i64, ranks: usize) -> Self {
        Self { sent: vec![words; ranks], received: vec![words; ranks], is_gather: false }
    }

    /// Creates an all-gather: every rank sends `bytes` bytes in total, in equal parts to all other ranks, as on
    /// a ring.
    fn to_all(bytes: f64, ranks: usize) -> Self {
        Self { is_gather: true, ..Self::even((bytes / 4.0 / (ranks - 1) as f64) as i64, ranks) }
    }

    /// Creates an all-to-all in which each owner receives its bytes in equal parts from the other ranks.
    fn to_owners(bytes: &[f64], rank: usize) -> Self {
        let others = (bytes.len() - 1) as f64;
        let words = |owner: usize| (bytes[owner] / 4.0 / others) as i64;
        let but_own = |other: usize, words: i64| if other == rank { 0 } else { words };
        Self {
            sent: (0..bytes.len()).map(|owner| but_own(owner, words(owner))).collect(),
            received: (0..bytes.len()).map(|other| but_own(other, words(rank))).collect(),
            is_gather: false,
        }
    }

    /// Returns the operation in the opposite direction: from the owners.
    fn reversed(self) -> Self {
        Self { sent: self.received, received: self.sent, ..self }
    }

    fn send(&self, collectives: &Arc<dyn Collectives>) -> Result<()> {
        let words =
            |splits: &[i64]| Tensor::f_zeros([splits.iter().sum::<i64>()], (Kind::Float, Device::Cpu));
        let received = words(&self.received)?;
        if self.is_gather {
            return collectives.all_gather(&received, &words(&self.sent[..1])?)?.wait();
        }
        let sent = words(&self.sent)?;
        collectives.all_to_all(&received, &self.received, &sent, &self.sent)?.wait()
    }
}

#[cfg(test)]
mod tests {
    use onefold_base::progress::Silent;

    use super::*;
    use crate::profile::on_threads;

    const OPTIONS: ExchangeOptions = ExchangeOptions { exchanges: 40, most_bytes: 1 << 16, seed: 4 };

    #[test]
    fn every_rank_sees_the_same_exchanges() {
        let of_ranks = on_threads(3, |ranks| profile_collectives(&OPTIONS, &ranks, &Silent)).unwrap();
        assert!(of_ranks.iter().all(|samples| *samples == of_ranks[0]));
        let samples = &of_ranks[0];
        assert_eq!(samples.len(), 40);
        let (mut directions, mut late, mut uneven) = ([0; Direction::ALL.len()], 0, 0);
        for sample in samples {
            let place = Direction::ALL.iter().position(|direction| *direction == sample.direction);
            directions[place.unwrap()] += 1;
            let bytes: Vec<f64> = sample.ranks.iter().map(|rank| rank.bytes).collect();
            let mean = bytes.iter().sum::<f64>() / 3.0;
            assert!((LEAST_BYTES * 0.999..=65_536.1).contains(&mean), "{mean}");
            let is_uneven = bytes.iter().any(|bytes| *bytes > 1.5 * mean);
            assert!(!(is_uneven && sample.direction == Direction::Gather), "{sample:?}");
            uneven += usize::from(is_uneven);
            late += usize::from(sample.ranks.iter().any(|rank| rank.start_ms > 0.0));
            assert!(sample.ranks.iter().all(|rank| rank.ms > 0.0 && rank.start_ms >= 0.0), "{sample:?}");
        }
        assert!(directions.iter().all(|count| *count > 4) && late > 8 && uneven > 8, "{directions:?}");
    }

    /// The words that one rank sends to another equal the words that the other one receives.
    #[test]
    fn ranks_agree_on_what_they_exchange() {
        for seed in 0..20 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let drawn = Drawn::draw(&mut rng, &OPTIONS, 4, seed as usize);
            let messages: Vec<Vec<Message>> = (0..4).map(|rank| drawn.messages(rank)).collect();
            for number in 0..messages[0].len() {
                for (a, of_a) in messages.iter().enumerate() {
                    for (b, of_b) in messages.iter().enumerate() {
                        assert_eq!(of_a[number].sent[b], of_b[number].received[a]);
                    }
                }
            }
        }
    }

    #[test]
    fn one_rank_is_refused() {
        let error = on_threads(1, |ranks| profile_collectives(&OPTIONS, &ranks, &Silent)).unwrap_err();
        assert!(error.to_string().contains("there is one rank, which exchanges nothing"), "{error}");
    }
}
