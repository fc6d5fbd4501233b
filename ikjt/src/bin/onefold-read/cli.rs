//! The command line of `onefold-read`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use onefold_datasets::process::available_threads;
use onefold_datasets::units::parse_bytes;
use onefold_datasets::{PartitionFilter, Snapshot};
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Dedupe, Reader, ReaderOptions, Shard, Shuffle};
use onefold_terminal::OutputOptions;

/// Read datasets as deduplicated batches
#[derive(Debug, Parser)]
#[command(name = "onefold-read", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show samples of a batch, and how the batch is deduplicated
    ///
    /// Example: onefold-read head dataset --batch-size 512 --samples 5
    Head {
        #[command(flatten)]
        reading: Reading,
        /// Samples to show
        #[arg(long, default_value_t = 5)]
        samples: usize,
        /// Which batch, counted from 0
        #[arg(long, default_value_t = 0)]
        batch: u64,
    },
    /// Read everything once and report the rate, where the time went, the dedupe factors and the memory
    ///
    /// Example: onefold-read bench dataset --batch-size 2048 --dedupe window --threads 2 --json
    Bench {
        #[command(flatten)]
        reading: Reading,
    },
    /// Read everything once and print a digest of the samples, which does not depend on the way they are read
    ///
    /// Layout, deduplication, threads, memory, shuffling and the number of ranks change no digest; the digests of all ranks
    /// add up. Of a whole dataset without preprocessing it is the digest that `onefold-ingest verify` prints.
    ///
    /// Example: onefold-read digest dataset --dedupe window --by-step --json
    Digest {
        #[command(flatten)]
        reading: Reading,
        /// Also print the digest of every batch
        #[arg(long)]
        by_step: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Reading {
    /// The dataset: a path or a URL, as `s3://bucket/folder`
    pub(crate) dataset: PathBuf,
    /// The number of the snapshot to read [default: the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// Samples per batch [default: 2048, or all samples if they are fewer]
    #[arg(long)]
    batch_size: Option<usize>,
    /// Whether rows are deduplicated
    #[arg(long, value_enum, default_value_t = DedupeArgument::Exact)]
    dedupe: DedupeArgument,
    /// A pipeline that every batch goes through
    #[arg(long, value_name = "FILE")]
    preprocess: Option<PathBuf>,
    /// Threads that decode, deduplicate and preprocess [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Memory for row groups and batches, as `512MiB`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "1GiB")]
    memory_limit: u64,
    /// Which partitions, as `split=train,date>=2024-05-01` [default: all]
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    pub(crate) partitions: PartitionFilter,
    /// Sparse features to read, joined by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// Shuffle row groups and sessions with this seed [default: file order]
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,
    /// Row groups whose sessions are mixed with each other
    #[arg(long, value_name = "N", default_value_t = 4, requires = "shuffle")]
    shuffle_row_groups: usize,
    /// Which shard of the samples, as `RANK/RANKS` with ranks from 0 [default: all of them]
    #[arg(long, value_name = "RANK/RANKS", value_parser = parse_shard, default_value = "0/1", hide_default_value = true)]
    shard: Shard,
    /// Rows of embedding tables, as `user_id=200000`, joined by commas: an id outside them is an error
    #[arg(long, value_name = "TABLES", value_delimiter = ',', value_parser = parse_table)]
    table_rows: Vec<(String, u64)>,
    /// Do not compare the files' checksums with the snapshot's
    #[arg(long)]
    no_verify: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DedupeArgument {
    /// Every sample carries its lists
    Off,
    /// Every distinct row of a feature group once
    Exact,
    /// Every distinct row once, and rows that overlap share their ids
    Window,
}

impl Reading {
    pub(crate) fn open(&self) -> anyhow::Result<Reader> {
        Ok(Reader::open(&self.dataset, self.options()?)?)
    }

    /// With batches that carry their samples' times.
    pub(crate) fn open_with_times(&self) -> anyhow::Result<Reader> {
        Ok(Reader::open(&self.dataset, ReaderOptions { timestamps: true, ..self.options()? })?)
    }

    fn options(&self) -> anyhow::Result<ReaderOptions> {
        let preprocess = self.preprocess.as_deref().map(PreprocessConfig::load).transpose()?;
        Ok(ReaderOptions {
            dedupe: match self.dedupe {
                DedupeArgument::Off => Dedupe::Off,
                DedupeArgument::Exact => Dedupe::Exact,
                DedupeArgument::Window => Dedupe::Window,
            },
            threads: self.threads(),
            snapshot: self.at,
            partitions: self.partitions.clone(),
            features: self.features.clone(),
            shuffle: self.shuffle.map(|seed| Shuffle { seed, row_groups: self.shuffle_row_groups }),
            shard: self.shard,
            memory_limit: self.memory_limit,
            verify: !self.no_verify,
            preprocess,
            table_rows: BTreeMap::from_iter(self.table_rows.iter().cloned()),
            ..ReaderOptions::new(self.batch_size()?)
        })
    }

    pub(crate) fn batch_size(&self) -> anyhow::Result<usize> {
        if let Some(size) = self.batch_size {
            return Ok(size);
        }
        let samples = Snapshot::load_at(&self.dataset, self.at)?.chosen_samples(&self.partitions)?;
        let shard = self.shard.range(samples);
        Ok(usize::try_from(shard.end - shard.start).unwrap_or(usize::MAX).clamp(1, 2048))
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.map_or_else(available_threads, usize::from)
    }

    pub(crate) fn memory_limit(&self) -> u64 {
        self.memory_limit
    }
}

fn parse_shard(text: &str) -> Result<Shard, String> {
    let shard = text.split_once('/').and_then(|(rank, world_size)| {
        Some(Shard { rank: rank.parse().ok()?, world_size: world_size.parse().ok()? })
    });
    let shard = shard.filter(|shard| shard.rank < shard.world_size);
    shard.ok_or_else(|| "expected `RANK/RANKS` with a rank below the ranks, as `0/8`".to_owned())
}

fn parse_table(text: &str) -> Result<(String, u64), String> {
    let table = text.split_once('=').and_then(|(name, rows)| Some((name.to_owned(), rows.parse().ok()?)));
    table
        .filter(|(_, rows)| *rows > 0)
        .ok_or_else(|| "expected `FEATURE=ROWS`, as `user_id=200000`".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn shards_and_tables_are_read_or_refused() {
        assert_eq!(parse_shard("3/8"), Ok(Shard { rank: 3, world_size: 8 }));
        for wrong in ["8/8", "1", "a/2", "-1/2", "0/0"] {
            assert!(parse_shard(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_table("user_id=5"), Ok(("user_id".to_owned(), 5)));
        for wrong in ["user_id", "user_id=", "user_id=0", "user_id=-1"] {
            assert!(parse_table(wrong).is_err(), "{wrong}");
        }
    }
}
