//! The peak speed of the arithmetic units, to which the speed of products is compared.

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;

use super::Arithmetic;
use crate::simd::{Kernel, Lanes, run};

/// The number of independent sums, about as many as a tile has.
const SUMS: usize = 24;
/// The number of steps per measurement: about a millisecond.
const STEPS: usize = 200_000;

struct Multiplied<const PAIRS: bool>;

impl<const PAIRS: bool> Kernel for Multiplied<PAIRS> {
    /// The number of operations; a multiply-add is two.
    type Output = f64;
    const WIDE: bool = true;
    const PAIRS: bool = PAIRS;

    #[inline(always)]
    fn run<L: Lanes<N>, const N: usize>(self) -> f64 {
        let mut sums = [L::splat(0.0); SUMS];
        let (a, b) = (L::splat(black_box(0.5)), L::splat(black_box(0.25)));
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = if PAIRS { sum.add_products_of_pairs(a, b) } else { sum.fma(a, b) };
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += sum.sum();
        }
        black_box(total);
        let of_a_lane = if PAIRS { 4 } else { 2 };
        (STEPS * SUMS * N * of_a_lane) as f64
    }
}

/// Measures the operations per second of all threads together without memory accesses; a multiply-add is two
/// operations. Returns the best of ten tries.
pub fn peak(arithmetic: Arithmetic, threads: &rayon::ThreadPool) -> f64 {
    let once = || {
        let count = threads.current_num_threads();
        let started = Instant::now();
        let done: Vec<f64> = threads.install(|| {
            let all = (0..4 * count).into_par_iter().with_max_len(1);
            let multiply = |_| {
                if arithmetic == Arithmetic::Pairs {
                    run(Multiplied::<true>)
                } else {
                    run(Multiplied::<false>)
                }
            };
            all.map(multiply).collect()
        });
        done.iter().sum::<f64>() / started.elapsed().as_secs_f64()
    };
    (0..10).map(|_| once()).fold(0.0, f64::max)
}
