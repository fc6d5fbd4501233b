//! The command line of `onefold-read`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::open::load_snapshot;
use crate::preprocess::PreprocessConfig;
use crate::reader::{
    Checks, Dedupe, Rank, ReadRequest, Reader, ReaderOptions, Shuffle, Tail, Within, Workers,
};
use anyhow::bail;
use clap::{Parser, Subcommand};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_base::process::available_threads;
use onefold_base::units::parse_bytes;
use onefold_datasets::{PartitionFilter, parse_time};
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
        /// Number of samples to show
        #[arg(long, default_value_t = 5)]
        samples: usize,
        /// Number of the batch to show, from 0
        #[arg(long, default_value_t = 0)]
        batch: u64,
    },
    /// Read the dataset once, and report the rate, the time of each stage, the dedupe factors and the memory
    ///
    /// Example: onefold-read bench dataset --batch-size 2048 --threads 2 --json
    Bench {
        #[command(flatten)]
        reading: Reading,
    },
    /// Read the dataset once, and print a digest of its samples that does not depend on how they are read
    ///
    /// The digest does not depend on the layout, deduplication, threads, memory and shuffling. The digests of all ranks
    /// add up to the digest of the dataset, and to the digest of each step. For a whole dataset without preprocessing,
    /// it equals the digest that `onefold-ingest verify` prints.
    ///
    /// Example: onefold-read digest dataset --by-step --json
    Digest {
        #[command(flatten)]
        reading: Reading,
        /// Also print the digest of every step
        #[arg(long)]
        by_step: bool,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct Reading {
    /// Dataset: a path, a URL such as `s3://bucket/folder`, or `grpc://HOST:PORT/LOCATION` to read it through a
    /// preprocessing service
    pub(crate) dataset: PathBuf,
    /// Number of the snapshot to read [default: the newest]
    #[arg(long, value_name = "SNAPSHOT")]
    at: Option<u64>,
    /// Number of samples in a step, over all ranks [default: 2048 for every stream, or all samples if they are fewer]
    #[arg(long, visible_alias = "batch-size", value_name = "SAMPLES")]
    global_batch_size: Option<usize>,
    /// Index of this process, from 0, and number of processes that read the dataset together, as `RANK/RANKS`
    #[arg(long, value_name = "RANK/RANKS", value_parser = parse_rank, default_value = "0/1", hide_default_value = true)]
    rank: Rank,
    /// Number of streams into which the dataset's buckets are divided, at most the number of buckets. Steps depend on
    /// it, and not on the number of ranks [default: the number of ranks]
    #[arg(long)]
    streams: Option<usize>,
    /// Treatment of the last samples if streams have different numbers of samples
    #[arg(long, value_enum, default_value_t = Tail::Short)]
    tail: Tail,
    /// Deduplication of rows
    #[arg(long, value_enum, default_value_t = Dedupe::Window)]
    dedupe: Dedupe,
    /// Preprocessing pipeline for every batch
    #[arg(long, value_name = "FILE")]
    preprocess: Option<PathBuf>,
    /// Number of threads that decode, deduplicate and preprocess [default: all that the machine has]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Memory for row groups and batches, such as `512MiB`
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "1GiB")]
    pub(crate) memory_limit: u64,
    /// Partitions to read, such as `split=train,date>=2024-05-01` or `city="Paris, TX"` [default: all]
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    pub(crate) partitions: PartitionFilter,
    /// Sparse features to read, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// Time as of which labels with a delay are known, such as `2026-03-02T00:00:00Z`: a label that was final only later
    /// is 0 [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    labels_as_of: Option<i64>,
    /// Seed of a shuffle of the row groups and sessions of every stream [default: file order]
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,
    /// Number of row groups over which the sessions of a row group are spread
    #[arg(long, value_name = "N", default_value_t = 4, requires = "shuffle")]
    shuffle_row_groups: usize,
    /// Range within which a shuffle moves samples
    #[arg(long, value_enum, default_value_t = Within::Epoch, requires = "shuffle")]
    within: Within,
    /// Rows of embedding tables, such as `user_id=200000`, separated by commas; an id outside of them is an error
    #[arg(long, value_name = "TABLES", value_delimiter = ',', value_parser = parse_table)]
    table_rows: Vec<(String, u64)>,
    /// Do not compare the bytes of columns with their checksums
    #[arg(long)]
    no_verify: bool,
}

impl Reading {
    pub(crate) fn open(&self) -> anyhow::Result<Reader> {
        self.open_with(self.request()?)
    }

    fn open_with(&self, request: ReadRequest) -> anyhow::Result<Reader> {
        let workers = Workers::new(self.threads(), self.memory_limit)?;
        Ok(Reader::open(&self.dataset, request, &workers)?)
    }

