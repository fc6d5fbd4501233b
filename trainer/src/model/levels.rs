//! Distinct combinations of rows: where the products of vectors from several groups are the same for many samples.
//!
//! A product of two vectors depends on the rows of their two groups alone, and so does its part of the top MLP's first
//! layer. The samples of a session share rows of many groups at a time, so groups are joined one after the other, those
//! with the fewest distinct rows first:
//!
//! ```text
//! level 0   distinct rows of group a                       products a × a
//! level 1   distinct pairs of rows of a and b              products b × a, b × b        level 1's row ─▶ level 0's row
//! level 2   samples (of b, c, …, no longer worth joining)  products c × a, c × b, …     sample ─▶ level 1's row
//! ```
//!
//! Every pair of vectors is multiplied in the level that adds the second one, once per row of that level.

use std::collections::HashMap;

/// Vectors that come in with one group of rows, as far as joining them is concerned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joinable<'a> {
    /// Vectors of a row.
    pub(super) vectors: usize,
    /// Distinct rows, and the row of every sample; `None` if every sample has a row of its own.
    pub(super) inverse: Option<(usize, &'a [i32])>,
}

/// One level.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Level {
    /// Distinct combinations.
    pub(super) rows: usize,
    /// The row of the level before for each of this one's; empty in the first.
    pub(super) parent: Vec<i32>,
    /// The sources joined so far, by number, the newest ones last; and for each of the level's rows the row of the source,
    /// or `None` where that is the level's row itself.
    pub(super) sources: Vec<(usize, Option<Vec<i32>>)>,
    /// Vectors of the sources that came in before this level.
    pub(super) taken: usize,
}

/// A join that may become a level: the row of every sample.
struct Join {
    rows: usize,
    of_sample: Vec<i32>,
    /// Sources that have come in.
    sources: usize,
    vectors: usize,
}

/// Beyond this share of the samples a join saves too little to be looked for.
const WORTHWHILE: f64 = 0.95;

/// A level is kept if it saves so many products for each row of the next level, to which its sums have to be copied; it
/// also costs a copy of the first layer's weights. Measured on rm2, whose groups change one by one: with 16, 96, and 400 a step
/// takes 1.10, 1.04, and 1.01 times as long as without levels, so what is kept must save a multiple. Tests have few
/// vectors.
const PRODUCTS_PER_COPY: usize = if cfg!(test) { 16 } else { 400 };

