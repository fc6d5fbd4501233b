//! The machines for which a plan is made, and the file that describes them: `topology.json`.

use std::path::Path;

use onefold_base::fault::{Fault, Kind};
use onefold_base::units;
use serde::de::{self, Deserializer, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::{self, FileKind};

const KIND: FileKind = FileKind {
    name: files::TOPOLOGY,
    version: 1,
    hint: "write a new one with `onefold-shard topology --ranks N --memory SIZE --out FILE`, or correct it",
};

/// The largest number of ranks in a topology.
pub const MAX_RANKS: u32 = 65_536;

/// The ranks that train together: their number, their memory and their bandwidths.
///
/// All ranks are alike, unless there are `groups`. Bandwidths are those of one rank, in bytes per second and per
/// direction. Use [`memory_of`](Self::memory_of), [`memory_bandwidth_of`](Self::memory_bandwidth_of) and
/// [`hardware_of`](Self::hardware_of) to get the properties of a rank, because they consider the groups. The fields
/// apply to ranks whose group does not set the property.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Version of this format.
    pub format_version: u32,
    /// The number of ranks, which are numbered from 0.
    pub ranks: u32,
    /// The number of ranks per machine. It divides `ranks`.
    pub ranks_per_node: u32,
    /// The bytes that a rank has for tables, their optimizer state and exchange buffers, without the memory for the
    /// rest of the training. In the file it is a number, or a text such as `"32GiB"`.
    #[serde(deserialize_with = "bytes")]
    pub memory_bytes: u64,
    /// The bandwidth of the memory that holds the tables.
    #[serde(deserialize_with = "bandwidth")]
    pub memory_bandwidth_bytes_per_second: f64,
    /// The bandwidth between two ranks on one machine.
    #[serde(deserialize_with = "bandwidth")]
    pub intra_node_bandwidth_bytes_per_second: f64,
    /// The bandwidth between two ranks on different machines.
    #[serde(deserialize_with = "bandwidth")]
    pub inter_node_bandwidth_bytes_per_second: f64,
    /// The hardware of a rank, as named by `onefold-train-tools profile`. A learned cost model applies to one kind of
    /// hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<String>,
    /// Groups of ranks that differ, in the order of the ranks; empty if all ranks are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<RankGroup>,
}

/// Consecutive ranks that are alike. A property that a group does not set is taken from the topology.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankGroup {
    /// The number of ranks.
    pub ranks: u32,
    /// The bytes that each rank has for tables, as in [`Topology::memory_bytes`].
    #[serde(default, deserialize_with = "some_bytes", skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The memory bandwidth of each rank, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bandwidth_bytes_per_second: Option<f64>,
    /// The hardware of each rank, as in [`Topology::hardware`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<String>,
}

impl Topology {
    /// The bandwidth of an H100 SXM's HBM3: 3.35 TB/s (NVIDIA H100 data sheet).
    pub const H100_MEMORY_BANDWIDTH: f64 = 3.35e12;
    /// The bandwidth of an H100 SXM's NVLink 4 in one direction: half of 900 GB/s (NVIDIA H100 data sheet).
    pub const H100_INTRA_NODE_BANDWIDTH: f64 = 4.5e11;
    /// The bandwidth of one 400 Gb/s network port per GPU, as in a DGX H100.
    pub const H100_INTER_NODE_BANDWIDTH: f64 = 5e10;
    /// The number of GPUs in a DGX H100.
    pub const H100_RANKS_PER_NODE: u32 = 8;

    /// Returns a topology of `ranks` GPUs of the H100 class with `memory_bytes` each for tables: one machine for up
    /// to 8 ranks, and machines of 8 ranks beyond.
    ///
    /// # Errors
    ///
    /// See [`validate`](Self::validate).
    pub fn h100(ranks: u32, memory_bytes: u64) -> Result<Self> {
        let topology = Self {
            format_version: KIND.version,
            ranks,
            ranks_per_node: ranks.min(Self::H100_RANKS_PER_NODE),
            memory_bytes,
            memory_bandwidth_bytes_per_second: Self::H100_MEMORY_BANDWIDTH,
            intra_node_bandwidth_bytes_per_second: Self::H100_INTRA_NODE_BANDWIDTH,
            inter_node_bandwidth_bytes_per_second: Self::H100_INTER_NODE_BANDWIDTH,
            hardware: None,
            groups: Vec::new(),
        };
        topology.validate()?;
        Ok(topology)
    }

    /// Reads and checks a topology file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing, malformed, of another version or contains an invalid value.
    pub fn load(path: &Path) -> Result<Self> {
        let topology: Self = files::load(path, &KIND)?;
        topology.validate().map_err(|error| error.in_file(path))?;
        Ok(topology)
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An old file remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store(path, self)
    }