    /// Opens the dataset with all its kept columns, and with sample times if `timestamps` is set.
    pub(crate) fn open_with_kept(&self, timestamps: bool) -> anyhow::Result<Reader> {
        let schema = load_snapshot(&self.dataset, self.at)?.schema;
        let kept = schema.kept_names().map(str::to_owned).collect();
        self.open_with(self.request()?.with(|options| ReaderOptions { timestamps, kept, ..options }))
    }

    fn request(&self) -> anyhow::Result<ReadRequest> {
        let preprocess = self.preprocess.as_deref().map(PreprocessConfig::load).transpose()?;
        let mut table_rows = BTreeMap::new();
        for (name, rows) in &self.table_rows {
            if table_rows.insert(name.clone(), *rows).is_some_and(|known| known != *rows) {
                let message = text![option("table_rows"), format!(" gives `{name}` two numbers of rows")];
                bail!(Fault::new(Kind::Options, message).hint("name every feature once"));
            }
        }
        let options = ReaderOptions {
            dedupe: self.dedupe,
            streams: self.streams,
            tail: self.tail,
            snapshot: self.at,
            partitions: self.partitions.clone(),
            features: self.features.clone(),
            labels_as_of: self.labels_as_of,
            shuffle: self.shuffle.map(|seed| Shuffle {
                seed,
                row_groups: self.shuffle_row_groups,
                within: self.within,
            }),
            preprocess,
            ..ReaderOptions::new(self.batch_size()?)
        };
        let checks = Checks { verify: !self.no_verify, table_rows, ..Checks::default() };
        Ok(ReadRequest { options, checks, rank: self.rank })
    }

    pub(crate) fn batch_size(&self) -> anyhow::Result<usize> {
        if let Some(size) = self.global_batch_size {
            return Ok(size);
        }
        let samples = load_snapshot(&self.dataset, self.at)?.chosen_samples(&self.partitions)?;
        Ok(self.default_batch_size(samples))
    }

    /// Returns the default number of samples in a step of a dataset of `samples` samples.
    fn default_batch_size(&self, samples: u64) -> usize {
        let streams = self.streams.unwrap_or(self.rank.world_size).max(1);
        // Every stream and every rank gives at least one sample.
        let least = streams.max(self.rank.world_size);
        let samples = usize::try_from(samples).unwrap_or(usize::MAX);
        samples.min(2048_usize.saturating_mul(streams)).max(least)
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads.map_or_else(available_threads, usize::from)
    }
}

fn parse_rank(text: &str) -> Result<Rank, String> {
    let rank = text.split_once('/').and_then(|(rank, world_size)| {
        Some(Rank { rank: rank.parse().ok()?, world_size: world_size.parse().ok()? })
    });
    let rank = rank.filter(|rank| rank.rank < rank.world_size);
    rank.ok_or_else(|| "expected `RANK/RANKS` with a rank below the ranks, as `0/8`".to_owned())
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
    fn ranks_and_tables_are_read_or_refused() {
        assert_eq!(parse_rank("3/8"), Ok(Rank { rank: 3, world_size: 8 }));
        for wrong in ["8/8", "1", "a/2", "-1/2", "0/0"] {
            assert!(parse_rank(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_table("user_id=5"), Ok(("user_id".to_owned(), 5)));
        for wrong in ["user_id", "user_id=", "user_id=0", "user_id=-1"] {
            assert!(parse_table(wrong).is_err(), "{wrong}");
        }
    }

    fn reading(options: &str) -> Reading {
        let words = format!("onefold-read digest d {options}");
        match Cli::try_parse_from(words.split_whitespace()).unwrap().command {
            Command::Digest { reading, .. } => reading,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_batch_has_a_sample_of_every_stream_and_rank_by_default() {
        for (options, samples, expected) in [
            ("", 1_000_000, 2048),
            ("", 10, 10),
            ("--rank 0/64", 10, 64),
            ("--rank 0/64", 1_000_000, 64 * 2048),
            ("--rank 0/64 --streams 2", 10, 64),
            ("--rank 0/64 --streams 2", 1_000_000, 2 * 2048),
            ("--rank 0/5000 --streams 2", 1_000_000, 5000),
        ] {
            assert_eq!(reading(options).default_batch_size(samples), expected, "{options} of {samples}");
        }
    }

    #[test]
    fn a_table_has_one_number_of_rows() {
        assert!(reading("--table-rows a=5,a=5,b=6 --batch-size 1").request().is_ok());
        let error = reading("--table-rows a=5,b=6,a=7 --batch-size 1").request().unwrap_err();
        assert!(error.to_string().contains("`a` two numbers of rows"), "{error}");
    }

    #[test]
    fn a_time_needs_an_offset() {
        let parsed = |time: &str| Cli::try_parse_from(["onefold-read", "head", "d", "--labels-as-of", time]);
        assert!(parsed("2026-03-02T00:00:00Z").is_ok());
        assert!(parsed("2026-03-02").unwrap_err().to_string().contains("is not a time with an offset"));
    }
}