/// The levels of a batch, of which the last one's rows are the samples. With `join` unset it is the only one.
pub(super) fn levels(sources: &[Joinable<'_>], samples: usize, join: bool) -> Vec<Level> {
    let mut order: Vec<usize> = (0..sources.len()).collect();
    if join {
        order.sort_by_key(|&source| sources[source].inverse.map_or(samples, |(rows, _)| rows));
    }
    let mut joins = if join { joins(sources, &order, samples) } else { Vec::new() };
    joins.push(Join {
        rows: samples,
        of_sample: (0..samples as i32).collect(),
        sources: sources.len(),
        vectors: sources.iter().map(|source| source.vectors).sum(),
    });
    thin_out(&mut joins);
    if joins.len() == 1 {
        // The order that the first layer's columns have, so that none has to be moved.
        order.sort_unstable();
    }
    let mut levels = Vec::with_capacity(joins.len());
    for (number, join) in joins.iter().enumerate() {
        let before = number.checked_sub(1).map(|before| &joins[before]);
        levels.push(Level {
            rows: join.rows,
            parent: before.map_or_else(Vec::new, |before| of_rows(join, &before.of_sample)),
            sources: order[..join.sources]
                .iter()
                .map(|&source| (source, join.rows_of(&sources[source])))
                .collect(),
            taken: before.map_or(0, |before| before.vectors),
        });
    }
    levels
}

impl Join {
    fn rows_of(&self, source: &Joinable<'_>) -> Option<Vec<i32>> {
        let rows = of_rows(self, source.inverse?.1);
        let is_identity = rows.iter().enumerate().all(|(place, row)| place == *row as usize);
        (!is_identity).then_some(rows)
    }
}

/// By row of the join what `of_sample` says of the samples that have it.
fn of_rows(join: &Join, of_sample: &[i32]) -> Vec<i32> {
    let mut rows = vec![0; join.rows];
    for (row, value) in join.of_sample.iter().zip(of_sample) {
        rows[*row as usize] = *value;
    }
    rows
}

/// The joins of the first one, two, three, … of `order`, as long as they have fewer rows than there are samples.
fn joins(sources: &[Joinable<'_>], order: &[usize], samples: usize) -> Vec<Join> {
    let most = (WORTHWHILE * samples as f64) as usize;
    let mut joins: Vec<Join> = Vec::new();
    for (place, &source) in order.iter().enumerate() {
        let Some((_, inverse)) = sources[source].inverse else { break };
        let vectors = sources[source].vectors;
        // Sources of one group have the same rows.
        let same =
            |last: usize| sources[order[last]].inverse.is_some_and(|(_, other)| std::ptr::eq(other, inverse));
        if let Some(last) = joins.last_mut().filter(|last| same(last.sources - 1)) {
            last.sources += 1;
            last.vectors += vectors;
            continue;
        }
        let before = joins.last().map(|last| (&last.of_sample[..], last.vectors));
        let (rows, of_sample) = numbered(before.map(|(rows, _)| rows), inverse);
        if rows > most {
            break;
        }
        let vectors = before.map_or(0, |(_, vectors)| vectors) + vectors;
        joins.push(Join { rows, of_sample, sources: place + 1, vectors });
    }
    joins
}

/// Numbers the distinct pairs in the order in which samples have them.
fn numbered(before: Option<&[i32]>, inverse: &[i32]) -> (usize, Vec<i32>) {
    let mut numbers: HashMap<(i32, i32), i32> = HashMap::new();
    let mut of_sample = Vec::with_capacity(inverse.len());
    let mut last = None;
    for (sample, &row) in inverse.iter().enumerate() {
        let pair = (before.map_or(0, |before| before[sample]), row);
        let number = match last {
            Some((other, number)) if other == pair => number,
            _ => {
                let next = numbers.len() as i32;
                *numbers.entry(pair).or_insert(next)
            }
        };
        last = Some((pair, number));
        of_sample.push(number);
    }
    (numbers.len(), of_sample)
}

/// Leaves out joins whose products are too few to make up for copying their sums to the next one's rows.
fn thin_out(joins: &mut Vec<Join>) {
    let mut place = 0;
    while place + 1 < joins.len() {
        let (join, next) = (&joins[place], &joins[place + 1]);
        let pairs = |vectors: usize| vectors * vectors.saturating_sub(1) / 2;
        let before = place.checked_sub(1).map_or(0, |before| joins[before].vectors);
        let products = pairs(join.vectors) - pairs(before);
        let saved = next.rows.saturating_sub(join.rows) * products;
        if saved > PRODUCTS_PER_COPY * next.rows {
            place += 1;
        } else {
            joins.remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Inverse indices of three groups that often stay from one sample to the next, and vectors of each.
    fn groups() -> impl Strategy<Value = Vec<(usize, Vec<i32>)>> {
        let inverse = (1_usize..12, 1_usize..40)
            .prop_flat_map(|(vectors, run)| (Just(vectors), Just(run), 0_usize..7))
            .prop_map(|(vectors, run, shift)| {
                (vectors, (0..300).map(|sample| ((sample + shift) / run) as i32).collect())
            });
        prop::collection::vec(inverse, 0..4)
    }

    proptest! {
        #[test]
        fn every_level_has_the_rows_of_its_samples(groups in groups(), fresh in 0_usize..6, join: bool) {
            let mut sources: Vec<Joinable<'_>> = vec![Joinable { vectors: fresh, inverse: None }];
            for (vectors, inverse) in &groups {
                let rows = inverse.iter().max().unwrap() + 1;
                let source = Joinable { vectors: *vectors, inverse: Some((rows as usize, inverse)) };
                // Pooled features and a sequence of the same group.
                sources.extend([source, Joinable { vectors: 1, ..source }]);
            }
            let levels = levels(&sources, 300, join);
            prop_assert!(join || levels.len() == 1);
            let last = levels.last().unwrap();
            prop_assert_eq!((last.rows, last.sources.len()), (300, sources.len()));
            for sample in 0..300 {
                let (mut row, mut sources_above) = (sample, sources.len());
                for (number, level) in levels.iter().enumerate().rev() {
                    for (source, rows) in &level.sources {
                        let expected = sources[*source].inverse.map_or(sample, |(_, inverse)| inverse[sample] as usize);
                        prop_assert_eq!(rows.as_ref().map_or(row, |rows| rows[row] as usize), expected);
                    }
                    prop_assert!(level.sources.len() <= sources_above);
                    sources_above = level.sources.len();
                    let taken = number.checked_sub(1).map_or(0, |before| {
                        levels[before].sources.iter().map(|(source, _)| sources[*source].vectors).sum()
                    });
                    prop_assert_eq!(level.taken, taken);
                    if number > 0 {
                        row = level.parent[row] as usize;
                    }
                }
            }
        }
    }

    #[test]
    fn groups_that_repeat_together_are_joined() {
        // Four samples a session; the second group changes in the middle of each.
        let inverses: [Vec<i32>; 2] = [(0..400).map(|b| b / 4).collect(), (0..400).map(|b| b / 2).collect()];
        let joinable = |vectors, rows, inverse| Joinable { vectors, inverse: Some((rows, inverse)) };
        let sources = [
            joinable(20, 200, &inverses[1][..]),
            Joinable { vectors: 20, inverse: None },
            joinable(20, 100, &inverses[0][..]),
        ];
        let levels = levels(&sources, 400, true);
        let rows: Vec<usize> = levels.iter().map(|level| level.rows).collect();
        assert_eq!(rows, [100, 200, 400]);
        let order: Vec<usize> = levels[2].sources.iter().map(|(source, _)| *source).collect();
        assert_eq!(order, [2, 0, 1]);
        assert_eq!(levels[1].parent[..4], [0, 0, 1, 1]);
        // Two vectors have one product: not worth a level.
        let few = [Joinable { vectors: 20, inverse: None }, joinable(2, 100, &inverses[0][..])];
        let alone = super::levels(&few, 400, true);
        assert_eq!((alone.len(), alone[0].sources[0].0, alone[0].sources[1].0), (1, 0, 1));
    }
}