    fn group_of(&self, rank: u32) -> Option<&RankGroup> {
        let mut end = 0u64;
        self.groups.iter().find(|group| {
            end += u64::from(group.ranks);
            u64::from(rank) < end
        })
    }

    /// Returns the bytes that a rank has for tables, their optimizer state and exchange buffers.
    pub fn memory_of(&self, rank: u32) -> u64 {
        self.group_of(rank).and_then(|group| group.memory_bytes).unwrap_or(self.memory_bytes)
    }

    /// Returns the memory of all ranks in bytes, or `u64::MAX` if the sum overflows.
    pub fn total_memory_bytes(&self) -> u64 {
        (0..self.ranks).map(|rank| self.memory_of(rank)).fold(0, u64::saturating_add)
    }

    /// Returns the error for the first rank whose memory is smaller than its request buffers, which take
    /// `asking_bytes` on every rank. Returns `None` if all ranks or no ranks have enough memory.
    pub(crate) fn cannot_ask(&self, asking_bytes: u64) -> Option<Error> {
        let can_ask = |rank: &u32| self.memory_of(*rank) >= asking_bytes;
        let rank = (0..self.ranks).find(|rank| !can_ask(rank))?;
        let message = format!(
            "rank {rank} has {}, and its buffers to ask for the other ranks' rows and vectors need {}",
            units::format_bytes(self.memory_of(rank)),
            units::format_bytes(asking_bytes)
        );
        let hint = "raise `memory_bytes` in its group of the topology, leave the rank out, or lower \
                    `global_batch_size` in the tables' file";
        let error = Error::NoRoom(Fault::new(Kind::Failed, message).hint(hint));
        (0..self.ranks).any(|rank| can_ask(&rank)).then_some(error)
    }

    /// Returns the memory bandwidth of a rank, in bytes per second.
    pub fn memory_bandwidth_of(&self, rank: u32) -> f64 {
        let own = self.group_of(rank).and_then(|group| group.memory_bandwidth_bytes_per_second);
        own.unwrap_or(self.memory_bandwidth_bytes_per_second)
    }

    /// Returns the hardware of a rank, if the topology states it.
    pub fn hardware_of(&self, rank: u32) -> Option<&str> {
        let own = self.group_of(rank).and_then(|group| group.hardware.as_deref());
        own.or(self.hardware.as_deref())
    }

    /// Returns the kind of every rank. Ranks with the same memory bandwidth and hardware have the same kind, and
    /// kinds are numbered from 0 in the order of the ranks. A shard costs the same on all ranks of a kind.
    pub(crate) fn kinds(&self) -> Vec<usize> {
        let mut known: Vec<(f64, Option<&str>)> = Vec::new();
        let mut kinds = Vec::with_capacity(self.ranks as usize);
        for rank in 0..self.ranks {
            let own = (self.memory_bandwidth_of(rank), self.hardware_of(rank));
            let kind = known.iter().position(|other| *other == own).unwrap_or(known.len());
            if kind == known.len() {
                known.push(own);
            }
            kinds.push(kind);
        }
        kinds
    }

    /// Returns the number of samples of a global batch that a rank processes. If the batch cannot be divided evenly,
    /// this is the largest number.
    pub fn samples_per_rank(&self, global_batch_size: u64) -> u64 {
        global_batch_size.div_ceil(u64::from(self.ranks.max(1)))
    }

    /// Returns the global batch size for `samples_per_rank` samples per rank, or `u64::MAX` if it overflows.
    pub fn global_batch_size(&self, samples_per_rank: u64) -> u64 {
        samples_per_rank.saturating_mul(u64::from(self.ranks))
    }

    /// Returns the number of machines.
    pub fn nodes(&self) -> u32 {
        self.ranks / self.ranks_per_node.max(1)
    }

