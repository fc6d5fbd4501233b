//! What is put into a slot: numbers of several types, one piece after the other.

use std::ops::Range;

use rayon::prelude::*;
use tch::{Kind, Tensor};

/// Numbers in a slot: where, and how many.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section {
    pub(super) word: usize,
    pub(super) count: usize,
}

/// What goes into a slot, one after the other on 16 bytes.
#[derive(Default)]
pub(super) struct Parcel<'a> {
    pub(super) words: usize,
    parts: Vec<(Section, Part<'a>)>,
}

pub(super) enum Part<'a> {
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    Floats(std::borrow::Cow<'a, [f32]>),
    /// Chosen values of a feature.
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

    /// Ids of features stand side by side.
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

    /// Writes everything, in parallel.
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

/// The numbers of a section as a tensor, which shares the slot's memory.
pub(super) fn view(device: &Tensor, section: Section, kind: Kind) -> Tensor {
    let bytes = section.count * kind.elt_size_in_bytes();
    device.narrow(0, (section.word * size_of::<u64>()) as i64, bytes as i64).view_dtype(kind)
}
