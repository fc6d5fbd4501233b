//! Messages between the client, the master and the workers of a preprocessing service.
//!
//! The protocol is Arrow Flight. Questions and answers are JSON bodies of `DoAction`. Batches are messages of
//! `DoGet`, one message per batch: its metadata is a [`BatchHeader`], and its body is the memory of a
//! [`PackedBatch`](crate::PackedBatch), unchanged or with narrow ids.

use std::collections::BTreeSet;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::batch::Places;
pub use crate::cache::Block;
use crate::preprocess::PreprocessConfig;
use crate::reader::{Rank, ReaderOptions};

/// The version of this program, for display.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of these messages. Processes with different versions cannot communicate. Increase it with every change
/// of a message that old programs cannot read, or that requires parts that old programs do not send.
pub const PROTOCOL: &str = "2";

/// The metadata key under which every request sends its sender's [`PROTOCOL`].
pub const PROTOCOL_KEY: &str = "onefold-protocol";

/// The version of everything that determines the bytes of batches: the order of samples, deduplication, the operators
/// of preprocessing, the packed form. Increase it with every change of the bytes of any batch, and of [`Job::key`].
/// Clients receive batches only from workers with their own version, so the workers of a service can be upgraded one by
/// one.
pub const SAME_BYTES: u32 = 4;

/// The error of a process that does not know the token of a request.
pub const UNKNOWN_TOKEN: &str = "the token is missing or unknown";

/// The part of an error that names an option of the worker.
pub const OF_WORKER: &str = "of `onefold-serve worker`";

/// The maximal size of a message in bytes, and thereby of a batch. The limit of gRPC is 2 GiB.
pub const MOST_MESSAGE_BYTES: usize = 1 << 30;

/// The size in bytes of the messages into which long answers are split.
pub const ANSWER_BYTES: usize = 1 << 20;

/// A question that a process of the service answers.
pub trait Question: Serialize + DeserializeOwned + Send + 'static {
    /// The action type of the Flight protocol.
    const ACTION: &'static str;
    /// The type of the answer.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// Asks the master to resolve a dataset, given by a name or a location.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The part of a client's URL after the host.
    pub dataset: String,
}

impl Question for Open {
    const ACTION: &'static str = "open";
    /// The location of the dataset from the view of the workers.
    type Answer = String;
}

/// Asks the master for a worker. Equal keys get the same worker as long as it lives, so that its results for one
/// client can be reused for the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// The key of the request: a [block](Block::key), or the job or dataset that a question is about.
    pub key: String,
    /// A name that is equal for blocks of other jobs that read the same row groups. One worker should compute such
    /// blocks, because it then decodes the row groups once.
    pub affinity: Option<String>,
    /// The workers that failed to answer this request before.
    pub avoid: Vec<String>,
    /// The client that reads blocks, and its progress.
    pub client: Option<ClientState>,
    /// The client's [`SAME_BYTES`]. The master assigns only workers with the same value.
    pub same_bytes: u32,
}

impl Question for Lease {
    const ACTION: &'static str = "lease";
    type Answer = Leased;
}

/// The worker that the master assigned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// The worker's address: `HOST:PORT`.
    pub worker: String,
    /// The number of workers of the service.
    pub workers: usize,
}

/// Reports the progress of a client to the master, including while it requests no blocks.
impl Question for ClientState {
    const ACTION: &'static str = "client";
    type Answer = ();
}

/// The state of a client that the master knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientState {
    /// The client's random name.
    pub client: String,
    /// The [key](Job::key) of the client's job.
    pub job: String,
    /// The dataset's location.
    pub dataset: String,
    /// The number of samples that it has received.
    pub samples: u64,
    /// The number of bytes that it has received.
    pub bytes: u64,
    /// The seconds since it began.
    pub seconds: f64,
    /// The part of these seconds in which its caller waited for a batch.
    pub waited_seconds: f64,
    /// The number of requests that it repeated after a failure.
    #[serde(default)]
    pub retries: u64,
    /// The number of requests to a second worker, because the first one gave nothing for long.
    #[serde(default)]
    pub second_requests: u64,
    /// Whether it has finished reading.
    pub ended: bool,
}

