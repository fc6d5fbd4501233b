//! The predicted cost and memory of every rank of a plan.

use std::collections::HashMap;

use crate::buffers::BufferBytes;
use crate::cost::{CostModel, ShardLoad, rank_costs};
use crate::error::{Error, Result};
use crate::plan::{KIND, Plan, RankPrediction, TablePlan, no_such_rank};
use crate::table::Table;
use crate::topology::Topology;

impl Plan {
    /// Predicts the cost and memory of each rank for the placement `placed`, in steps of `global_batch_size` samples
    /// over all ranks, and returns the plan.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a shard is on a rank that the topology does not have, or belongs to none of `tables`;
    /// errors of the cost model. All other properties are left to [`check`](Self::check).
    pub fn predict(
        search: &str,
        tables: &[Table],
        placed: Vec<TablePlan>,
        topology: &Topology,
        cost_model: &dyn CostModel,
        global_batch_size: u64,
    ) -> Result<Self> {
        let batch_size = topology.samples_per_rank(global_batch_size);
        let loads = loads_by_rank(tables, &placed, topology, batch_size)?;
        let costs = rank_costs(cost_model, &loads, topology)?;
        let buffers = buffer_bytes(&loads);
        let mut ranks = Vec::with_capacity(loads.len());
        for (((rank, loads), cost), [buffer_bytes, reserve_bytes]) in
            (0..).zip(&loads).zip(costs).zip(buffers)
        {
            ranks.push(RankPrediction {
                rank,
                compute_ms: cost.compute_ms,
                communication_ms: cost.communication_ms,
                memory_bytes: memory_bytes(loads)?,
                buffer_bytes,
                reserve_bytes,
            });
        }
        Ok(Self {
            format_version: KIND.version,
            search: search.to_owned(),
            cost_model: cost_model.id().to_owned(),
            global_batch_size,
            topology: topology.clone(),
            max_cost_ms: ranks.iter().map(RankPrediction::cost_ms).fold(0.0, f64::max),
            notes: cost_model.notes(&loads),
            ranks,
            tables: placed,
        })
    }

    /// Returns the shards of every rank, in the plan's order of tables.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a shard is on a rank that the plan's topology does not have, or belongs to none of
    /// `tables`.
    pub fn loads<'a>(&'a self, tables: &'a [Table]) -> Result<Vec<Vec<ShardLoad<'a>>>> {
        loads_by_rank(tables, &self.tables, &self.topology, self.samples_per_rank())
    }
}

/// Returns the shards of every rank, in table order, for steps of `batch_size` samples per rank.
pub(crate) fn loads_by_rank<'a>(
    tables: &'a [Table],
    placed: &'a [TablePlan],
    topology: &'a Topology,
    batch_size: u64,
) -> Result<Vec<Vec<ShardLoad<'a>>>> {
    let by_name: HashMap<&str, &Table> = tables.iter().map(|table| (table.name.as_str(), table)).collect();
    let mut loads = vec![Vec::new(); topology.ranks as usize];
    for plan in placed {
        let Some(&table) = by_name.get(plan.name.as_str()) else {
            return Err(Error::plan(format!(
                "it places table `{}`, which is not among the tables",
                plan.name
            )));
        };
        let nodes = || plan.shards.iter().map(|shard| shard.rank / topology.ranks_per_node.max(1));
        let within_node = nodes().min() == nodes().max();
        for shard in &plan.shards {
            let Some(rank) = loads.get_mut(shard.rank as usize) else {
                return Err(no_such_rank(&plan.name, shard.rank, topology.ranks));
            };
            let sharding_type = plan.sharding_type;
            rank.push(ShardLoad { table, sharding_type, shard, topology, batch_size, within_node });
        }
    }
    Ok(loads)
}

