use proptest::prelude::*;

use super::*;
use crate::fresh;
use crate::simd::each_copy;

const ARITHMETIC: [Arithmetic; 3] = [Arithmetic::Floats, Arithmetic::Widened, Arithmetic::Pairs];

/// Returns small integers, which are exact in bfloat16 and have the same float sum in every order.
fn matrix(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + i / 13 + seed * 13) % 11) as f32 - 5.0).collect()
}

fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|value| (value.to_bits() >> 16) as u16).collect()
}

fn widened(values: &[u16]) -> Vec<f32> {
    values.iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect()
}

/// A pool of one thread: products run on the calling thread.
fn one_thread() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap()
}

fn product<O: Output>(
    operands: (Matrix<'_>, Matrix<'_>),
    arithmetic: Arithmetic,
    finish: &Finish<'_>,
    length: usize,
    row_sums: Option<&mut [f32]>,
    threads: &rayon::ThreadPool,
) -> Vec<O> {
    let mut output: Vec<O> = Vec::with_capacity(length);
    multiply(operands, arithmetic, finish, &mut output.spare_capacity_mut()[..length], row_sums, threads);
    // SAFETY: `multiply` has written all of it.
    unsafe { output.set_len(length) };
    output
}

/// Computes the product by its definition.
fn expected((m, n, k): (usize, usize, usize), a: &[f32], b: &[f32], finish: &Finish<'_>) -> Vec<f32> {
    let element = |i: usize, j: usize| {
        let sum: f32 = (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
        let sum = sum + finish.bias.map_or(0.0, |bias| bias[j]);
        let sum = if finish.relu { sum.max(0.0) } else { sum };
        let kept = finish.mask.is_none_or(|mask| mask.to_f32()[i * n + j] > 0.0);
        if kept { sum } else { 0.0 }
    };
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

fn transposed(rows: usize, columns: usize, values: &[f32]) -> Vec<f32> {
    (0..columns).flat_map(|j| (0..rows).map(move |i| values[i * columns + j])).collect()
}

fn assert_is_the_definition(
    size: (usize, usize, usize),
    a_transposed: bool,
    b_transposed: bool,
    steps: usize,
) {
    let (m, n, k) = size;
    let (a, b) = (matrix(m * k, 1), matrix(k * n, 2));
    let (bias, mask) = (matrix(n, 3), matrix(m * n, 4));
    let half_mask = halves(&mask);
    let finish = match steps % 4 {
        0 => Finish::default(),
        1 => Finish { bias: Some(&bias), relu: true, mask: None },
        2 => Finish { mask: Some((&mask).into()), ..Finish::default() },
        _ => Finish { bias: Some(&bias), relu: false, mask: Some(Elements::Bf16(&half_mask)) },
    };
    let expected = expected(size, &a, &b, &finish);
    let sums: Vec<f32> = (0..m).map(|i| a[i * k..][..k].iter().sum()).collect();
    let a_in_memory = if a_transposed { transposed(m, k, &a) } else { a };
    let b_in_memory = if b_transposed { transposed(k, n, &b) } else { b };
    let (a_halves, b_halves) = (halves(&a_in_memory), halves(&b_in_memory));
    let threads = one_thread();
    each_copy(|| {
        for arithmetic in ARITHMETIC {
            for half in [false, true] {
                let a = if half { Elements::Bf16(&a_halves) } else { (&a_in_memory).into() };
                let b = if half { Elements::Bf16(&b_halves) } else { (&b_in_memory).into() };
                let a = if a_transposed { Matrix::new(a, k, m).transposed() } else { Matrix::new(a, m, k) };
                let b = if b_transposed { Matrix::new(b, n, k).transposed() } else { Matrix::new(b, k, n) };
                let mut found_sums = vec![f32::NAN; m];
                let asked = a_transposed.then_some(&mut found_sums[..]);
                assert_eq!(product::<f32>((a, b), arithmetic, &finish, m * n, asked, &threads), expected);
                if a_transposed {
                    assert_eq!(found_sums, sums);
                }
                let rounded: Vec<u16> = expected.iter().map(|value| u16::from_f32(*value)).collect();
                assert_eq!(product::<u16>((a, b), arithmetic, &finish, m * n, None, &threads), rounded);
            }
        }
    });
}

proptest! {
    #![proptest_config(onefold_property::cases(60))]
    #[test]
    fn products_equal_the_definition(
        size in (0_usize..40, 1_usize..75, 0_usize..40), a_transposed: bool, b_transposed: bool, steps in 0_usize..4,
    ) {
        assert_is_the_definition(size, a_transposed, b_transposed, steps);
    }
}

#[test]
fn long_sums_and_many_rows_equal_the_definition() {
    for (number, size) in [
        (3, 17, 2100),
        (130, 40, 513),
        (300, 33, 7),
        (29, 530, 1025),
        (80, 13, 700),
        (112, 5, 90),
        (32, 5, 0),
    ]
    .into_iter()
    .enumerate()
    {
        for transposed in [false, true] {
            assert_is_the_definition(size, transposed, !transposed, number);
            assert_is_the_definition(size, transposed, transposed, number + 1);
        }
    }
}

#[test]
fn threads_change_nothing() {
    let (m, n, k) = (300, 70, 900); // Too large to run on the calling thread only.
    let numbers =
        |length: usize| (0..length).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.4).collect::<Vec<_>>();
    let (a, b) = (numbers(m * k), numbers(k * n));
    for arithmetic in ARITHMETIC {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let operands = (Matrix::new(&a, k, m).transposed(), Matrix::new(&b, k, n));
            let mut sums = vec![0.0; m];
            let product =
                product::<f32>(operands, arithmetic, &Finish::default(), m * n, Some(&mut sums), &pool);
            (product, sums)
        };
        let one = run(1);
        assert!(one == run(2) && one == run(5));
        // The result is exact up to rounding.
        let exact = (0..k).map(|p| f64::from(a[p * m]) * f64::from(b[p * n])).sum::<f64>();
        let allowed = if arithmetic == Arithmetic::Floats { 1e-4 } else { 0.1 };
        assert!((f64::from(one.0[0]) - exact).abs() < allowed, "{arithmetic:?}: {} {exact}", one.0[0]);
    }
}

