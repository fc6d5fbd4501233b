//! The machines a plan is for, and the file that describes them: `topology.json`.

use std::fmt;
use std::path::Path;

use onefold_datasets::units;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::files::{self, FileKind};
use crate::{Error, Result};

const KIND: FileKind = FileKind {
    version: 1,
    hint: "write a new one with `onefold-shard topology --ranks N --memory SIZE --out FILE`, or correct it",
};

/// The most ranks a topology can have.
pub const MAX_RANKS: u32 = 65_536;

/// The ranks that train together: how many, what they hold, how fast they move bytes.
///
/// All ranks are alike. Bandwidths are of one rank, in bytes per second and one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Version of this format.
    pub format_version: u32,
    /// All ranks, numbered from 0.
    pub ranks: u32,
    /// Ranks of one machine; divides `ranks`.
    pub ranks_per_node: u32,
    /// Bytes that a rank has for tables, their optimizer state and the buffers to exchange their vectors, after what
    /// the rest of training takes. In the file a number, or a text such as `"32GiB"`.
    #[serde(deserialize_with = "bytes")]
    pub memory_bytes: u64,
    /// Bandwidth of the memory that holds the tables.
    #[serde(deserialize_with = "bandwidth")]
    pub memory_bandwidth_bytes_per_second: f64,
    /// Bandwidth between two ranks of one machine.
    #[serde(deserialize_with = "bandwidth")]
    pub intra_node_bandwidth_bytes_per_second: f64,
    /// Bandwidth between two ranks of different machines.
    #[serde(deserialize_with = "bandwidth")]
    pub inter_node_bandwidth_bytes_per_second: f64,
    /// The hardware of a rank, as `onefold-train profile` names it; learned cost models are for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<String>,
}

impl Topology {
    /// HBM3 of an H100 SXM: 3.35 TB/s (NVIDIA H100 data sheet).
    pub const H100_MEMORY_BANDWIDTH: f64 = 3.35e12;
    /// NVLink 4 of an H100 SXM: 900 GB/s in both directions together (NVIDIA H100 data sheet).
    pub const H100_INTRA_NODE_BANDWIDTH: f64 = 4.5e11;
    /// One 400 Gb/s network port per GPU, as in a DGX H100.
    pub const H100_INTER_NODE_BANDWIDTH: f64 = 5e10;
    /// GPUs in one DGX H100.
    pub const H100_RANKS_PER_NODE: u32 = 8;

    /// `ranks` GPUs of the H100 class with `memory_bytes` each for tables: one machine for up to 8 ranks,
    /// machines of 8 beyond.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
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
        };
        topology.validate()?;
        Ok(topology)
    }

    /// Reads and checks a topology file.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if it is missing, malformed, of another version or holds an impossible value.
    pub fn load(path: &Path) -> Result<Self> {
        let topology: Self = files::load(path, &KIND)?;
        topology.validate().map_err(|error| error.in_file(path))?;
        Ok(topology)
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written; an old file is then untouched.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store(path, self)
    }

    /// Machines.
    pub fn nodes(&self) -> u32 {
        self.ranks / self.ranks_per_node.max(1)
    }

    /// The bandwidth at which a rank exchanges data with all others: that of the slowest link it uses.
    pub fn exchange_bandwidth_bytes_per_second(&self) -> f64 {
        if self.ranks > self.ranks_per_node {
            self.inter_node_bandwidth_bytes_per_second
        } else {
            self.intra_node_bandwidth_bytes_per_second
        }
    }

    /// Checks what serde cannot.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the version is another, there is no rank or more than [`MAX_RANKS`], the ranks
    /// do not fill whole machines, a rank has no memory, or a bandwidth is not a positive number.
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
        if self.memory_bytes == 0 || i64::try_from(self.memory_bytes).is_err() {
            let message = format!("`memory_bytes` is {}", self.memory_bytes);
            return Err(Error::invalid(message, "give the bytes that a rank has for tables, like \"32GiB\""));
        }
        let bandwidths = [
            ("memory_bandwidth_bytes_per_second", self.memory_bandwidth_bytes_per_second),
            ("intra_node_bandwidth_bytes_per_second", self.intra_node_bandwidth_bytes_per_second),
            ("inter_node_bandwidth_bytes_per_second", self.inter_node_bandwidth_bytes_per_second),
        ];
        for (name, bandwidth) in bandwidths {
            if !bandwidth.is_finite() || bandwidth < 1.0 {
                let message = format!("`{name}` is {bandwidth}");
                return Err(Error::invalid(message, "give bytes per second, at least 1, like 4.5e11"));
            }
        }
        Ok(())
    }
}

/// A number of bytes, or a text that [`units::parse_bytes`] knows.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    struct Bytes;
    impl<'de> Visitor<'de> for Bytes {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of bytes or a size like \"32GiB\", the same for all ranks")
        }

        fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<u64, E> {
            Ok(bytes)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<u64, E> {
            units::parse_bytes(text).map_err(E::custom)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<u64, A::Error> {
            Err(de::Error::custom(UNEQUAL))
        }
    }
    deserializer.deserialize_any(Bytes)
}

/// Why there is no list of ranks' sizes or speeds.
const UNEQUAL: &str =
    "these ranks are unequal, and plans are for ranks that are alike: give one number, the least of them";

/// A number; not one for each rank.
fn bandwidth<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    struct Bandwidth;
    impl<'de> Visitor<'de> for Bandwidth {
        type Value = f64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number of bytes per second, the same for all ranks")
        }

        fn visit_f64<E: de::Error>(self, bandwidth: f64) -> Result<f64, E> {
            Ok(bandwidth)
        }

        fn visit_u64<E: de::Error>(self, bandwidth: u64) -> Result<f64, E> {
            Ok(bandwidth as f64)
        }

        fn visit_i64<E: de::Error>(self, bandwidth: i64) -> Result<f64, E> {
            Ok(bandwidth as f64)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<f64, A::Error> {
            Err(de::Error::custom(UNEQUAL))
        }
    }
    deserializer.deserialize_any(Bandwidth)
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
        // Ranks of unequal memory are not planned for.
        let unequal = parse("[1024, 2048]").unwrap_err().to_string();
        assert!(
            unequal.starts_with("these ranks are unequal") && unequal.contains("the least of them"),
            "{unequal}"
        );
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
    fn ranks_of_one_machine_use_its_links_and_ranks_of_many_the_network() {
        assert_eq!(Topology::h100(8, 1).unwrap().exchange_bandwidth_bytes_per_second(), 4.5e11);
        assert_eq!(Topology::h100(16, 1).unwrap().exchange_bandwidth_bytes_per_second(), 5e10);
        assert!(Topology::h100(12, 1).is_err());
    }
}