/// Returns the bytes of a rank's shards with their optimizer state.
pub(crate) fn memory_bytes(loads: &[ShardLoad<'_>]) -> Result<u64> {
    let mut sum = 0u64;
    for load in loads {
        let bytes = load.table.shard_bytes(load.shard.row_count(), load.shard.column_count())?;
        // A saturated sum exceeds every memory limit.
        sum = sum.saturating_add(bytes);
    }
    Ok(sum)
}

/// Returns the buffer bytes of every rank: the average, and the additional bytes for batches above the mean. They
/// include the buffers to serve the rank's own shards, and to request from all shards. A saturated sum exceeds every
/// memory limit.
pub(crate) fn buffer_bytes(ranks: &[Vec<ShardLoad<'_>>]) -> Vec<[u64; 2]> {
    let sums = |of: &dyn Fn(&ShardLoad<'_>) -> BufferBytes| -> Vec<u64> {
        let of_rank =
            |loads: &Vec<ShardLoad<'_>>| loads.iter().map(of).fold(BufferBytes::default(), BufferBytes::plus);
        let of_ranks: Vec<BufferBytes> = ranks.iter().map(of_rank).collect();
        let asking = of_ranks.iter().map(|rank| rank.asking).fold(0, u64::saturating_add);
        of_ranks.iter().map(|rank| rank.serving.saturating_add(asking)).collect()
    };
    let mean = sums(&|load| load.buffers());
    let reserved = sums(&|load| load.reserved_buffers());
    mean.into_iter().zip(reserved).map(|(mean, reserved)| [mean, reserved.saturating_sub(mean)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::analytic::AnalyticCost;
    use crate::search::Search;
    use crate::search::greedy::Greedy;

    /// Costs that are easy to add up: 1 ms of computation and 0.5 ms of communication per table.
    struct PerShard;

    impl CostModel for PerShard {
        fn id(&self) -> &str {
            "per_shard"
        }

        fn shard_ms(&self, _: &ShardLoad<'_>) -> Result<f64> {
            Ok(1.0)
        }

        fn communication_ms(&self, ranks: &[crate::cost::RankLoad], _: &Topology, _: bool) -> Vec<f64> {
            ranks.iter().map(|rank| 0.5 * rank.compute_ms).collect()
        }
    }

    fn plan() -> Plan {
        let tables = [Table::new("a", 30, 4), Table::new("b", 20, 4), Table::new("c", 10, 4)];
        Greedy::BySize.plan(&tables, &Topology::h100(2, 1 << 20).unwrap(), &PerShard, 16).unwrap()
    }

    #[test]
    fn the_bottleneck_is_the_most_expensive_rank() {
        let plan = plan();
        assert_eq!(plan.max_cost_ms, 3.0);
        assert_eq!(
            plan.bottleneck().unwrap(),
            &RankPrediction {
                rank: 1,
                compute_ms: 2.0,
                communication_ms: 1.0,
                memory_bytes: 600,
                // Each table is requested by one rank and served by the other.
                buffer_bytes: 3 * (8 * (8 + 8 + 2 * 4 * 4)),
                reserve_bytes: 0,
            }
        );
        assert_eq!(plan.ranks[0].memory_bytes, 30 * (4 + 1) * 4);
    }

    /// More ranks divide the samples of a step: the total computation remains the same, and each rank computes less.
    #[test]
    fn a_global_batch_is_divided_among_the_ranks() {
        let tables: Vec<Table> = (0..8).map(|i| Table::new(format!("t{i}"), 10_000, 64)).collect();
        let of = |ranks| {
            let topology = Topology::h100(ranks, 1 << 30).unwrap();
            Greedy::BySize.plan(&tables, &topology, &AnalyticCost, 4_096).unwrap()
        };
        let [two, four] = [2, 4].map(of);
        let compute = |plan: &Plan| plan.ranks.iter().map(|rank| rank.compute_ms).sum::<f64>();
        assert!((compute(&two) / compute(&four) - 1.0).abs() < 1e-9, "{two:?} {four:?}");
        assert!(four.max_cost_ms < 0.6 * two.max_cost_ms, "{two:?} {four:?}");
        assert_eq!([two.samples_per_rank(), four.samples_per_rank()], [2_048, 1_024]);
        // Each rank requests for fewer samples, from more ranks.
        assert!(four.ranks[0].buffer_bytes < two.ranks[0].buffer_bytes, "{two:?} {four:?}");
    }

    #[test]
    fn a_plan_is_loaded_as_stored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.json");
        plan().store(&path).unwrap();
        assert_eq!(Plan::load(&path).unwrap(), plan());
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plan.json");
        plan().store(&path).unwrap();
        let whole = fs_err::read_to_string(&path).unwrap();
        let refused = |text: &str| {
            fs_err::write(&path, text).unwrap();
            Plan::load(&path).unwrap_err().to_string()
        };
        assert!(refused(&whole[..whole.len() / 2]).contains("plan.json`: EOF while parsing"));
        assert!(
            refused(&whole.replacen("\"format_version\": 2", "\"format_version\": 3", 1))
                .contains("format version 3")
        );
        assert!(refused(&whole.replace("table_wise", "diagonal")).contains("unknown variant `diagonal`"));
        let error = refused(&whole.replacen("\"max_cost_ms\": 3.0", "\"max_cost_ms\": 2.0", 1));
        assert!(error.contains("plan.json`: the plan is not valid: `max_cost_ms` is 2"), "{error}");
        assert!(error.ends_with("\n  hint: make the plan again with `onefold-shard plan`"), "{error}");
    }

    #[test]
    fn a_shard_on_no_rank_cannot_be_priced() {
        let tables = [Table::new("a", 30, 4)];
        let topology = Topology::h100(2, 1 << 20).unwrap();
        let placed = |name: &str, rank| vec![TablePlan::table_wise(&Table::new(name, 30, 4), rank)];
        let error = Plan::predict(
            "test",
            &tables,
            placed("a", 2),
            &topology,
            &PerShard,
            topology.global_batch_size(8),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("table `a` has a shard on rank 2, the topology has ranks 0 to 1"), "{error}");
        let error = Plan::predict(
            "test",
            &tables,
            placed("z", 0),
            &topology,
            &PerShard,
            topology.global_batch_size(8),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("it places table `z`, which is not among the tables"), "{error}");
    }
}