impl Block {
    /// Returns the block's key in a [`Lease`].
    pub fn key(&self) -> String {
        format!("{}/{}/{}", self.job, self.epoch, self.steps.start)
    }
}

/// Asks a worker for a snapshot of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindSnapshot {
    /// The dataset's location.
    pub location: String,
    /// The number of the snapshot, or `None` for the newest one.
    pub number: Option<u64>,
}

impl Question for FindSnapshot {
    const ACTION: &'static str = "snapshot";
    type Answer = Snapshot;
}

/// Asks a worker for the statistics of samples of a dataset.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FindStatistics {
    /// The dataset's location.
    pub location: String,
    /// The number of the snapshot.
    pub number: u64,
    /// The partitions of the samples.
    pub partitions: PartitionFilter,
}

impl Question for FindStatistics {
    const ACTION: &'static str = "statistics";
    type Answer = SampleStatistics;
}

/// The job of a client: everything that determines the bytes of its batches.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The location of the dataset.
    pub dataset: String,
    /// The [identity](crate::Reader::identity) of the dataset and its snapshot, wherever they are.
    pub identity: String,
    /// The options of reading, with the numbers of the snapshot and of the streams filled in.
    pub options: ReaderOptions,
    /// The rank whose part of each step is read.
    pub rank: Rank,
}

impl Job {
    /// Returns the name of the job: a prefix of the SHA-256 of everything that determines the bytes of its batches.
    /// Jobs with equal batches have the same name. The location of the dataset, the path of the pipeline file and its
    /// comments do not matter.
    ///
    /// # Panics
    ///
    /// Never, because the parts of a job can always be written as JSON.
    pub fn key(&self) -> String {
        let Self { dataset: _, identity, options, rank } = self;
        // A new option does not compile until it is added here. One that decides no byte belongs to `Checks`.
        let ReaderOptions {
            global_batch_size,
            streams,
            tail,
            shuffle,
            dedupe,
            snapshot,
            partitions,
            features,
            preprocess,
            timestamps,
            labels_as_of,
            kept,
        } = options;
        let pipeline = preprocess.as_ref().map(PreprocessConfig::content);
        let partitions = partitions.normalized();
        // Features have the order of the dataset's schema.
        let features = features.as_ref().map(|names| names.iter().collect::<BTreeSet<_>>());
        let samples = (global_batch_size, streams, tail, shuffle, snapshot, partitions, rank);
        let columns = (dedupe, features, pipeline, timestamps, labels_as_of, kept);
        let decides = (SAME_BYTES, identity, samples, columns);
        let text = serde_json::to_vec(&decides).expect("a job is JSON");
        let digest = Sha256::digest(&text);
        digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Sends a job to a worker, before blocks of it are requested.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Define {
    /// The job.
    pub job: Job,
    /// The client's [`SAME_BYTES`].
    pub same_bytes: u32,
}

impl Define {
    /// Creates the definition of a job with the version of this program.
    pub fn of(job: &Job) -> Self {
        Self { job: job.clone(), same_bytes: SAME_BYTES }
    }
}

impl Question for Define {
    const ACTION: &'static str = "define";
    type Answer = ();
}

/// Asks a worker for the numbers of samples after sampling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountSamples {
    /// The [key](Job::key) of the job.
    pub job: String,
    /// The epoch. Sampling may keep other samples in other epochs.
    pub epoch: u64,
}

impl Question for CountSamples {
    const ACTION: &'static str = "count";
    type Answer = SampleCounts;
}

/// The numbers of samples of the parts of row groups that each stream of the job reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// The numbers of samples after sampling, `[streams][parts]` in the order of the files, or `None` without
    /// sampling.
    pub sampled: Option<Vec<Vec<u64>>>,
}

