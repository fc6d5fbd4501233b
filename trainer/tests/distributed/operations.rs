//! Tests operations on random arguments against references without an exchange: every rank can draw the data of
//! all ranks.

use std::time::Duration;

use onefold_trainer::distributed::{Alone, Collectives, Pending, threads};
use onefold_trainer::{Error, Result};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 7] =
    [Kind::Uint8, Kind::Int, Kind::Int64, Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// A pending operation, with the tensor of its result and the expected values.
struct Started {
    pending: Pending,
    result: Tensor,
    expected: Vec<i64>,
}

/// Draws small integers, whose sums over ranks all types represent exactly.
fn draw(random: &mut ChaCha8Rng, length: usize) -> Vec<i64> {
    (0..length).map(|_| random.random_range(0..16)).collect()
}

fn tensor(values: &[i64], kind: Kind) -> Tensor {
    Tensor::from_slice(values).to_kind(kind)
}

fn zeros(length: usize, kind: Kind) -> Tensor {
    Tensor::zeros([length as i64], (kind, Device::Cpu))
}

fn values(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor.to_kind(Kind::Int64).view([-1])).unwrap()
}

/// Starts an operation; all ranks draw the same one from `random`.
fn start(ranks: &dyn Collectives, random: &mut ChaCha8Rng) -> Result<Started> {
    let (size, own) = (ranks.size() as usize, ranks.rank() as usize);
    let kind = KINDS[random.random_range(0..KINDS.len())];
    let length = random.random_range(0..40);
    let operation = random.random_range(0..3);
    if operation == 0 {
        return all_to_all(ranks, random, kind);
    }
    let of_ranks: Vec<Vec<i64>> = (0..size).map(|_| draw(random, length)).collect();
    let sent = tensor(&of_ranks[own], kind);
    let (pending, result, expected) = if operation == 1 {
        let sum = |index: usize| of_ranks.iter().map(|values| values[index]).sum::<i64>();
        (ranks.all_reduce(&sent)?, sent, (0..length).map(sum).collect())
    } else {
        let gathered = zeros(size * length, kind);
        (ranks.all_gather(&gathered, &sent)?, gathered, of_ranks.concat())
    };
    Ok(Started { pending, result, expected })
}

fn all_to_all(ranks: &dyn Collectives, random: &mut ChaCha8Rng, kind: Kind) -> Result<Started> {
    let (size, own) = (ranks.size() as usize, ranks.rank() as usize);
    let width = random.random_range(1..4);
    let mut split = || if random.random_bool(0.3) { 0 } else { random.random_range(0..9) };
    let rows: Vec<Vec<usize>> = (0..size).map(|_| (0..size).map(|_| split()).collect()).collect();
    // The data that rank `from` sends to rank `to`, as `data[from][to]`.
    let data: Vec<Vec<Vec<i64>>> =
        rows.iter().map(|rows| rows.iter().map(|rows| draw(random, rows * width)).collect()).collect();
    let splits = |rows: &mut dyn Iterator<Item = usize>| rows.map(|rows| rows as i64).collect::<Vec<_>>();
    let sent_splits = splits(&mut rows[own].iter().copied());
    let received_splits = splits(&mut rows.iter().map(|rows| rows[own]));
    let shape = |splits: &[i64]| match width {
        1 => vec![splits.iter().sum()],
        _ => vec![splits.iter().sum(), width as i64],
    };
    let sent = tensor(&data[own].concat(), kind).view(shape(&sent_splits).as_slice());
    let expected: Vec<i64> = data.iter().flat_map(|to| to[own].clone()).collect();
    let received = zeros(expected.len(), kind).view(shape(&received_splits).as_slice());
    let pending = ranks.all_to_all(&received, &received_splits, &sent, &sent_splits)?;
    // The operation must keep the sent tensor alive.
    drop(sent);
    Ok(Started { pending, result: received, expected })
}

/// Runs `count` operations, up to four at a time, and compares each with its reference.
pub(crate) fn check_operations(ranks: &dyn Collectives, seed: u64, count: usize) -> Result<()> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    // Each rank waits in a different order.
    let mut order = ChaCha8Rng::seed_from_u64(seed ^ u64::from(ranks.rank() + 1));
    let mut under_way: Vec<Started> = Vec::new();
    for _ in 0..count {
        under_way.push(start(ranks, &mut random)?);
        while under_way.len() > 3 || (!under_way.is_empty() && order.random_bool(0.4)) {
            finish(under_way.swap_remove(order.random_range(0..under_way.len())))?;
        }
    }
    under_way.into_iter().try_for_each(finish)?;
    ranks.barrier()?;

    let message = |rank: u32| vec![rank as u8 + 1; 3 * rank as usize];
    let gathered = ranks.gather_bytes(&message(ranks.rank()))?;
    assert_eq!(gathered, (0..ranks.size()).map(message).collect::<Vec<_>>());
    check_bits(ranks, &mut random)
}

fn finish(started: Started) -> Result<()> {
    let Started { pending, result, expected } = started;
    pending.wait()?;
    assert_eq!(values(&result), expected, "{:?}", result.kind());
    Ok(())
}

