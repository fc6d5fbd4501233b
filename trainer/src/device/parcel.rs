//! The contents of a slot: arrays of several types, one after the other.

use std::ops::Range;

use rayon::prelude::*;
use tch::{Kind, Tensor};

/// The position and length of an array in a slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section {
    pub(super) word: usize,
    pub(super) count: usize,
}

/// Arrays to be written to a slot, one after the other, each aligned to 16 bytes.
#[derive(Default)]
pub(super) struct Parcel<'a> {
    pub(super) words: usize,
    parts: Vec<(Section, Part<'a>)>,
}

pub(super) enum Part<'a> {
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    Floats(std::borrow::Cow<'a, [f32]>),
    /// The values of a feature in these ranges.
    Ids(&'a [i64], Vec<Range<usize>>),
}

impl Part<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Ints(values) => values.len(),
            Self::Longs(values) => values.len(),
            Self::Floats(values) => values.len(),
            Self::Ids(_, runs) => runs.iter().map(ExactSizeIterator::len).sum(),
        }
    }

    fn kind(&self) -> Kind {
        match self {
            Self::Ints(_) => Kind::Int,
            Self::Longs(_) | Self::Ids(..) => Kind::Int64,
            Self::Floats(_) => Kind::Float,
        }
    }

    fn write(&self, words: &mut [u64]) {
        fn copy<T: bytemuck::Pod>(words: &mut [u64], values: &[T]) {
            bytemuck::cast_slice_mut(words)[..values.len()].copy_from_slice(values);
        }
        match self {
            Self::Ints(values) => copy(words, values),
            Self::Longs(values) => copy(words, values),
            Self::Floats(values) => copy(words, values),
            Self::Ids(values, runs) => {
                let mut rest = words;
                for run in runs {
                    let (own, others) = rest.split_at_mut(run.len());
                    copy(own, &values[run.clone()]);
                    rest = others;
                }
            }
        }
    }
}

impl<'a> Parcel<'a> {
    pub(super) fn add(&mut self, part: Part<'a>) -> Section {
        self.add_unaligned(part, true)
    }

    /// Adds an array, aligned to 16 bytes if `aligned`, otherwise directly after the previous array. The ids of
    /// features are contiguous.
    pub(super) fn add_unaligned(&mut self, part: Part<'a>, aligned: bool) -> Section {
        if aligned {
            self.words = self.words.next_multiple_of(2);
        }
        let section = Section { word: self.words, count: part.len() };
        self.words += (part.len() * part.kind().elt_size_in_bytes()).div_ceil(size_of::<u64>());
        self.parts.push((section, part));
        section
    }

    pub(super) fn ints(&mut self, values: Vec<i32>) -> Section {
        self.add(Part::Ints(values))
    }

    /// Writes all arrays, in parallel.
    pub(super) fn write(&self, words: &mut [u64]) {
        let mut rest = words;
        let mut at = 0;
        let mut places = Vec::with_capacity(self.parts.len());
        for (i, (section, _)) in self.parts.iter().enumerate() {
            let end = self.parts.get(i + 1).map_or(self.words, |(next, _)| next.word);
            let (_, tail) = rest.split_at_mut(section.word - at);
            let (own, tail) = tail.split_at_mut(end - section.word);
            places.push(own);
            (rest, at) = (tail, end);
        }
        self.parts.par_iter().zip(places).for_each(|((_, part), words)| part.write(words));
    }
}

/// Returns a tensor that shares the slot's memory with the section.
pub(super) fn view(device: &Tensor, section: Section, kind: Kind) -> Tensor {
    let bytes = section.count * kind.elt_size_in_bytes();
    device.narrow(0, (section.word * size_of::<u64>()) as i64, bytes as i64).view_dtype(kind)
}
