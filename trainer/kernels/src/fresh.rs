//! Memory that is written before anybody reads it.
//!
//! Zeros of the size of a batch's vectors are a pass over memory, by one thread; those of a piece are written in the
//! cache of the thread that goes on to fill it.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

/// Writes zeros to all of `memory`, and returns it.
pub fn zeroed<T: Copy + Default>(memory: &mut [MaybeUninit<T>]) -> &mut [T] {
    memory.fill(MaybeUninit::new(T::default()));
    // SAFETY: the line above has written every element.
    unsafe { memory.assume_init_mut() }
}

/// Fills memory in chunks of `chunk` numbers, the last of which may be shorter, in parallel: `fill` is given what
/// `scratch` makes for each thread, the chunk's number, and the chunk as zeros. Returns what is filled then.
pub fn fill_chunks<S, T: Copy + Default + Send>(
    memory: &mut [MaybeUninit<T>],
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [T]) + Send + Sync,
) -> &mut [T] {
    let chunks = memory.par_chunks_mut(chunk.max(1)).enumerate().with_max_len(1);
    chunks.for_each_init(scratch, |scratch, (number, chunk)| fill(scratch, number, zeroed(chunk)));
    // SAFETY: the chunks are all of the memory, and `zeroed` has written each.
    unsafe { memory.assume_init_mut() }
}

/// Fills memory in pieces of these sizes, in parallel: `fill` is given a piece's number, and the piece as zeros.
/// Returns what is filled then.
///
/// # Panics
///
/// If the pieces are not all of the memory.
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
    // SAFETY: the pieces are all of the memory, and `zeroed` has written each.
    unsafe { memory.assume_init_mut() }
}

/// A vector of `length` floats, which `write` returns, all of what it is given.
///
/// # Panics
///
/// If `write` returns something else.
pub(crate) fn written(length: usize, write: impl FnOnce(&mut [MaybeUninit<f32>]) -> &mut [f32]) -> Vec<f32> {
    let mut values = Vec::with_capacity(length);
    write_all(&mut values.spare_capacity_mut()[..length], write);
    // SAFETY: `write_all` has returned, so the first `length` elements are initialised.
    unsafe { values.set_len(length) };
    values
}

/// Calls `write` on `memory`, all of which it must return: every element is initialised then.
///
/// # Panics
///
/// If `write` returns another slice.
pub fn write_all<T>(memory: &mut [MaybeUninit<T>], write: impl FnOnce(&mut [MaybeUninit<T>]) -> &mut [T]) {
    let (start, length) = (memory.as_ptr().cast::<T>(), memory.len());
    let written = write(memory);
    assert!(written.len() == length && written.as_ptr() == start, "all is written");
}

/// A vector of `length` floats that is filled as by [`fill_chunks`].
pub(crate) fn filled_chunks<S>(
    length: usize,
    chunk: usize,
    scratch: impl Fn() -> S + Send + Sync,
    fill: impl Fn(&mut S, usize, &mut [f32]) + Send + Sync,
) -> Vec<f32> {
    written(length, |memory| fill_chunks(memory, chunk, scratch, fill))
}

/// Vectors that are filled in pieces of any lengths, by any threads.
pub(crate) struct Fresh {
    values: Vec<f32>,
    length: usize,
    written: AtomicUsize,
}

/// A part of one.
pub(crate) struct Piece<'a> {
    memory: &'a mut [MaybeUninit<f32>],
    written: &'a AtomicUsize,
}

impl Fresh {
    /// Memory for `length` floats.
    pub(crate) fn new(length: usize) -> Self {
        Self { values: Vec::with_capacity(length), length, written: AtomicUsize::new(0) }
    }

    /// All of it, to be cut into pieces each of which becomes zeros; not to be asked for twice.
    pub(crate) fn whole(&mut self) -> Piece<'_> {
        *self.written.get_mut() = 0;
        Piece { memory: &mut self.values.spare_capacity_mut()[..self.length], written: &self.written }
    }

    /// The vector.
    ///
    /// # Panics
    ///
    /// If a piece was left as it was.
    pub(crate) fn into_vec(self) -> Vec<f32> {
        let Self { mut values, length, written } = self;
        assert_eq!(written.into_inner(), length, "all pieces are filled");
        // SAFETY: pieces do not overlap and each is counted once, when it becomes zeros, so that as many floats as
        // there are have been written.
        unsafe { values.set_len(length) };
        values
    }
}

impl<'a> Piece<'a> {
    /// The first `length` floats, and the others.
    pub(crate) fn split_at(self, length: usize) -> (Self, Self) {
        let (first, rest) = self.memory.split_at_mut(length);
        (Self { memory: first, ..self }, Self { memory: rest, written: self.written })
    }

    /// The piece as zeros.
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
    fn another_slice_is_not_what_was_given() {
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
    fn a_piece_may_not_be_left() {
        let mut fresh = Fresh::new(5);
        fresh.whole().split_at(2).0.zeroed();
        fresh.into_vec();
    }
}