/// Sums of floats, which depend on the order, are bit-identical on all ranks, and close to the sum in float64.
fn check_bits(ranks: &dyn Collectives, random: &mut ChaCha8Rng) -> Result<()> {
    let size = ranks.size() as usize;
    let length = 1000;
    let mut draw =
        || -> Vec<f32> { (0..length).map(|_| 2.0_f32.powi(random.random_range(-9..9)) / 3.0).collect() };
    let of_ranks: Vec<Vec<f32>> = (0..size).map(|_| draw()).collect();
    let sum = Tensor::from_slice(&of_ranks[ranks.rank() as usize]);
    ranks.all_reduce(&sum)?.wait()?;
    let sums: Vec<f32> = Vec::try_from(&sum).unwrap();
    for (index, sum) in sums.iter().enumerate() {
        let expected: f64 = of_ranks.iter().map(|values| f64::from(values[index])).sum();
        assert!((f64::from(*sum) - expected).abs() <= 1e-6 * expected, "{sum} {expected}");
    }
    let bits: Vec<u8> = sums.iter().flat_map(|sum| sum.to_bits().to_le_bytes()).collect();
    let gathered = ranks.gather_bytes(&bits)?;
    assert!(gathered.iter().all(|other| *other == bits), "the ranks have different sums");
    Ok(())
}

/// Runs `work` on a thread per rank; returns the results.
fn on_threads<T: Send>(
    size: u32,
    timeout: Duration,
    work: impl Fn(Box<dyn Collectives>) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |rank| scope.spawn(move || work(Box::new(rank)));
        let started: Vec<_> = threads(size, timeout).into_iter().map(start).collect();
        started.into_iter().map(|thread| thread.join()).collect()
    })
}

const LONG: Duration = Duration::from_secs(300);

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..onefold_property::cases(40) })]

    #[test]
    fn operations_of_threads_equal_their_references(size in 1..5_u32, seed in any::<u64>()) {
        for result in on_threads(size, LONG, |ranks| check_operations(&*ranks, seed, 30)) {
            result.unwrap().unwrap();
        }
    }

    #[test]
    fn operations_of_one_rank_equal_their_references(seed in any::<u64>()) {
        check_operations(&Alone, seed, 30).unwrap();
    }
}

/// Returns the text of an error, for the rank that must fail.
fn error<T>(result: std::thread::Result<Result<T>>) -> String {
    match result.unwrap() {
        Ok(_) => panic!("an error was expected"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_thread_that_panics_or_ends_is_named() {
    for (panics, expected) in [(true, "its thread panicked"), (false, "its thread has ended")] {
        let mut results = on_threads(3, LONG, |ranks| {
            ranks.set_step(u64::from(ranks.rank()) + 5);
            if ranks.rank() == 1 {
                assert!(!panics, "a panic that the test wants");
                return Ok(());
            }
            ranks.barrier()
        });
        assert_eq!(results.remove(1).is_err(), panics);
        for result in results {
            let text = error(result);
            assert!(text.starts_with(&format!("rank 1 was lost at step 6: {expected}")), "{text}");
        }
    }
}

#[test]
fn a_thread_that_does_not_come_is_named() {
    let noticed = std::sync::Barrier::new(2);
    let results = on_threads(2, Duration::from_millis(200), |ranks| {
        let ended = if ranks.rank() == 0 { ranks.barrier() } else { Ok(()) };
        noticed.wait();
        ended
    });
    let text = error(results.into_iter().next().unwrap());
    let expected = "rank 1 was lost at step 0: it did not come to `barrier` within 200ms";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn different_operations_of_ranks_are_an_error() {
    let results = on_threads(2, LONG, |ranks| match ranks.rank() {
        0 => ranks.barrier(),
        _ => ranks.all_reduce(&zeros(3, Kind::Float))?.wait(),
    });
    for text in results.into_iter().map(error) {
        assert!(
            text.contains("rank 1 called `all_reduce` of Float [3], and rank 0 called `barrier`"),
            "{text}"
        );
    }
}

#[test]
fn an_error_of_one_thread_is_that_of_all() {
    let results = on_threads(3, LONG, |ranks| {
        if ranks.rank() == 2 {
            ranks.set_step(17);
            ranks.abort("the loss is NaN");
            return Err(Error::collective("barrier", "not called"));
        }
        ranks.barrier()
    });
    let texts: Vec<_> = results.into_iter().map(error).collect();
    assert_eq!(texts[..2], ["rank 2 ended at step 17: the loss is NaN"; 2]);
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let results = on_threads(2, LONG, |ranks| {
        let [four, two] = [4, 2].map(|length| zeros(length, Kind::Float));
        let refused = |result: Result<Pending>| result.unwrap_err().to_string();
        assert!(refused(ranks.all_to_all(&four, &[2, 2], &four, &[2, 1])).contains("its splits are [2, 1]"));
        assert!(refused(ranks.all_to_all(&four, &[5, -1], &four, &[2, 2])).contains("`received`"));
        assert!(refused(ranks.all_to_all(&four, &[2, 2], &zeros(4, Kind::Int), &[2, 2])).contains("Int"));
        assert!(refused(ranks.all_gather(&two, &two)).contains("`gathered` of 2 ranks"));
        let transposed = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).transpose(0, 1);
        assert!(refused(ranks.all_reduce(&transposed)).contains("not contiguous"));
        // No operation was started, so the ranks are still synchronized.
        ranks.barrier()
    });
    results.into_iter().for_each(|result| result.unwrap().unwrap());

    // The number of elements that a rank sends must equal the number that the other rank expects.
    let results = on_threads(2, LONG, |ranks| {
        let [sent, received] = [3, 4].map(|length| zeros(length, Kind::Float));
        let (to, from) = ([1, 2], [2, 2]);
        ranks.all_to_all(&received, &from, &sent, &to)?.wait()
    });
    let first = error(results.into_iter().next().unwrap());
    assert!(first.contains("rank 0 sends 1 elements to rank 0, which expects 2"), "{first}");
}
