//! The memory that a model needs, computed before anything is allocated, and the memory that is available.

use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::units::format_bytes;
use onefold_ikjt::reader::DEFAULT_MEMORY_LIMIT;
use onefold_sharding::{FeatureConfig, TableConfig, tables_of};
use serde::Serialize;
use sysinfo::System;

use crate::config::ParameterCount;
use crate::distributed::Collectives;
use crate::embedding::{Placement, usage_bytes};
use crate::{Result, TrainConfig};

/// The number of parameters of a model, and the memory that training it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ModelSize {
    /// The number of parameters.
    pub parameters: ParameterCount,
    /// The bytes of this rank's parameters, their optimizer state, the gradient of the dense part, and three
    /// bits per table row.
    pub model_bytes: u64,
    /// The bytes that the reader may use for row groups and batches.
    pub reader_bytes: u64,
}

impl ModelSize {
    /// Computes the size of one rank's part of a model. The reader gets the rest of `limit`, at most 1 GiB.
    ///
    /// # Errors
    ///
    /// [`Fault`] if the part does not fit into `limit`.
    pub(crate) fn within(
        config: &TrainConfig,
        parameters: ParameterCount,
        features: &[FeatureConfig],
        placement: &Placement,
        limit: Option<u64>,
    ) -> Result<Self> {
        let (tables, _) = tables_of(features);
        let own = placement.shards.iter().filter(|shard| shard.rank == placement.collectives.rank());
        let shards: Vec<TableConfig> = own
            .map(|shard| TableConfig {
                rows: shard.rows.end - shard.rows.start,
                dim: shard.columns.end - shard.columns.start,
                ..tables[shard.table].clone()
            })
            .collect();
        let usage: u64 = shards.iter().map(|shard| usage_bytes(shard.rows)).sum();
        let model_bytes = parameters.with_tables(config, &shards).bytes() + 4 * parameters.dense + usage;
        let left = limit.map_or(Ok(DEFAULT_MEMORY_LIMIT), |limit| {
            let left = limit.checked_sub(model_bytes).filter(|left| *left > 0);
            left.ok_or_else(|| {
                let (needed, limit) = (format_bytes(model_bytes), format_bytes(limit));
                let message = format!("the model takes {needed}, and the memory limit is {limit}");
                Fault::new(Kind::Failed, message).hint(text![
                    "raise ",
                    option("memory_limit"),
                    ", or give the tables fewer rows or a smaller `dim`"
                ])
            })
        });
        Ok(Self { parameters, model_bytes, reader_bytes: left?.min(DEFAULT_MEMORY_LIMIT) })
    }
}

/// Checks that this machine, which has `available` bytes of free memory, can hold the models of all of its
/// ranks. `model_bytes` is the size of this rank's part. Every rank must call it.
///
/// # Errors
///
/// [`Fault`] on the lowest rank of such a machine;
/// [`Error::ReportedElsewhere`](crate::Error::ReportedElsewhere) on the other ranks.
pub(crate) fn check_machine(model_bytes: u64, collectives: &dyn Collectives, available: u64) -> Result<()> {
    let own = (machine(), model_bytes, available);
    let all: Vec<(String, u64, u64)> = collectives.gather_json(&own)?;
    let here: Vec<_> = all.iter().filter(|(machine, ..)| *machine == own.0).collect();
    let needed = here.iter().fold(0, |sum: u64, (_, needed, _)| sum.saturating_add(*needed));
    let available = here.iter().map(|(.., available)| *available).min().unwrap_or(available);
    if needed <= available {
        return collectives.agree(Ok(()));
    }
    let on = match here.len() {
        1 => "this machine".to_owned(),
        ranks => format!("the {ranks} ranks of this machine"),
    };
    let (needed, available) = (format_bytes(needed), format_bytes(available));
    let message = format!("the model takes {needed} on {on}, which has {available} of memory left");
    let hint = text![
        "give the tables fewer rows, a smaller `dim` or `dtype = \"bf16\"`, or divide them among more machines; if it \
         does fit, say so with ",
        option("memory_limit"),
        " of `run`"
    ];
    collectives.agree(Err(Fault::new(Kind::Failed, message).hint(hint).into()))
}

/// Returns the bytes that processes can still allocate: the machine's available memory, or the rest of this
/// process's control group if that is less.
pub fn available() -> u64 {
    let mut system = System::new();
    system.refresh_memory();
    // The usage of a control group excludes pages of files, which the kernel can drop.
    let left = system.cgroup_limits().map(|limits| limits.total_memory.saturating_sub(limits.rss));
    system.available_memory().min(left.unwrap_or(u64::MAX))
}

/// Returns a name that is unique per machine and per container, because the memory of a container may be
/// limited.
fn machine() -> String {
    let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{} {}", System::host_name().unwrap_or_default(), boot.trim())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Error;
    use crate::distributed::threads;

    #[test]
    fn ranks_of_a_machine_share_its_memory() {
        let check = |bytes: [u64; 3], available: u64| -> Vec<Result<()>> {
            let ranks = threads(3, Duration::from_secs(300)).into_iter().zip(bytes);
            std::thread::scope(|scope| {
                let checks: Vec<_> = ranks
                    .map(|(rank, bytes)| scope.spawn(move || check_machine(bytes, &rank, available)))
                    .collect();
                checks.into_iter().map(|check| check.join().unwrap()).collect()
            })
        };
        assert!(check([4 << 30, 1 << 30, 3 << 30], 8 << 30).iter().all(Result::is_ok));
        let results = check([4 << 30, 1 << 30, 4 << 30], 8 << 30);
        assert_eq!(
            results[0].as_ref().unwrap_err().to_string(),
            "the model takes 9.0 GiB on the 3 ranks of this machine, which has 8.0 GiB of memory left\n  hint: give the tables fewer \
             rows, a smaller `dim` or `dtype = \"bf16\"`, or divide them among more machines; if it does fit, say so with the option \
             `memory_limit` of `run`"
        );
        assert!(matches!(results[2], Err(Error::ReportedElsewhere { rank: 0, .. })), "{results:?}");
        let available = available();
        assert!(available > 1 << 20 && available < 1 << 50, "{available}");
    }
}
