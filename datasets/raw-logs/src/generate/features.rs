//! The sparse features: ids, lists, and how the lists of a session change.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrow::array::{Int64Builder, ListArray, ListBuilder};
use arrow::datatypes::{DataType, Field, FieldRef};
use onefold_datasets::digest::scramble;
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rand_distr::Zipf;

use super::workload::{Change, GroupSpec, TABLE_ROWS};

/// The exponent of the Zipf distribution of ids: the probability of the k-th most frequent id is proportional to
/// `k^-1.05`.
const ZIPF_EXPONENT: f64 = 1.05;

/// The properties of a log's row on which sparse features depend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// The session, counted from 0 within the cell.
    pub(super) session: u32,
    /// Whether it is the session's first row.
    pub(super) first: bool,
    /// Whether it is the session's last row.
    pub(super) last: bool,
}

/// The mapping between the ranks and ids of a feature.
///
/// Ranks are mapped to ids by an affine bijection of `0..TABLE_ROWS` that depends only on the feature's name. So
/// frequent ids are spread over the table, and they differ between features, but not between seeds.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdSpace {
    multiplier: u64,
    offset: u64,
}

impl IdSpace {
    pub(super) fn of(feature: &str) -> Self {
        let rows = u64::from(TABLE_ROWS);
        let hash = name_hash(feature);
        let wanted = hash % rows;
        // The multiplier 1 always qualifies, so the loop ends.
        let multiplier = (wanted..rows).chain(1..=wanted).find(|m| gcd(*m, rows) == 1).unwrap_or(1);
        Self { multiplier, offset: (hash >> 32) % rows }
    }

    /// Returns the id of a rank in `0..TABLE_ROWS`. Rank 0 is the most frequent.
    pub(super) fn id(self, rank: u32) -> u32 {
        ((u64::from(rank) * self.multiplier + self.offset) % u64::from(TABLE_ROWS)) as u32
    }
}

/// Returns the distribution of ranks. Rank 1 is the most frequent.
pub(super) fn rank_distribution() -> Zipf<f64> {
    Zipf::new(f64::from(TABLE_ROWS), ZIPF_EXPONENT).expect("both constants are positive")
}

/// Returns the probabilities of the ranks of [`rank_distribution`], the most frequent first.
pub(super) fn rank_probabilities() -> Vec<f64> {
    let weights: Vec<f64> = (1..=TABLE_ROWS).map(|rank| f64::from(rank).powf(-ZIPF_EXPONENT)).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

/// A feature group over the rows of a cell. Its random numbers are drawn row by row from a separate stream, so they
/// depend neither on the other groups nor on the batch size.
#[derive(Debug)]
pub(super) struct Group<'a> {
    spec: &'a GroupSpec,
    ids: Vec<IdSpace>,
    ranks: Zipf<f64>,
    rng: ChaCha8Rng,
    /// The current lists, one per feature, of every session that has begun and not ended.
    active: HashMap<u32, Vec<VecDeque<u32>>>,
}

impl<'a> Group<'a> {
    pub(super) fn new(spec: &'a GroupSpec, rng: ChaCha8Rng) -> Self {
        let ids = spec.features.iter().map(|name| IdSpace::of(name)).collect();
        Self { spec, ids, ranks: rank_distribution(), rng, active: HashMap::new() }
    }

    /// Returns the columns of the next rows, one per feature.
    pub(super) fn columns(&mut self, rows: &[Row]) -> Vec<ListArray> {
        let column = || {
            let ids = Int64Builder::with_capacity(rows.len() * self.spec.length);
            ListBuilder::with_capacity(ids, rows.len()).with_field(list_item())
        };
        let mut columns: Vec<_> = self.ids.iter().map(|_| column()).collect();
        for row in rows {
            let lists = self.next_lists(row);
            for (column, list) in columns.iter_mut().zip(&lists) {
                list.iter().for_each(|id| column.values().append_value(i64::from(*id)));
                column.append(true);
            }
            if !row.last && self.spec.change != Change::Fresh {
                self.active.insert(row.session, lists);
            }
        }
        columns.iter_mut().map(ListBuilder::finish).collect()
    }

