//! The interface of a search, and the list of all searches.

pub(crate) mod beam;
pub(crate) mod explain;
pub(crate) mod greedy;
pub(crate) mod local;
pub(crate) mod packing;
pub(crate) mod placement;
pub(crate) mod problem;
pub(crate) mod replan;
#[cfg(test)]
mod tests;
pub(crate) mod torchrec;

use crate::cost::CostModel;
use crate::error::Result;
use crate::plan::Plan;
use crate::search::beam::Beam;
use crate::search::greedy::Greedy;
use crate::search::torchrec::TorchrecDefault;
use crate::table::Table;
use crate::topology::Topology;

/// A search decides on which ranks tables are placed. It does no I/O, and the same input gives the same plan.
pub trait Search: Send + Sync {
    /// Returns the name of the search, which is stored in plans.
    fn id(&self) -> &'static str;

    /// Returns a plan for `tables` on `topology`, with `global_batch_size` samples per step over all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for invalid tables or an invalid topology,
    /// [`Error::NoRoom`](crate::Error::NoRoom) if the search finds no rank for a table, and errors of the cost model.
    fn plan(
        &self,
        tables: &[Table],
        topology: &Topology,
        cost_model: &dyn CostModel,
        global_batch_size: u64,
    ) -> Result<Plan>;
}

/// Returns all searches, including the baselines.
pub fn searches(seed: u64) -> Vec<Box<dyn Search>> {
    vec![
        Box::new(Greedy::Random { seed }),
        Box::new(Greedy::BySize),
        Box::new(Greedy::ByDimension),
        Box::new(Greedy::ByLookups),
        Box::new(Greedy::BySizeTimesLookups),
        Box::new(TorchrecDefault),
        Box::new(Beam::Neuroshard),
        Box::new(Beam::Full),
    ]
}
