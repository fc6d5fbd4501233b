//! The memory that ranks need to exchange ids, vectors and gradients.

use crate::cost::ShardLoad;
use crate::lookups::{Lookups, shared_lists};
use crate::plan::ShardingType;
use crate::table::ACTIVATION_BYTES;

/// Bytes of a word in a request.
pub(crate) const WORD_BYTES: f64 = 4.0;

/// The buffer bytes for one shard in a step, as the trainer allocates them: for requests to the shard, its vectors
/// and their gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferBytes {
    /// Bytes on every rank: the requests and gradients that it sends to the shard's rank, and the vectors that it
    /// receives.
    pub asking: u64,
    /// Additional bytes on the shard's rank: the data that it exchanges with the ranks that request from it. The
    /// rank's own requests are not part of it, because it does not send them.
    pub serving: u64,
}

impl BufferBytes {
    /// Returns the sum of the buffers of two shards.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            asking: self.asking.saturating_add(other.asking),
            serving: self.serving.saturating_add(other.serving),
        }
    }
}

impl ShardLoad<'_> {
    /// Returns the expected buffers in which ranks exchange ids, vectors and gradients of the shard.
    pub fn buffers(&self) -> BufferBytes {
        buffers_above(self, 0.0)
    }

    /// Returns the buffers with a reserve for batches above the mean.
    pub fn reserved_buffers(&self) -> BufferBytes {
        buffers_above(self, RESERVED_DEVIATIONS)
    }
}

/// The number of standard deviations above the mean for which memory is reserved. A normally distributed size exceeds
/// it in one of three million steps.
const RESERVED_DEVIATIONS: f64 = 5.0;

/// Returns the buffers of one shard for batches whose size is `deviations` standard deviations above the mean. A row
/// shard receives the share of ids that fall on its rows.
///
/// A request takes 8 bytes per id and per list: one word of the buffer that is sent or received, and one word of the
/// lookup. Vectors and their gradients are sent in single precision. A list of a row-wise table gets a vector from
/// every shard that has at least one of its rows.
///
/// For a data-parallel table, every rank tells all other ranks which rows its batch uses, with at most one bit per
/// row of the table. It sends their gradients to the ranks that sum them, and receives the sums for the rows of all
/// ranks. TorchRec instead reduces the gradient of the whole table and needs a dense one. The result is the larger of
/// the two. With a single rank, no buffers are needed.
fn buffers_above(load: &ShardLoad<'_>, deviations: f64) -> BufferBytes {
    let ShardLoad { table, sharding_type, shard, topology, batch_size, .. } = *load;
    let others = f64::from(topology.ranks.saturating_sub(1));
    if others == 0.0 {
        return BufferBytes::default();
    }
    let (samples, vector_bytes) = (batch_size as f64, shard.column_count() as f64 * ACTIVATION_BYTES);
    // A saturated sum exceeds every memory limit.
    let whole = |bytes: f64| bytes.ceil() as u64;
    if sharding_type == ShardingType::DataParallel {
        // This is an upper bound, because ids repeat.
        let of_feature = |lookups: &Lookups| lookups.elements(lookups.distinct_above(samples, deviations)[1]);
        let ids: f64 = table.lookups().map(of_feature).sum();
        let (all, ranks) = (table.rows as f64, others + 1.0);
        let (own, updated) = (ids.min(all), (ids * ranks).min(all));
        let words = 2.0 * others * told_words(own, all) + ranks * own;
        let vectors = 2.0 * (own + updated) * others / ranks;
        let exchanged = words * WORD_BYTES + vectors * vector_bytes;
        return BufferBytes { serving: whole(exchanged.max(all * vector_bytes)), asking: 0 };
    }
    // The bytes for the batch of one rank. Whether a list or id has a row of the shard is either independent for each
    // of them (`of_part` deviations above the mean), or as expected (`of_part` is 0).
    let asked_by = |lookups: &Lookups, deviations: f64, of_part: f64| {
        let [all_lists, all_ids] = lookups.distinct_above(samples, deviations);
        let part = lookups.share_of(&shard.rows, table.rows);
        let lists = shared_lists(all_lists, all_ids, lookups.deviation(), part);
        // The deviation is at most that of a Poisson variable, so that more rows never need less memory.
        let above = |mean: f64, all: f64| (mean + of_part * mean.sqrt()).min(all);
        let lists = above(lists, all_lists);
        let ids = lookups.elements(above(all_ids * part, all_ids));
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        // If lists overlap, a request also contains the start of each list.
        let begins = if lookups.window_factor > 1.0 && !lookups.pooling.is_sequence() { lists } else { 0.0 };
        (ids + lists) * 2.0 * WORD_BYTES + begins * WORD_BYTES + 2.0 * vectors * vector_bytes
    };
    let asked = |deviations: f64, of_part: f64| -> f64 {
        table.lookups().map(|lookups| asked_by(lookups, deviations, of_part)).sum()
    };
    // Each id is requested from one row shard of its table. The sum over the batches of several ranks varies less,
    // relative to its mean, than a single batch.
    let (mean, served) = (asked(0.0, 0.0), others - 1.0);
    let serving = served * mean + served.sqrt() * (asked(deviations, deviations) - mean);
    BufferBytes { serving: whole(serving), asking: whole(asked(deviations, 0.0)) }
}

