//! Query plans for the slices of timelines.
//!
//! The inputs of the slices are computed once and stored as tables: one table with the place of every sample and
//! the timeline positions that it needs, and for each timeline a table of the ranges of its slices. So no plan
//! repeats these steps, and all readers of slices see the same ranges.

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::prelude::SessionContext;

use super::options::ClusterOptions;
use crate::config::Config;
use crate::error::Result;
use crate::spool::Spool;
use crate::{sessionize, timeline};

/// The table of the samples with the place of each sample and the timeline positions that it needs.
const PLACED: &str = "__onefold_placed_samples";
/// The prefix of the names of the tables of slice ranges; the index of the timeline follows.
const RANGES: &str = "__onefold_ranges";
/// A slice of a timeline takes at most about 1/16 of [`ClusterOptions::state_bytes`].
const SLICE_PART: usize = 16;
/// The bounds of the maximum number of rows of a slice. A slice has more rows if a single window is longer.
const FEWEST_SLICE_IDS: usize = 1 << 10;
const MOST_SLICE_IDS: usize = 1 << 20;

/// The slices of all timelines.
#[derive(Default)]
pub(super) struct SliceQueries {
    /// For each timeline, the query that returns its slices, in no particular order.
    pub(super) queries: Vec<String>,
    /// The tables that the queries read.
    spool: Spool,
}

impl SliceQueries {
    /// Computes the tables of the slices for samples with these `columns`. `sessions` is the query of their
    /// sessions.
    pub(super) async fn new(
        config: &Config,
        context: &SessionContext,
        columns: &ArrowSchema,
        options: &ClusterOptions,
        sessions: &str,
    ) -> Result<Self> {
        let mut slices = Self::default();
        if config.timelines.is_empty() {
            return Ok(slices);
        }
        let placed = sessionize::placed_samples(config, columns, options.order, sessions)?;
        slices.spool.table(context, PLACED, &placed).await?;
        let place = sessionize::place_columns(config);
        let order = sessionize::quoted(&sessionize::numbered_by(config, columns, options.order));
        for (number, timeline) in config.timelines.iter().enumerate() {
            let rows = options.state_bytes / SLICE_PART / (8 * (timeline.columns.len() + 1));
            let rows = rows.clamp(FEWEST_SLICE_IDS, MOST_SLICE_IDS);
            let ranges = timeline::ranges_sql(number, PLACED, (&place, &order), rows);
            let table = format!("{RANGES}{number}");
            slices.spool.table(context, &table, &ranges).await?;
            slices.queries.push(sessionize::slices(config, number, &table));
        }
        Ok(slices)
    }
}
