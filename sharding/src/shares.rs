//! The distribution of a feature's lookups over the rows of its table.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The largest number of points that describe a distribution.
const MOST_POINTS: usize = 64;
/// The allowed difference between a described and a counted share.
const TOLERANCE: f64 = 1e-3;
/// The quantile of Kolmogorov's test: with n independent lookups, the counted shares of all ranges of first rows
/// differ from the expected ones by at most `CHANCE` ÷ √n in 19 of 20 cases.
const CHANCE: f64 = 1.36;

/// The distribution of a feature's lookups over the rows of its table, as training looks them up. Hashed ids count
/// for the rows to which they are hashed.
///
/// A point `(row, share)` states the share of lookups, 0 to 1, that falls on the rows before `row`. Between two
/// points, and before the first one, lookups are distributed evenly. The last point is `(rows, 1.0)` for a table of
/// `rows` rows. In a vocabulary that is ordered by frequency, most lookups fall on the first rows. If such a table is
/// divided into equal blocks of rows, the first block has most of the work.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LookupShares(pub Vec<(u64, f64)>);

impl LookupShares {
    /// Describes the distribution of `sorted`, the looked-up rows in ascending order with repetitions. The share of
    /// any block of rows differs from the counted share by at most 0.2 % of all lookups, or by sampling noise if that
    /// is larger, unless this would need more than 64 points. Returns `None` if the lookups are even within this
    /// tolerance, or if there are no lookups.
    pub fn from_lookups(sorted: &[u32], rows: u64) -> Option<Self> {
        if sorted.is_empty() {
            return None;
        }
        let all = sorted.len() as f64;
        let tolerance = TOLERANCE.max(CHANCE / all.sqrt()) * all;
        let end = Point { row: rows, lookups: sorted.len() };
        let mut segments = vec![Segment::new(Point { row: 0, lookups: 0 }, end, sorted)];
        while segments.len() < MOST_POINTS {
            let worst =
                (0..segments.len()).max_by(|a, b| segments[*a].error.total_cmp(&segments[*b].error))?;
            let Segment { from, to, furthest, error } = segments[worst];
            if error <= tolerance {
                break;
            }
            segments[worst] = Segment::new(from, furthest, sorted);
            segments.push(Segment::new(furthest, to, sorted));
        }
        // Shares are rounded to six decimal places.
        let share = |lookups: usize| (lookups as f64 / all * 1e6).round() / 1e6;
        let mut points: Vec<(u64, f64)> =
            segments.iter().map(|part| (part.to.row, share(part.to.lookups))).collect();
        points.sort_by_key(|(row, _)| *row);
        (points.len() > 1).then_some(Self(points))
    }

    /// Returns the share of lookups, 0 to 1, that falls on `rows`.
    pub fn share(&self, rows: &Range<u64>) -> f64 {
        (self.before(rows.end) - self.before(rows.start)).max(0.0)
    }

    /// Returns the share of lookups that falls on the rows before `row`.
    fn before(&self, row: u64) -> f64 {
        let next = self.0.partition_point(|(point, _)| *point < row);
        let Some(&(end, share)) = self.0.get(next) else { return 1.0 };
        let (start, so_far) = next.checked_sub(1).map_or((0, 0.0), |last| self.0[last]);
        if end == start {
            return share;
        }
        so_far + (share - so_far) * (row - start) as f64 / (end - start) as f64
    }

    /// Checks that this is a distribution over the rows of a table with `rows` rows.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if rows do not ascend from 1, shares decrease or are not numbers from 0 to 1, or the last
    /// point is not `rows` and 1.
    pub fn validate(&self, rows: u64) -> Result<()> {
        let hint = "give pairs of a row and the share of lookups that falls on the rows before it, the last one of all \
                    rows and 1; or measure again; or leave `lookup_shares` out, if lookups are even";
        let wrong = |message: String| Err(Error::invalid(format!("`lookup_shares` {message}"), hint));
        let (mut last_row, mut last_share) = (0, 0.0);
        for (place, &(row, share)) in self.0.iter().enumerate() {
            if row <= last_row {
                return wrong(format!("has row {row} in place {place}, after {last_row}"));
            }
            if !(last_share..=1.0).contains(&share) {
                return wrong(format!("has the share {share} in place {place}, after {last_share}"));
            }
            (last_row, last_share) = (row, share);
        }
        if (last_row, last_share) != (rows, 1.0) {
            return wrong(format!(
                "ends with row {last_row} and share {last_share}, the table has {rows} rows"
            ));
        }
        Ok(())
    }
}

