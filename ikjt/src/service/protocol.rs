//! Messages between the client, the master and the workers of a preprocessing service.
//!
//! It is Arrow Flight: questions and answers are the JSON bodies of `DoAction`, and batches are the messages of
//! `DoGet`, one message a batch. A message's metadata is a [`BatchHeader`], and its body is the memory of a
//! [`PackedBatch`](crate::PackedBatch), as it is or with narrow ids.

use std::collections::BTreeSet;

use onefold_datasets::{PartitionFilter, SampleStatistics, Snapshot};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use crate::cache::Block;
use crate::preprocess::PreprocessConfig;
use crate::{Places, Rank, ReaderOptions};

/// The version of this program, for people.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version of these messages. Processes with another one do not understand each other: raise it with every change
/// of a message that old programs cannot read, or of which old programs lack a part.
pub const PROTOCOL: &str = "2";

/// The metadata in which every request names its sender's [`PROTOCOL`].
pub const PROTOCOL_KEY: &str = "onefold-protocol";

/// The version of what decides the bytes of batches: the order of samples, deduplication, the operators of
/// preprocessing, the packed form. Raise it with every change of the bytes of any batch, and of [`Job::key`]. The batches
/// of an epoch come from workers with the client's own version, so a service can be upgraded one worker after the other.
pub const SAME_BYTES: u32 = 3;

/// The most bytes of a message, and so of a batch: gRPC itself ends at 2 GiB.
pub const MOST_MESSAGE_BYTES: usize = 1 << 30;

/// The bytes of one of the messages into which long answers are divided.
pub const ANSWER_BYTES: usize = 1 << 20;

/// A question that a process answers.
pub trait Question: Serialize + DeserializeOwned + Send + 'static {
    /// The type of the action.
    const ACTION: &'static str;
    /// The answer.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// To the master: which dataset is meant, by a name or a location.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    /// The text behind the host in a client's URL.
    pub dataset: String,
}

impl Question for Open {
    const ACTION: &'static str = "open";
    /// The location of the dataset, as workers read it.
    type Answer = String;
}

/// To the master: which worker answers for something. Equal keys have the same worker as long as it lives, so that
/// what it has computed for one client is there for the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// The key of the request: a [block](Block::key), or the job or dataset that a question is about.
    pub key: String,
    /// Equal for blocks of other jobs that read the same row groups: they are best computed by one
    /// worker, which then decodes them once.
    pub affinity: Option<String>,
    /// Workers that did not give it.
    pub avoid: Vec<String>,
    /// The client that reads blocks, and its progress.
    pub client: Option<ClientState>,
    /// The client's [`SAME_BYTES`]: only workers with the same one are named.
    pub same_bytes: u32,
}

impl Question for Lease {
    const ACTION: &'static str = "lease";
    type Answer = Leased;
}

/// The worker that answers for something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// Its address: `HOST:PORT`.
    pub worker: String,
    /// All workers that there are.
    pub workers: usize,
}

/// To the master: the progress of a client, also while it has no block to ask for.
impl Question for ClientState {
    const ACTION: &'static str = "client";
    type Answer = ();
}

/// A client as the master sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClientState {
    /// A random name.
    pub client: String,
    /// The [key](Job::key) of its job.
    pub job: String,
    /// The dataset's location.
    pub dataset: String,
    /// Samples that it has received.
    pub samples: u64,
    /// Bytes that it has received.
    pub bytes: u64,
    /// Seconds since it began.
    pub seconds: f64,
    /// Seconds of them in which its caller waited for a batch.
    pub waited_seconds: f64,
    /// Whether it reads no more.
    pub ended: bool,
}

impl ClientState {
    /// A client that has received nothing yet.
    pub fn new(client: String, job: String, dataset: String) -> Self {
        Self { client, job, dataset, samples: 0, bytes: 0, seconds: 0.0, waited_seconds: 0.0, ended: false }
    }
}

impl Block {
    /// The block's key in a [`Lease`].
    pub fn key(&self) -> String {
        format!("{}/{}/{}", self.job, self.epoch, self.steps.start)
    }
}

/// To a worker: the snapshot of a dataset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindSnapshot {
    /// The dataset's location.
    pub location: String,
    /// The number of the snapshot; the newest one if `None`.
    pub number: Option<u64>,
}