    /// Checks the properties that deserialisation does not check.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the version is not supported, the number of ranks is 0 or above [`MAX_RANKS`], the ranks
    /// do not fill whole machines, a rank has no memory, a bandwidth is not a positive number, or the groups do not
    /// contain all ranks.
    pub fn validate(&self) -> Result<()> {
        if self.format_version != KIND.version {
            let message = format!(
                "topology format version {}, this program reads {}",
                self.format_version, KIND.version
            );
            return Err(Error::invalid(message, KIND.hint));
        }
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            let message = format!("`ranks` is {}", self.ranks);
            return Err(Error::invalid(message, format!("give a number from 1 to {MAX_RANKS}")));
        }
        if self.ranks_per_node == 0 || !self.ranks.is_multiple_of(self.ranks_per_node) {
            let message =
                format!("{} ranks are not whole machines of {} ranks each", self.ranks, self.ranks_per_node);
            return Err(Error::invalid(message, "give a `ranks_per_node` that divides `ranks`"));
        }
        check_memory(self.memory_bytes, "")?;
        let bandwidths = [
            ("memory_bandwidth_bytes_per_second", self.memory_bandwidth_bytes_per_second),
            ("intra_node_bandwidth_bytes_per_second", self.intra_node_bandwidth_bytes_per_second),
            ("inter_node_bandwidth_bytes_per_second", self.inter_node_bandwidth_bytes_per_second),
        ];
        for (name, bandwidth) in bandwidths {
            check_bandwidth(name, bandwidth, "")?;
        }
        self.check_groups()
    }

    fn check_groups(&self) -> Result<()> {
        for (number, group) in self.groups.iter().enumerate() {
            let place = format!(" of group {number}");
            if group.ranks == 0 {
                let message = format!("`ranks`{place} is 0");
                return Err(Error::invalid(message, "leave the group out, or give the number of its ranks"));
            }
            if let Some(bytes) = group.memory_bytes {
                check_memory(bytes, &place)?;
            }
            if let Some(bandwidth) = group.memory_bandwidth_bytes_per_second {
                check_bandwidth("memory_bandwidth_bytes_per_second", bandwidth, &place)?;
            }
        }
        let ranks: u64 = self.groups.iter().map(|group| u64::from(group.ranks)).sum();
        if self.groups.is_empty() || ranks == u64::from(self.ranks) {
            return Ok(());
        }
        Err(Error::invalid(
            format!(
                "`groups` have {} together, and `ranks` is {}",
                units::count_of(ranks, "rank"),
                self.ranks
            ),
            "every rank belongs to one group: correct the groups' `ranks`, or add a group for those that are missing",
        ))
    }
}

fn check_memory(bytes: u64, place: &str) -> Result<()> {
    if bytes == 0 || i64::try_from(bytes).is_err() {
        let message = format!("`memory_bytes`{place} is {bytes}");
        return Err(Error::invalid(message, "give the bytes that a rank has for tables, like \"32GiB\""));
    }
    Ok(())
}

fn check_bandwidth(name: &str, bandwidth: f64, place: &str) -> Result<()> {
    if !bandwidth.is_finite() || bandwidth < 1.0 {
        let message = format!("`{name}`{place} is {bandwidth}");
        return Err(Error::invalid(message, "give bytes per second, at least 1, like 4.5e11"));
    }
    Ok(())
}

/// A value of one rank in a file.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number, or a size like \"32GiB\"")]
enum Value {
    Whole(u64),
    Number(f64),
    Text(String),
    /// A list with one value per rank, for which the error says how to describe unequal ranks.
    List(Vec<IgnoredAny>),
}

/// Returns the error for a list with one value per rank.
fn unequal<E: de::Error>(values: &[IgnoredAny]) -> E {
    let count = values.len();
    E::custom(format!(
        "these ranks are unequal: give one number here, in place of {count}, and what other ranks have in `groups`"
    ))
}

fn some_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    bytes(deserializer).map(Some)
}

/// Deserialises a number of bytes, or a text that [`units::parse_bytes`] reads.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Whole(bytes) => Ok(bytes),
        Value::Text(text) => units::parse_bytes(&text).map_err(de::Error::custom),
        Value::List(values) => Err(unequal(&values)),
        Value::Number(_) => Err(de::Error::custom("expected a number of bytes or a size like \"32GiB\"")),
    }
}