/// A row, and the number of lookups of the rows before it.
#[derive(Debug, Clone, Copy)]
struct Point {
    row: u64,
    lookups: usize,
}

/// The rows between two points, whose lookups are taken to be even.
#[derive(Debug, Clone, Copy)]
struct Segment {
    from: Point,
    to: Point,
    /// The point at which the lookups differ most from even ones, and that difference.
    furthest: Point,
    error: f64,
}

impl Segment {
    fn new(from: Point, to: Point, sorted: &[u32]) -> Self {
        let slope = (to.lookups - from.lookups) as f64 / (to.row - from.row).max(1) as f64;
        let mut segment = Self { from, to, furthest: to, error: 0.0 };
        let mut lookups = from.lookups;
        for same in sorted[from.lookups..to.lookups].chunk_by(|a, b| a == b) {
            let row = u64::from(same[0]);
            // The points before and after the row.
            for point in [Point { row, lookups }, Point { row: row + 1, lookups: lookups + same.len() }] {
                let even = from.lookups as f64 + slope * (point.row - from.row) as f64;
                let error = (point.lookups as f64 - even).abs();
                if error > segment.error {
                    (segment.furthest, segment.error) = (point, error);
                }
            }
            lookups += same.len();
        }
        segment
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::cost::ShardLoad;
    use crate::cost::analytic::AnalyticCost;
    use crate::plan::{Plan, Shard, ShardingType, TablePlan};
    use crate::search::Search;
    use crate::search::beam::Beam;
    use crate::table::{Table, row_blocks};
    use crate::topology::Topology;

    const ROWS: u64 = 100_000;

    /// Draws lookups by Zipf's law with exponent 1 in a vocabulary that is ordered by frequency.
    fn by_frequency(lookups: usize) -> Vec<u32> {
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let row = |_| ((ROWS as f64).powf(rng.random_range(0.0..1.0)) - 1.0) as u32;
        let mut rows: Vec<u32> = (0..lookups).map(row).collect();
        rows.sort_unstable();
        rows
    }

    fn counted(sorted: &[u32], rows: &Range<u64>) -> f64 {
        let before = |row: u64| sorted.partition_point(|found| u64::from(*found) < row) as f64;
        (before(rows.end) - before(rows.start)) / sorted.len() as f64
    }

    #[test]
    fn shares_of_any_blocks_are_those_counted() {
        let lookups = by_frequency(2_000_000);
        let shares = LookupShares::from_lookups(&lookups, ROWS).unwrap();
        shares.validate(ROWS).unwrap();
        assert!(shares.0.len() <= MOST_POINTS, "{}", shares.0.len());
        for parts in [1, 2, 3, 4, 7, 128, 1024] {
            let blocks: Vec<f64> = row_blocks(ROWS, parts).map(|rows| shares.share(&rows)).collect();
            assert!((blocks.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{parts}");
            for (rows, share) in row_blocks(ROWS, parts).zip(&blocks) {
                let counted = counted(&lookups, &rows);
                assert!((share - counted).abs() < 0.0025, "{parts}, {rows:?}: {share} {counted}");
            }
            let hottest = counted(&lookups, &row_blocks(ROWS, parts).next().unwrap());
            assert!((blocks[0] / hottest - 1.0).abs() < 0.01, "{parts}: {} {hottest}", blocks[0]);
        }
        let text = serde_json::to_string(&shares).unwrap();
        assert!(text.starts_with("[[") && text.ends_with("[100000,1.0]]"), "{text}");
        assert_eq!(serde_json::from_str::<LookupShares>(&text).unwrap(), shares);
    }

    #[test]
    fn even_lookups_are_not_described_and_a_row_of_its_own_is() {
        let mut rng = ChaCha8Rng::seed_from_u64(8);
        for lookups in [0, 1, 10, 1_000, 100_000] {
            let mut even: Vec<u32> = (0..lookups).map(|_| rng.random_range(0..ROWS as u32)).collect();
            even.sort_unstable();
            assert_eq!(LookupShares::from_lookups(&even, ROWS), None, "{lookups}");
        }
        // This corresponds to a hashed id that has a third of the lookups.
        let mut hot: Vec<u32> = (0..100_000).map(|_| rng.random_range(0..ROWS as u32)).collect();
        hot.extend([70_000; 50_000]);
        hot.sort_unstable();
        let shares = LookupShares::from_lookups(&hot, ROWS).unwrap();
        for (rows, expected) in
            [(70_000..70_001, 1.0 / 3.0), (0..50_000, 1.0 / 3.0), (50_000..ROWS, 2.0 / 3.0)]
        {
            assert!((shares.share(&rows) - expected).abs() < 0.008, "{rows:?}: {}", shares.share(&rows));
        }
    }

    #[test]
    fn impossible_shares_are_refused_by_table_and_place() {
        let refused = |points: &[(u64, f64)]| {
            let lookup_shares = Some(LookupShares(points.to_vec()));
            let table = Table {
                first: crate::Lookups { lookup_shares, ..crate::lookups::Lookups::default() },
                ..Table::new("t", 10, 4)
            };
            table.validate().unwrap_err().to_string()
        };
        let error = refused(&[(4, 0.5), (4, 0.6), (10, 1.0)]);
        assert!(
            error.starts_with("table `t`: `lookup_shares` has row 4 in place 1, after 4\n  hint: give pairs"),
            "{error}"
        );
        assert!(refused(&[(0, 0.5), (10, 1.0)]).contains("has row 0 in place 0"));
        assert!(
            refused(&[(4, 0.5), (8, 0.4), (10, 1.0)]).contains("has the share 0.4 in place 1, after 0.5")
        );
        assert!(refused(&[(4, f64::NAN), (10, 1.0)]).contains("has the share NaN in place 0"));
        assert!(
            refused(&[(4, 0.5), (9, 1.0)]).contains("ends with row 9 and share 1, the table has 10 rows")
        );
        assert!(refused(&[]).contains("ends with row 0 and share 0"));
    }

    /// Returns a plan that divides a table by rows over four ranks.
    fn by_rows(table: &Table) -> TablePlan {
        let shard = |(rank, rows)| Shard { rank, rows, columns: 0..table.dim };
        let shards = (0..).zip(row_blocks(table.rows, 4)).map(shard).collect();
        TablePlan { sharding_type: ShardingType::RowWise, shards, ..TablePlan::table_wise(table, 0) }
    }

    fn table(lookups: &[u32]) -> Table {
        let lookup_shares = LookupShares::from_lookups(lookups, ROWS);
        Table {
            first: crate::Lookups {
                lookup_shares,
                pooling_factor: 20.0,
                ..crate::lookups::Lookups::default()
            },
            ..Table::new("t", ROWS, 64)
        }
    }

    #[test]
    fn a_row_shard_gets_the_ids_that_its_rows_have() {
        let lookups = by_frequency(2_000_000);
        let (table, topology) = (table(&lookups), Topology::h100(4, 1 << 30).unwrap());
        let plan = by_rows(&table);
        let ids = |shard| {
            let whole = ShardLoad::table_wise(&table, shard, &topology, 1_000);
            ShardLoad { sharding_type: ShardingType::RowWise, ..whole }.work().ids
        };
        let predicted: Vec<f64> = plan.shards.iter().map(ids).collect();
        assert!((predicted.iter().sum::<f64>() - 80_000.0).abs() < 1e-6, "{predicted:?}");
        for (shard, ids) in plan.shards.iter().zip(&predicted) {
            let counted = counted(&lookups, &shard.rows) * 80_000.0;
            assert!((ids / counted - 1.0).abs() < 0.05, "{:?}: {ids} {counted}", shard.rows);
        }
        assert!(predicted[0] > 0.8 * 80_000.0, "{predicted:?}");
    }

    #[test]
    fn a_plan_that_has_room_by_rows_alone_is_refused() {
        let lookups = by_frequency(100_000);
        let mut table = table(&lookups);
        table.first.pooling = crate::Pooling::Attention;
        let even =
            Table { first: crate::Lookups { lookup_shares: None, ..table.first.clone() }, ..table.clone() };
        let predict = |table: &Table, topology: &Topology| {
            let tables = [table.clone()];
            let plan = Plan::predict(
                "test",
                &tables,
                vec![by_rows(table)],
                topology,
                &AnalyticCost,
                topology.global_batch_size(1_000),
            );
            plan.map(|plan| (plan.check(&tables, topology, plan.global_batch_size), plan)).unwrap()
        };
        let most = |plan: &Plan| plan.ranks.iter().map(|rank| rank.total_bytes()).max().unwrap();
        let large = Topology::h100(4, 1 << 30).unwrap();
        let [(_, even_plan), (_, plan)] = [&even, &table].map(|table| predict(table, &large));
        // The rank of the first rows needs more memory than the others, whose request buffers have the same size.
        assert!(most(&plan) > most(&even_plan) + (10 << 20), "{} {}", most(&plan), most(&even_plan));
        let memory_bytes = (most(&plan) + most(&even_plan)) / 2;
        let small = Topology { memory_bytes, ..large };
        predict(&even, &small).0.unwrap();
        let error = predict(&table, &small).0.unwrap_err().to_string();
        assert!(error.contains("rank 0 would hold"), "{error}");
        // A search finds another plan, or fails.
        match Beam::Full.plan(slice::from_ref(&table), &small, &AnalyticCost, small.global_batch_size(1_000))
        {
            Ok(plan) => plan.check(&[table], &small, plan.global_batch_size).unwrap(),
            Err(error) => assert!(error.to_string().contains("`t`"), "{error}"),
        }
    }

    #[test]
    fn a_search_prices_rows_by_the_block_that_is_looked_up_most() {
        let lookups = by_frequency(100_000);
        let mut table = Table { dim: 4, ..table(&lookups) };
        table.first.pooling_factor = 100.0;
        let even =
            Table { first: crate::Lookups { lookup_shares: None, ..table.first.clone() }, ..table.clone() };
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let plan = |table: &Table| {
            Beam::Full
                .plan(slice::from_ref(table), &topology, &AnalyticCost, topology.global_batch_size(8_192))
                .unwrap()
        };
        // A table with four columns can only be divided by rows, which is best if lookups are even.
        assert_eq!(plan(&even).tables[0].sharding_type, ShardingType::RowWise);
        let by_rows = vec![by_rows(&table)];
        let rows = Plan::predict(
            "rows",
            slice::from_ref(&table),
            by_rows,
            &topology,
            &AnalyticCost,
            topology.global_batch_size(8_192),
        )
        .unwrap();
        let found = plan(&table);
        assert!(found.max_cost_ms <= rows.max_cost_ms, "{} {}", found.max_cost_ms, rows.max_cost_ms);
        assert!(rows.max_cost_ms > 2.0 * plan(&even).max_cost_ms);
        // The same table, with its rows in reverse order.
        let mut last: Vec<u32> = lookups.iter().map(|row| ROWS as u32 - 1 - row).collect();
        last.sort_unstable();
        let last = Table {
            first: crate::Lookups {
                lookup_shares: LookupShares::from_lookups(&last, ROWS),
                ..table.first.clone()
            },
            ..table.clone()
        };
        assert_eq!((table.busiest_block(4), last.busiest_block(4)), (0..25_000, 75_000..100_000));
        assert_eq!(even.busiest_block(4), 0..25_000);
        assert!((plan(&last).max_cost_ms / found.max_cost_ms - 1.0).abs() < 0.02);
    }
}
