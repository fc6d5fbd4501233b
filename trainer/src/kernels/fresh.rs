//! Memory that is written before anybody reads it.
//!
//! Zeros of the size of a batch's vectors are a pass over memory, by one thread; those of a piece are written in the cache of the
//! thread that goes on to fill it.

use std::mem::MaybeUninit;

use rayon::prelude::*;

/// Zeros, where nothing was.
pub(crate) fn zeroed(memory: &mut [MaybeUninit<f32>]) -> &mut [f32] {
    memory.fill(MaybeUninit::new(0.0));
    // SAFETY: the line above has written every element.
    unsafe { memory.assume_init_mut() }
}

/// Fills memory in chunks of `chunk` floats, the last of which may be shorter, in parallel: `fill` is given what `scratch`
/// makes for each thread, the chunk's number, and the chunk as zeros. Returns what is filled then.
pub(crate) fn fill_chunks<S>(
    memory: &mut [MaybeUninit<f32>],
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [f32]) + Send + Sync,
) -> &mut [f32] {
    let chunks = memory.par_chunks_mut(chunk.max(1)).enumerate();
    chunks.for_each_init(scratch, |scratch, (number, chunk)| fill(scratch, number, zeroed(chunk)));
    // SAFETY: the chunks are all of the memory, and `zeroed` has written each.
    unsafe { memory.assume_init_mut() }
}

/// A vector of `length` floats that is filled in the same way.
pub(crate) fn filled_chunks<S>(
    length: usize,
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [f32]) + Send + Sync,
) -> Vec<f32> {
    let mut values = Vec::with_capacity(length);
    let filled = fill_chunks(&mut values.spare_capacity_mut()[..length], chunk, scratch, fill).len();
    // SAFETY: `fill_chunks` has written that many of the vector's elements, from the first on.
    unsafe { values.set_len(filled) };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_begin_as_zeros_and_are_all_filled() {
        for (length, chunk) in [(0, 3), (7, 3), (6, 3), (2, 5), (3, 0)] {
            let values = filled_chunks(length, chunk, Vec::new, |seen: &mut Vec<usize>, number, values| {
                assert!(values.iter().all(|value| *value == 0.0));
                seen.push(number);
                values.fill(number as f32);
            });
            let expected: Vec<f32> = (0..length).map(|i| (i / chunk.max(1)) as f32).collect();
            assert_eq!(values, expected);
        }
    }
}