#[test]
fn what_is_no_number_stays_none() {
    let finish = Finish { relu: true, ..Finish::default() };
    let threads = one_thread();
    each_copy(|| {
        for arithmetic in ARITHMETIC {
            let a = [f32::NAN, 1.0, -1.0, f32::INFINITY];
            let operands = (Matrix::new(&a, 4, 1), Matrix::new(&[1.0], 1, 1));
            let found = product::<f32>(operands, arithmetic, &finish, 4, None, &threads);
            assert!(found[0].is_nan() && found[1..] == [1.0, 0.0, f32::INFINITY], "{found:?}");
            let found = widened(&product::<u16>(operands, arithmetic, &finish, 4, None, &threads));
            assert!(found[0].is_nan() && found[1..] == [1.0, 0.0, f32::INFINITY], "{found:?}");
        }
    });
}

#[test]
fn rounding_is_to_the_nearest() {
    for step in (0..=u32::MAX).step_by(65_521) {
        let value = f32::from_bits(step);
        let expected = half::bf16::from_f32(value);
        let found = half::bf16::from_bits(u16::from_f32(value));
        assert!(found == expected || found.is_nan() && expected.is_nan(), "{value}: {found} {expected}");
    }
    let written = fresh::written(2, |memory| {
        let operands = (Matrix::new(&[1.003_f32, 3.0], 2, 1), Matrix::new(&[1.0], 1, 1));
        multiply(operands, Arithmetic::Widened, &Finish::default(), memory, None, &one_thread())
    });
    assert_eq!(written, [1.0, 3.0]);
}

#[test]
#[should_panic(expected = "as many columns")]
fn matrices_that_do_not_fit_are_refused() {
    let operands = (Matrix::new(&[1.0; 2], 1, 2), Matrix::new(&[1.0; 3], 3, 1));
    product::<f32>(operands, Arithmetic::Floats, &Finish::default(), 1, None, &one_thread());
}
