//! Checks the results of collective operations on the ranks' devices.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

use super::Collectives;
use crate::{Error, Result};

/// The number of operations of each kind.
const ROUNDS: usize = 20;

/// Runs every operation on tensors on `device` with random numbers from `seed`, several operations
/// concurrently, and compares the results with locally computed ones. Every rank must call it.
///
/// # Errors
///
/// [`Error::Collective`] for a wrong result; the errors of the operations.
pub fn check_collectives(ranks: &dyn Collectives, device: Device, seed: u64) -> Result<()> {
    // All ranks draw the same numbers.
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for round in 0..ROUNDS {
        let kind = [Kind::Float, Kind::Half, Kind::BFloat16, Kind::Int][round % 4];
        let own = ranks.rank() as usize;
        let length = random.random_range(0..3000);
        let of_ranks: Vec<Vec<i64>> = (0..ranks.size()).map(|_| draw(&mut random, length)).collect();
        let tensor = |values: &[i64]| Tensor::from_slice(values).to_kind(kind).to_device(device);
        let sum = tensor(&of_ranks[own]);
        let gathered = tensor(&vec![0; length * of_ranks.len()]);
        let exchange = Exchange::draw(&mut random, &of_ranks, own);
        let (sent, received) = (tensor(&exchange.sent), tensor(&vec![0; exchange.received.len()]));
        let [sent_splits, received_splits] = &exchange.splits;
        let pending = [
            ranks.all_to_all(&received, received_splits, &sent, sent_splits)?,
            ranks.all_reduce(&sum)?,
            ranks.all_gather(&gathered, &tensor(&of_ranks[own]))?,
        ];
        pending.into_iter().try_for_each(super::Pending::wait)?;
        let sums: Vec<i64> =
            (0..length).map(|i| of_ranks.iter().map(|values| values[i]).sum::<i64>()).collect();
        compare("all_to_all", &received, &exchange.received)?;
        compare("all_reduce", &sum, &sums)?;
        compare("all_gather", &gathered, &of_ranks.concat())?;
    }
    ranks.barrier()
}

/// Draws small numbers, whose sums all types represent exactly.
fn draw(random: &mut ChaCha8Rng, length: usize) -> Vec<i64> {
    (0..length).map(|_| random.random_range(0..8)).collect()
}

/// The parts of the ranks' numbers that this rank sends and receives.
struct Exchange {
    sent: Vec<i64>,
    received: Vec<i64>,
    /// The splits of the sent and of the received numbers.
    splits: [Vec<i64>; 2],
}

impl Exchange {
    fn draw(random: &mut ChaCha8Rng, of_ranks: &[Vec<i64>], own: usize) -> Self {
        let mut exchange = Self { sent: Vec::new(), received: Vec::new(), splits: [Vec::new(), Vec::new()] };
        for (from, values) in of_ranks.iter().enumerate() {
            for to in 0..of_ranks.len() {
                let part = &values[..random.random_range(0..=values.len())];
                if from == own {
                    exchange.sent.extend(part);
                    exchange.splits[0].push(part.len() as i64);
                }
                if to == own {
                    exchange.received.extend(part);
                    exchange.splits[1].push(part.len() as i64);
                }
            }
        }
        exchange
    }
}

fn compare(operation: &'static str, found: &Tensor, expected: &[i64]) -> Result<()> {
    let found = Vec::<i64>::try_from(found.to_device(Device::Cpu).to_kind(Kind::Int64).view([-1]))?;
    if found == expected {
        return Ok(());
    }
    let place = found.iter().zip(expected).position(|(found, expected)| found != expected).unwrap_or(0);
    let message = format!("element {place} of {} is {}, not {}", found.len(), found[place], expected[place]);
    Err(Error::collective(operation, message))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::threads;
    use super::*;

    #[test]
    fn ranks_that_work_pass() {
        let ranks = threads(3, Duration::from_secs(300));
        std::thread::scope(|scope| {
            let check = |rank| move || check_collectives(&rank, Device::Cpu, 5);
            let checks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(check(rank))).collect();
            checks.into_iter().for_each(|check| check.join().unwrap().unwrap());
        });
    }

    #[test]
    fn a_wrong_result_is_named() {
        let error = compare("all_gather", &Tensor::from_slice(&[1_i64, 2, 3]), &[1, 5, 3]).unwrap_err();
        assert!(error.to_string().contains("element 1 of 3 is 2, not 5"), "{error}");
    }
}