impl Question for FindSnapshot {
    const ACTION: &'static str = "snapshot";
    type Answer = Snapshot;
}

/// To a worker: the statistics of samples of a dataset.
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

/// The job of a client: everything that decides which bytes its batches have.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The location of the dataset.
    pub dataset: String,
    /// The identity of the dataset, which is another one when a dataset is built anew at the same place.
    pub identity: String,
    /// How it is read. The snapshot is one with a number, and so are the streams.
    pub options: ReaderOptions,
    /// The rank whose part of each step is read.
    pub rank: Rank,
}

impl Job {
    /// A name for the job, the same for jobs of equal batches: a part of the SHA-256 of what decides their bytes. Where
    /// the text of the pipeline came from, and its comments, do not.
    ///
    /// # Panics
    ///
    /// Never: the parts of a job can be written as JSON.
    pub fn key(&self) -> String {
        let Self { dataset, identity, options, rank } = self;
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
            kept,
        } = options;
        let pipeline = preprocess.as_ref().map(PreprocessConfig::content);
        let partitions = partitions.normalized();
        // Features have the order of the dataset's schema.
        let features = features.as_ref().map(|names| names.iter().collect::<BTreeSet<_>>());
        let samples = (global_batch_size, streams, tail, shuffle, snapshot, partitions, rank);
        let columns = (dedupe, features, pipeline, timestamps, kept);
        let decides = (SAME_BYTES, dataset.trim_end_matches('/'), identity, samples, columns);
        let text = serde_json::to_vec(&decides).expect("a job is JSON");
        let digest = Sha256::digest(&text);
        digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect()
    }
}

/// To a worker: a job that blocks of will be asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Define {
    /// The job.
    pub job: Job,
    /// The client's [`SAME_BYTES`].
    pub same_bytes: u32,
}

impl Define {
    /// The definition of a job by this program.
    pub fn of(job: &Job) -> Self {
        Self { job: job.clone(), same_bytes: SAME_BYTES }
    }
}

impl Question for Define {
    const ACTION: &'static str = "define";
    type Answer = ();
}

/// To a worker: the samples that sampling leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountSamples {
    /// The [key](Job::key) of the job.
    pub job: String,
    /// The epoch, in which sampling may leave other samples than in another one.
    pub epoch: u64,
}

impl Question for CountSamples {
    const ACTION: &'static str = "count";
    type Answer = SampleCounts;
}

/// The samples of the parts of row groups that each stream of the job reads, in the order of the files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// The samples after sampling; `None` if nothing samples.
    pub sampled: Option<Vec<Vec<u64>>>,
}

/// The ticket of a `DoGet`: the batches of a block that a worker sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The block.
    pub block: Block,
    /// The first step to send.
    pub from: u64,
    /// The name of the client's [state](ClientState): a worker lets clients of equal jobs go on side by side.
    pub client: String,
    /// The epoch that the client is in, also where all epochs have the same batches and the block's is 0: a client in
    /// another one is not waited for.
    pub pass: u64,
}

/// Where a batch would be, the reason why it takes long: the `data_header` of a message that is no batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Words that can follow "the client waits because ".
    pub reason: String,
    /// Whether another worker would not give the batch earlier: a client of an equal job is waited for.
    pub waits_for_client: bool,
}

/// The header of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchHeader {
    /// The step of the epoch.
    pub step: u64,
    /// The XXH3 of the body.
    pub checksum: u64,
    /// Whether the body's ids have [32 bits](crate::SentBatch::narrow).
    pub narrow: bool,
    /// Where the parts of the batch stand in the body.
    pub places: Places,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{Dedupe, Shuffle, Tail, Within};

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
            Job { dataset: "s3://bucket/clicks/".to_owned(), ..first.clone() },
            serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap(),
        ];
        for same in same {
            assert_eq!(same.key(), first.key(), "{same:?}");
        }
        let others = [
            job("a/preprocess.toml", &steps.replace('7', "8")),
            Job { identity: "another".to_owned(), ..first.clone() },
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

    /// Training leaves out samples of a pipeline that an evaluation by the same file keeps.
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