/// The ticket of a `DoGet`, which requests batches of a block from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The block.
    pub block: Block,
    /// The first step to send.
    pub from: u64,
    /// The name of the client's [state](ClientState). A worker uses it to keep clients of equal jobs within a window of
    /// blocks.
    pub client: String,
    /// The epoch that the client reads, even if all epochs have the same batches and the block has epoch 0. A worker
    /// does not wait for clients in another epoch.
    pub pass: u64,
}

/// The reason for a delay, sent instead of a batch in the `data_header` of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// A text that can follow "the client waits because ".
    pub reason: String,
    /// Whether another worker would not be faster, because the delay is caused by a client of an equal job.
    pub waits_for_client: bool,
}

/// The header of a batch, in the metadata of its message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchHeader {
    /// The step of the epoch.
    pub step: u64,
    /// The XXH3 hash of the body.
    pub checksum: u64,
    /// Whether the body's ids have [32 bits](crate::SentBatch::narrow).
    pub narrow: bool,
    /// The places of the batch's parts in the body.
    pub places: Places,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::reader::{Dedupe, Shuffle, Tail, Within};

    fn job(path: &str, steps: &str) -> Job {
        let text = format!("format_version = 1\n{steps}");
        let preprocess = Some(PreprocessConfig::parse(Path::new(path), &text).unwrap());
        Job {
            dataset: "s3://bucket/clicks".to_owned(),
            identity: "one".to_owned(),
            options: ReaderOptions { preprocess, streams: Some(4), ..ReaderOptions::new(64) },
            rank: Rank { rank: 1, world_size: 2 },
        }
    }

    #[test]
    fn a_key_is_that_of_what_decides_the_bytes() {
        let steps = "[[step]]\nop = 'firstx'\ninputs = ['*']\ncount = 7\n";
        let first = job("a/preprocess.toml", steps);
        let commented = format!("# A comment.\n{}", steps.replace("count = 7", "count  =  7  # seven"));
        let same = [
            job("b/preprocess.toml", steps),
            job("a/preprocess.toml", &commented),
            Job { dataset: "/mnt/bucket/clicks".to_owned(), ..first.clone() },
            serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap(),
        ];
        for same in same {
            assert_eq!(same.key(), first.key(), "{same:?}");
        }
        let others = [
            job("a/preprocess.toml", &steps.replace('7', "8")),
            Job { identity: "another".to_owned(), ..first.clone() },
            Job {
                options: ReaderOptions { labels_as_of: Some(0), ..first.options.clone() },
                ..first.clone()
            },
            Job { rank: Rank { rank: 0, world_size: 2 }, ..first.clone() },
        ];
        for other in others {
            assert_ne!(other.key(), first.key(), "{other:?}");
        }
    }

    #[test]
    fn every_option_is_a_part_of_the_key() {
        let steps = "[[step]]\nop = 'firstx'\ninputs = ['*']\ncount = 7\n";
        let shuffle = Shuffle { seed: 1, row_groups: 4, within: Within::Epoch };
        let changes: [fn(&mut ReaderOptions); 11] = [
            |options| options.global_batch_size = 65,
            |options| options.streams = Some(5),
            |options| options.tail = Tail::Drop,
            |options| options.shuffle = None,
            |options| options.dedupe = Dedupe::Off,
            |options| options.snapshot = Some(2),
            |options| options.partitions = "split=holdout".parse().unwrap(),
            |options| options.features = Some(vec!["x".to_owned()]),
            |options| options.preprocess = None,
            |options| options.timestamps = true,
            |options| options.kept = vec!["x".to_owned()],
        ];
        let mut first = job("a/preprocess.toml", steps);
        first.options.shuffle = Some(shuffle);
        let mut keys = BTreeSet::from([first.key()]);
        for (number, change) in changes.into_iter().enumerate() {
            let mut other = first.clone();
            change(&mut other.options);
            assert!(keys.insert(other.key()), "change {number}");
        }
    }

    #[test]
    fn a_key_does_not_depend_on_how_options_are_written() {
        let key = |partitions: &str, features: [&str; 2]| {
            let mut job = job("a/preprocess.toml", "");
            job.options.partitions = partitions.parse().unwrap();
            job.options.features = Some(features.map(str::to_owned).to_vec());
            job.key()
        };
        let first = key("a=1,b=2", ["x", "y"]);
        for (partitions, features) in
            [("b=2,a=1", ["x", "y"]), (" a = 1,b=\"2\"", ["x", "y"]), ("a=1,b=2", ["y", "x"])]
        {
            assert_eq!(key(partitions, features), first, "{partitions} {features:?}");
        }
        for (partitions, features) in [("a=1", ["x", "y"]), ("a=1,b!=2", ["x", "y"]), ("a=1,b=2", ["x", "z"])]
        {
            assert_ne!(key(partitions, features), first, "{partitions} {features:?}");
        }
    }

    /// Tests that the key distinguishes training from an evaluation with the same pipeline file, because only training
    /// leaves out samples.
    #[test]
    fn sampling_is_a_part_of_the_key() {
        let others = "[[step]]\nop = 'firstx'\ninputs = ['*']\ncount = 7\n";
        let first = job("a/preprocess.toml", &format!("[[step]]\nop = 'sampling'\nrate = 0.5\n{others}"));
        let with = |change: fn(PreprocessConfig) -> PreprocessConfig| {
            let mut job = first.clone();
            job.options.preprocess = job.options.preprocess.map(change);
            job
        };
        let without = with(PreprocessConfig::without_sampling);
        let only = with(PreprocessConfig::only_sampling);
        let keys = BTreeSet::from([first.key(), without.key(), only.key()]);
        assert_eq!(keys.len(), 3);
        for job in [first, without.clone(), only] {
            let sent: Job = serde_json::from_str(&serde_json::to_string(&job).unwrap()).unwrap();
            assert_eq!(sent.key(), job.key(), "{job:?}");
        }
        assert_eq!(without.key(), job("a/preprocess.toml", others).key());
    }

    #[test]
    fn a_key_does_not_depend_on_how_steps_are_written() {
        let key = |step: &str| job("a/preprocess.toml", &format!("[[step]]\n{step}")).key();
        let hash = "op = 'sigrid_hash'\ninputs = ['x']\nmax = 100";
        for same in ["max = 100\ninputs = [\"x\"]\nop = 'sigrid_hash'", &format!("{hash}\nsalt = 0")] {
            assert_eq!(key(same), key(hash), "{same}");
        }
        for other in [hash.replace("100", "101"), hash.replace("'x'", "'y'"), format!("{hash}\noutput = 'y'")]
        {
            assert_ne!(key(&other), key(hash), "{other}");
        }
    }

    #[test]
    fn the_contents_of_a_table_are_a_part_of_the_key() {
        let directory = tempfile::tempdir().unwrap();
        let key = |name: &str, is_absolute: bool, ids: &str| {
            let folder = directory.path().join(name);
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("ids.txt"), ids).unwrap();
            let file = if is_absolute { folder.join("ids.txt") } else { "ids.txt".into() };
            let steps = format!("[[step]]\nop = 'map_id'\ninputs = ['x']\ntable_file = {file:?}\n");
            job(folder.join("preprocess.toml").to_str().unwrap(), &steps).key()
        };
        let ids = "5\n6\n";
        assert_eq!(key("a", false, ids), key("b", false, ids));
        assert_eq!(key("a", true, ids), key("b", true, ids));
        assert_eq!(key("a", true, ids), key("b", false, ids));
        assert_ne!(key("a", false, ids), key("b", false, "5\n7\n"));
        let inline = job("a/preprocess.toml", "[[step]]\nop = 'map_id'\ninputs = ['x']\ntable = [5, 6]\n");
        assert_eq!(inline.key(), key("a", false, ids));
    }
}
