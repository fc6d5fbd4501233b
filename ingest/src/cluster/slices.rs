//! Plans of the slices of timelines.
//!
//! What slices are made of is in tables that are made once: where every sample belongs and which positions it needs, and
//! for each timeline the ranges of its slices. So no plan has all of these steps, and all that read slices see the same
//! ones.

use datafusion::arrow::datatypes::Schema as ArrowSchema;
use datafusion::prelude::SessionContext;

use super::options::ClusterOptions;
use crate::sessionize;
use crate::spool::Spool;
use crate::{Config, Result, timeline};

/// The samples, with what says where each belongs and which positions it needs.
const PLACED: &str = "__onefold_placed_samples";
/// The ranges of the slices of a timeline, with its number.
const RANGES: &str = "__onefold_ranges";
/// A slice of a timeline takes about this part of [`ClusterOptions::state_bytes`]: one in so many.
const SLICE_PART: usize = 16;
/// The fewest and the most rows of a slice. It has more if a single window is longer.
const FEWEST_SLICE_IDS: usize = 1 << 10;
const MOST_SLICE_IDS: usize = 1 << 20;

/// The slices of all timelines.
#[derive(Debug, Default)]
pub(super) struct SliceQueries {
    /// For each timeline the query of its slices, in no order.
    pub(super) queries: Vec<String>,
    /// The tables that the queries read.
    spool: Spool,
}

impl SliceQueries {
    /// Makes the tables of the slices of the samples that have these `columns`. `sessions` is the query of their sessions.
    ///
    /// # Errors
    ///
    /// Those of the engine.
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