/// Deserialises a number of bytes per second.
fn bandwidth<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Whole(bandwidth) => Ok(bandwidth as f64),
        Value::Number(bandwidth) => Ok(bandwidth),
        Value::List(values) => Err(unequal(&values)),
        Value::Text(_) => Err(de::Error::custom("expected a number of bytes per second")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(memory: &str) -> Result<Topology, serde_json::Error> {
        serde_json::from_str(&format!(
            r#"{{"format_version": 1, "ranks": 2, "ranks_per_node": 2, "memory_bytes": {memory},
                "memory_bandwidth_bytes_per_second": 3.35e12, "intra_node_bandwidth_bytes_per_second": 450000000000,
                "inter_node_bandwidth_bytes_per_second": 5e10}}"#
        ))
    }

    #[test]
    fn memory_is_a_number_or_a_size() {
        assert_eq!(parse("34359738368").unwrap(), parse("\"32GiB\"").unwrap());
        assert_eq!(parse("\"32GiB\"").unwrap(), Topology::h100(2, 32 << 30).unwrap());
        assert!(parse("\"32 parsecs\"").unwrap_err().to_string().contains("`32 parsecs` is not a size"));
        assert!(parse("-5").unwrap_err().to_string().contains("expected a number of bytes or a size"));
        assert!(parse("1.5").is_err());
        // Ranks with unequal memory must be described as groups.
        let unequal = parse("[1024, 2048]").unwrap_err().to_string();
        assert!(
            unequal.starts_with("these ranks are unequal") && unequal.contains("in `groups`"),
            "{unequal}"
        );
    }

    #[test]
    fn groups_have_what_they_say_and_else_what_the_topology_says() {
        let text = r#"[{"ranks": 2}, {"ranks": 3, "memory_bytes": "1GiB", "hardware": "old"},
            {"ranks": 3, "memory_bandwidth_bytes_per_second": 1e12}]"#;
        let groups: Vec<RankGroup> = serde_json::from_str(text).unwrap();
        let topology = Topology { groups, ..Topology::h100(8, 2 << 30).unwrap() };
        topology.validate().unwrap();
        let memory: Vec<u64> = (0..8).map(|rank| topology.memory_of(rank) >> 30).collect();
        assert_eq!(memory, [2, 2, 1, 1, 1, 2, 2, 2]);
        assert_eq!(topology.total_memory_bytes(), 13 << 30);
        assert_eq!([4, 5].map(|rank| topology.memory_bandwidth_of(rank)), [3.35e12, 1e12]);
        // If no rank can request from the others, the error does not name a rank.
        assert!(topology.cannot_ask(1 << 30).is_none() && topology.cannot_ask(3 << 30).is_none());
        assert!(topology.cannot_ask(2 << 30).unwrap().to_string().starts_with("rank 2 has "));
        assert_eq!([1, 2, 5].map(|rank| topology.hardware_of(rank)), [None, Some("old"), None]);
        assert_eq!(topology.kinds(), [0, 0, 1, 1, 1, 2, 2, 2]);
        let text = serde_json::to_string(&topology).unwrap();
        assert_eq!(serde_json::from_str::<Topology>(&text).unwrap(), topology);
        assert!(!serde_json::to_string(&Topology::h100(8, 1).unwrap()).unwrap().contains("groups"));
        let refused = |change: fn(&mut Topology)| {
            let mut topology = topology.clone();
            change(&mut topology);
            topology.validate().unwrap_err().to_string()
        };
        let error = refused(|topology| topology.groups[1].ranks = 2);
        assert!(
            error.starts_with("`groups` have 7 ranks together, and `ranks` is 8\n  hint: every"),
            "{error}"
        );
        assert!(refused(|topology| topology.groups[0].ranks = 0).starts_with("`ranks` of group 0 is 0"));
        let error = refused(|topology| topology.groups[1].memory_bytes = Some(0));
        assert!(error.starts_with("`memory_bytes` of group 1 is 0\n  hint: give the bytes"), "{error}");
        let error = refused(|topology| topology.groups[2].memory_bandwidth_bytes_per_second = Some(0.5));
        assert!(error.starts_with("`memory_bandwidth_bytes_per_second` of group 2 is 0.5"), "{error}");
    }

    #[test]
    fn a_file_is_loaded_as_stored() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("topology.json");
        let topology = Topology::h100(16, 80 << 30).unwrap();
        topology.store(&path).unwrap();
        assert_eq!(Topology::load(&path).unwrap(), topology);
    }

    #[test]
    fn impossible_machines_are_refused() {
        let refused = |change: fn(&mut Topology)| {
            let mut topology = Topology::h100(4, 1 << 30).unwrap();
            change(&mut topology);
            topology.validate().unwrap_err().to_string()
        };
        assert!(Topology::h100(12, 1).is_err());
        assert!(refused(|topology| topology.ranks = 0).starts_with("`ranks` is 0\n  hint: "));
        assert!(refused(|topology| topology.ranks = u32::MAX).contains("give a number from 1 to 65536"));
        assert!(
            refused(|topology| topology.ranks_per_node = 3).contains("4 ranks are not whole machines of 3")
        );
        assert!(refused(|topology| topology.ranks_per_node = 0).contains("not whole machines of 0"));
        assert!(refused(|topology| topology.memory_bytes = 0).contains("`memory_bytes` is 0"));
        assert!(refused(|topology| topology.memory_bandwidth_bytes_per_second = f64::NAN).contains("is NaN"));
        assert!(refused(|topology| topology.intra_node_bandwidth_bytes_per_second = -1.0).contains("is -1"));
        assert!(refused(|topology| topology.inter_node_bandwidth_bytes_per_second = 0.0).contains("is 0"));
        assert!(refused(|topology| topology.format_version = 9).contains("format version 9"));
    }

    #[test]
    fn a_global_batch_is_divided_among_the_ranks() {
        let topology = Topology::h100(3, 1).unwrap();
        assert_eq!([6, 7, 0].map(|samples| topology.samples_per_rank(samples)), [2, 3, 0]);
        assert_eq!(topology.samples_per_rank(topology.global_batch_size(5)), 5);
        assert_eq!(topology.global_batch_size(u64::MAX), u64::MAX);
    }
}