    fn next_lists(&mut self, row: &Row) -> Vec<VecDeque<u32>> {
        let previous = if row.first { None } else { self.active.remove(&row.session) };
        let Some(mut lists) = previous else {
            let mut lists = vec![VecDeque::new(); self.ids.len()];
            self.redraw(&mut lists);
            return lists;
        };
        match self.spec.change {
            Change::Redraw { repeat } if !self.rng.random_bool(repeat) => self.redraw(&mut lists),
            Change::Slide { append } if self.rng.random_bool(append) => self.slide(&mut lists),
            Change::Redraw { .. } | Change::Slide { .. } | Change::Fresh => {}
        }
        lists
    }

    /// Draws all lists. Lists of a timeline get the full window, other lists get a length that is uniform on
    /// `1..=2l-1` and thus has the mean `l`.
    fn redraw(&mut self, lists: &mut [VecDeque<u32>]) {
        for (list, ids) in lists.iter_mut().zip(&self.ids) {
            let length = match self.spec.change {
                Change::Slide { .. } => self.spec.length,
                Change::Redraw { .. } | Change::Fresh => self.rng.random_range(1..2 * self.spec.length),
            };
            list.clear();
            list.extend((0..length).map(|_| draw_id(*ids, &self.ranks, &mut self.rng)));
        }
    }

    fn slide(&mut self, lists: &mut [VecDeque<u32>]) {
        for (list, ids) in lists.iter_mut().zip(&self.ids) {
            list.pop_front();
            list.push_back(draw_id(*ids, &self.ranks, &mut self.rng));
        }
    }
}

fn draw_id(ids: IdSpace, ranks: &Zipf<f64>, rng: &mut ChaCha8Rng) -> u32 {
    // The sampler uses floating-point numbers, so its last rank may be one too high.
    let rank = (rng.sample(ranks) as u32).clamp(1, TABLE_ROWS);
    ids.id(rank - 1)
}

/// Returns the field of a column of lists.
pub(super) fn list_field(name: &str) -> Field {
    Field::new(name, DataType::List(list_item()), false)
}

fn list_item() -> FieldRef {
    Arc::new(Field::new("element", DataType::Int64, false))
}

/// Returns a hash of a name that never changes (FNV-1a, then [`mix`]).
pub(super) fn name_hash(name: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv))
}

/// Returns the output of SplitMix64 (Steele, Lea and Flood 2014) for the state `value`: the increment, then
/// [`scramble`].
pub(super) fn mix(value: u64) -> u64 {
    scramble(value.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn ranks_map_to_ids_one_to_one_and_differently_per_feature() {
        let mut hottest = Vec::new();
        for name in ["user_00", "user_01", "item_11", "sequence_05"] {
            let ids = IdSpace::of(name);
            let mut seen = vec![false; TABLE_ROWS as usize];
            (0..TABLE_ROWS).for_each(|rank| seen[ids.id(rank) as usize] = true);
            assert!(seen.into_iter().all(|seen| seen), "{name}");
            hottest.push(ids.id(0));
        }
        hottest.sort_unstable();
        hottest.dedup();
        assert_eq!(hottest.len(), 4);
    }

    #[test]
    fn ids_follow_the_stated_distribution() {
        let (ids, ranks) = (IdSpace::of("user_00"), rank_distribution());
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut counts = vec![0u32; TABLE_ROWS as usize];
        (0..1_000_000).for_each(|_| counts[draw_id(ids, &ranks, &mut rng) as usize] += 1);
        let probabilities = rank_probabilities();
        for rank in [0, 1, 2, 9, 99] {
            let expected = 1e6 * probabilities[rank as usize];
            let found = f64::from(counts[ids.id(rank) as usize]);
            // The tolerance is five standard deviations of a Poisson count.
            assert!((found - expected).abs() < 5.0 * expected.sqrt(), "rank {rank}: {found}, not {expected}");
        }
    }

    #[test]
    fn ended_sessions_are_forgotten() {
        let spec = GroupSpec {
            name: Some("user_a".into()),
            change: Change::Redraw { repeat: 0.5 },
            length: 3,
            features: vec!["user_00".into()],
        };
        let mut group = Group::new(&spec, ChaCha8Rng::seed_from_u64(1));
        let rows = [(0, true, false), (1, true, true), (0, false, true), (2, true, false)];
        let rows = rows.map(|(session, first, last)| Row { session, first, last });
        group.columns(&rows);
        assert_eq!(group.active.keys().collect::<Vec<_>>(), [&2]);
    }
}
