//! Vectors in uninitialized memory, which kernels fill in parallel.
//!
//! `vec![0.0; n]` writes all of the memory on one thread before a kernel starts. Here, each thread writes zeros to
//! a piece just before it fills that piece, while the piece is in its cache.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

/// Writes zeros to all of `memory` and returns it as initialized memory.
pub fn zeroed<T: Copy + Default>(memory: &mut [MaybeUninit<T>]) -> &mut [T] {
    memory.fill(MaybeUninit::new(T::default()));
    // SAFETY: the line above has written every element.
    unsafe { memory.assume_init_mut() }
}

/// Fills memory in parallel in chunks of `chunk` elements; the last chunk may be shorter. `fill` receives the
/// thread's scratch value (made by `scratch`), the index of the chunk, and the chunk, which contains zeros. Returns
/// the filled memory.
pub fn fill_chunks<S, T: Copy + Default + Send>(
    memory: &mut [MaybeUninit<T>],
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [T]) + Send + Sync,
) -> &mut [T] {
    let chunks = memory.par_chunks_mut(chunk.max(1)).enumerate().with_max_len(1);
    chunks.for_each_init(scratch, |scratch, (number, chunk)| fill(scratch, number, zeroed(chunk)));
    // SAFETY: the chunks cover all of the memory, and `zeroed` has written each chunk.
    unsafe { memory.assume_init_mut() }
}

/// Fills memory in parallel in pieces of the given sizes. `fill` receives the index of a piece, and the piece,
/// which contains zeros. Returns the filled memory.
///
/// # Panics
///
/// If the sizes do not add up to the length of the memory.
pub fn fill_pieces<'m>(
    memory: &'m mut [MaybeUninit<f32>],
    sizes: &[usize],
    fill: impl Fn(usize, &mut [f32]) + Send + Sync,
) -> &'m mut [f32] {
    assert_eq!(sizes.iter().sum::<usize>(), memory.len(), "the pieces are all of the memory");
    let (mut rest, mut pieces) = (&mut *memory, Vec::with_capacity(sizes.len()));
    for &size in sizes {
        let (piece, after) = rest.split_at_mut(size);
        pieces.push(piece);
        rest = after;
    }
    let pieces = pieces.into_par_iter().enumerate().with_max_len(1);
    pieces.for_each(|(number, piece)| fill(number, zeroed(piece)));
    // SAFETY: the pieces cover all of the memory, and `zeroed` has written each piece.
    unsafe { memory.assume_init_mut() }
}

/// Returns a vector of `length` floats that `write` has initialized. `write` must return the whole slice that it
/// receives.
///
/// # Panics
///
/// If `write` returns another slice.
pub(crate) fn written(length: usize, write: impl FnOnce(&mut [MaybeUninit<f32>]) -> &mut [f32]) -> Vec<f32> {
    let mut values = Vec::with_capacity(length);
    write_all(&mut values.spare_capacity_mut()[..length], write);
    // SAFETY: `write_all` has returned, so the first `length` elements are initialized.
    unsafe { values.set_len(length) };
    values
}

/// Calls `write` with `memory`. `write` must return the whole slice, which proves that all elements are
/// initialized.
///
/// # Panics
///
/// If `write` returns another slice.
pub fn write_all<T>(memory: &mut [MaybeUninit<T>], write: impl FnOnce(&mut [MaybeUninit<T>]) -> &mut [T]) {
    let (start, length) = (memory.as_ptr().cast::<T>(), memory.len());
    let written = write(memory);
    assert!(written.len() == length && written.as_ptr() == start, "all is written");
}

/// Returns a vector of `length` floats that [`fill_chunks`] has filled.
pub(crate) fn filled_chunks<S>(
    length: usize,
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [f32]) + Send + Sync,
) -> Vec<f32> {
    written(length, |memory| fill_chunks(memory, chunk, scratch, fill))
}

/// A vector of floats that several threads fill in pieces of any length.
pub(crate) struct Fresh {
    values: Vec<f32>,
    length: usize,
    written: AtomicUsize,
}

/// A part of a [`Fresh`] vector.
pub(crate) struct Piece<'a> {
    memory: &'a mut [MaybeUninit<f32>],
    written: &'a AtomicUsize,
}

impl Fresh {
    /// Allocates memory for `length` floats.
    pub(crate) fn new(length: usize) -> Self {
        Self { values: Vec::with_capacity(length), length, written: AtomicUsize::new(0) }
    }

    /// Returns the whole vector as one piece, to be split. All parts of it must be [`zeroed`](Piece::zeroed). A
    /// second call starts again.
    pub(crate) fn whole(&mut self) -> Piece<'_> {
        *self.written.get_mut() = 0;
        Piece { memory: &mut self.values.spare_capacity_mut()[..self.length], written: &self.written }
    }

    /// Returns the filled vector.
    ///
    /// # Panics
    ///
    /// If a piece was not zeroed.
    pub(crate) fn into_vec(self) -> Vec<f32> {
        let Self { mut values, length, written } = self;
        assert_eq!(written.into_inner(), length, "all pieces are filled");
        // SAFETY: pieces do not overlap, and each piece adds its length to `written` once, when it is zeroed. The
        // assertion shows that all `length` floats have been written.
        unsafe { values.set_len(length) };
        values
    }
}

impl<'a> Piece<'a> {
    /// Returns the first `length` floats, and the rest.
    pub(crate) fn split_at(self, length: usize) -> (Self, Self) {
        let (first, rest) = self.memory.split_at_mut(length);
        (Self { memory: first, ..self }, Self { memory: rest, written: self.written })
    }

    /// Writes zeros to the piece and returns it as initialized memory.
    pub(crate) fn zeroed(self) -> &'a mut [f32] {
        self.written.fetch_add(self.memory.len(), Ordering::Relaxed);
        zeroed(self.memory)
    }
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

    #[test]
    #[should_panic(expected = "all is written")]
    fn returning_another_slice_panics() {
        written(4, |memory| zeroed(&mut memory[..3]));
    }

    #[test]
    fn pieces_make_a_vector() {
        let mut fresh = Fresh::new(5);
        let (first, rest) = fresh.whole().split_at(2);
        let (second, third) = rest.split_at(3);
        std::thread::scope(|scope| {
            scope.spawn(|| second.zeroed().fill(2.0));
            scope.spawn(|| first.zeroed()[1] = 1.0);
            scope.spawn(|| assert!(third.zeroed().is_empty()));
        });
        assert_eq!(fresh.into_vec(), [0.0, 1.0, 2.0, 2.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "all pieces are filled")]
    fn an_unfilled_piece_panics() {
        let mut fresh = Fresh::new(5);
        fresh.whole().split_at(2).0.zeroed();
        fresh.into_vec();
    }
}