/// Returns the number of words that state which `rows` rows of a table with `table_rows` rows a rank's batch uses:
/// one word per row, or one bit per row of the table, whichever is smaller.
pub(crate) fn told_words(rows: f64, table_rows: f64) -> f64 {
    rows.min((table_rows / (8.0 * WORD_BYTES)).ceil())
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::Pooling;
    use crate::plan::Shard;
    use crate::table::Table;
    use crate::topology::Topology;

    #[test]
    fn a_row_shard_is_asked_for_the_lists_that_have_its_rows() {
        assert_eq!(shared_lists(100.0, 1000.0, 0.0, 1.0), 100.0);
        // A list of two ids has an id in a given half of the rows with probability 3/4.
        assert_eq!(shared_lists(100.0, 200.0, 0.0, 0.5), 75.0);
        assert_eq!(shared_lists(100.0, 40.0, 0.0, 0.25), 10.0);
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let of = |table: &Table, kind, parts| {
            let shard = Shard { rank: 0, rows: 0..table.rows / parts, columns: 0..8 };
            let whole = ShardLoad::table_wise(table, &shard, &topology, 100);
            ShardLoad { sharding_type: kind, ..whole }.buffers()
        };
        let table = Table::new("t", 1000, 8);
        let quarter = of(&table, ShardingType::RowWise, 4);
        assert_eq!(quarter, BufferBytes { serving: 2 * 25 * (16 + 64), asking: 25 * (16 + 64) });
        // A batch uses all rows of a table with few rows: one word of bits states them, and three quarters of the
        // vectors are sent to other ranks and back.
        let few = of(
            &Table { first: crate::lookups::Lookups::of(1000.0), ..Table::new("few", 10, 8) },
            ShardingType::DataParallel,
            1,
        );
        let (words, vectors) = (2 * 3 + 4 * 10, 2 * (10 + 10) * 3 / 4);
        assert!(few.serving.abs_diff(words * 4 + vectors * 32) <= 1 && few.asking == 0, "{few:?}");
        let many = of(&Table::new("many", 100_000, 8), ShardingType::DataParallel, 1);
        assert_eq!(many.serving, 100_000 * 32);
        let (shard, alone) = (Shard::whole(&table, 0), Topology::h100(1, 9).unwrap());
        let alone = ShardLoad::table_wise(&table, &shard, &alone, 9);
        assert_eq!(alone.buffers(), BufferBytes::default());
    }

    /// Compares random batches, with lists of random lengths of which some are repeated, with the predictions: on
    /// average they need the predicted buffers, and no batch needs more than the reserved ones.
    #[test]
    fn the_reserve_has_room_for_batches_above_the_mean() {
        const SAMPLES: u64 = 256;
        const BATCHES: u64 = 2_000;
        let mut rng = ChaCha8Rng::seed_from_u64(21);
        // Counts lists and ids in each quarter of the rows, and in all rows. Two of three samples have a list of
        // their own, of 1 to 9 ids; the others share the list of another sample.
        let mut batch = || {
            let mut found = [[0u64; 2]; 5];
            for _ in (0..SAMPLES).filter(|_| rng.random_bool(2.0 / 3.0)).collect::<Vec<_>>() {
                let ids: Vec<usize> = (0..rng.random_range(1..=9)).map(|_| rng.random_range(0..4)).collect();
                for (quarter, [lists, count]) in found[..4].iter_mut().enumerate() {
                    let here = ids.iter().filter(|id| **id == quarter).count() as u64;
                    *lists += u64::from(here > 0);
                    *count += here;
                }
                found[4][0] += 1;
                found[4][1] += ids.len() as u64;
            }
            found
        };
        let lookups = crate::Lookups {
            dedupe_factor: 1.5,
            list_length_deviation: Some((80.0f64 / 12.0).sqrt()),
            ..crate::lookups::Lookups::of(5.0)
        };
        let table = Table { first: lookups, ..Table::new("t", 1_000, 8) };
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let quarter = Shard { rows: 0..250, ..Shard::whole(&table, 0) };
        let kinds = [(ShardingType::TableWise, Shard::whole(&table, 0)), (ShardingType::RowWise, quarter)];
        let loads = kinds.each_ref().map(|(kind, shard)| {
            let whole = ShardLoad::table_wise(&table, shard, &topology, SAMPLES);
            ShardLoad { sharding_type: *kind, ..whole }
        });
        let [whole, quarter] = loads.map(|load| load.reserved_buffers());
        let bytes = |[lists, ids]: [u64; 2]| (ids + lists) * 8 + 2 * lists * 8 * 4;
        let mut sums = [0; 2];
        for _ in 0..BATCHES {
            // One of four ranks serves itself, and two more ranks request from it.
            let [first, second] = [batch(), batch()];
            let of_whole = [first[4], second[4]].map(bytes);
            assert!(of_whole[0] <= whole.asking && of_whole.iter().sum::<u64>() <= whole.serving);
            let asked: u64 = first[..4].iter().map(|quarter| bytes(*quarter)).sum();
            let served = bytes(first[0]) + bytes(second[0]);
            assert!(asked <= 4 * quarter.asking && served <= quarter.serving, "{asked} {served} {quarter:?}");
            sums[0] += of_whole[0];
            sums[1] += bytes(first[0]);
        }
        for (load, sum) in loads.iter().zip(sums) {
            let mean = load.buffers().asking as f64;
            assert!((sum as f64 / BATCHES as f64 / mean - 1.0).abs() < 0.05, "{load:?}: {sum} {mean}");
        }
    }

    #[test]
    fn what_does_not_vary_needs_no_reserve() {
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let table = Table { first: crate::lookups::Lookups::of(3.0), ..Table::new("t", 1_000, 8) };
        let shard = Shard::whole(&table, 0);
        let load = ShardLoad::table_wise(&table, &shard, &topology, 64);
        assert_eq!(load.buffers(), load.reserved_buffers());
    }

    /// Draws lists of these lengths with evenly distributed ids. Returns the mean and the deviation of the lengths,
    /// and the share of the lists that have an id in the first `part` of the rows.
    fn counted(lengths: impl Fn(&mut ChaCha8Rng) -> u32, part: f64) -> [f64; 3] {
        const LISTS: u32 = 20_000;
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let (mut ids, mut squares, mut sharing) = (0.0, 0.0, 0.0);
        for _ in 0..LISTS {
            let length = lengths(&mut rng);
            let shares = (0..length).fold(false, |found, _| rng.random_bool(part) || found);
            (ids, squares) = (ids + f64::from(length), squares + f64::from(length).powi(2));
            sharing += f64::from(u8::from(shares));
        }
        let lists = f64::from(LISTS);
        let mean = ids / lists;
        [mean, (squares / lists - mean * mean).sqrt(), sharing / lists]
    }

    #[test]
    fn lists_that_share_a_part_are_those_counted_however_long_they_are() {
        let geometric =
            |rng: &mut ChaCha8Rng| 1 + (rng.random_range(1e-9..1.0f64).ln() / 0.85f64.ln()) as u32;
        let uniform = |rng: &mut ChaCha8Rng| rng.random_range(1..=8);
        let narrow = |rng: &mut ChaCha8Rng| rng.random_range(9..=11);
        let few_long = |rng: &mut ChaCha8Rng| if rng.random_bool(0.1) { 50 } else { 1 };
        for part in [0.9, 0.5, 0.25, 1.0 / 16.0] {
            let found = [counted(geometric, part), counted(uniform, part), counted(narrow, part)];
            for [mean, deviation, sharing] in found {
                let expected = shared_lists(1.0, mean, deviation, part);
                assert!(
                    (expected / sharing - 1.0).abs() < 0.03,
                    "{part}: {mean} ± {deviation}: {expected} {sharing}"
                );
            }
            // Mean and deviation do not tell that most lists have one id. So more is reserved than necessary, but
            // less than without the deviation.
            let [mean, deviation, sharing] = counted(few_long, part);
            let (expected, alike) =
                (shared_lists(1.0, mean, deviation, part), shared_lists(1.0, mean, 0.0, part));
            assert!(sharing < expected && expected < alike, "{part}: {sharing} {expected} {alike}");
        }
        assert_eq!(shared_lists(100.0, 1000.0, 3.0, 1.0), 100.0);
    }

    #[test]
    fn windows_are_asked_for_by_the_elements_of_their_timelines() {
        let topology = Topology::h100(2, 1 << 30).unwrap();
        let of = |pooling, window_factor| {
            let table = Table {
                first: crate::Lookups {
                    pooling,
                    pooling_factor: 12.0,
                    window_factor,
                    ..crate::lookups::Lookups::default()
                },
                ..Table::new("t", 1000, 8)
            };
            table.validate().unwrap();
            let shard = Shard::whole(&table, 0);
            ShardLoad::table_wise(&table, &shard, &topology, 100).buffers().asking
        };
        let (id, vector) = (8, 2 * 8 * 4);
        assert_eq!(of(Pooling::Attention, 1.0), 1200 * (id + vector) + 100 * id);
        assert_eq!(of(Pooling::Attention, 4.0), 300 * (id + vector) + 100 * id);
        // A pooled list needs one vector, and a word for its start in the timeline.
        assert_eq!(of(Pooling::Sum, 1.0), 1200 * id + 100 * (id + vector));
        assert_eq!(of(Pooling::Sum, 4.0), 300 * id + 100 * (id + vector) + 100 * 4);
    }
}
