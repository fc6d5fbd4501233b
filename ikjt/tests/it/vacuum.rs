//! Tests readers of older snapshots while others commit and vacuum.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use onefold_datasets::vacuum::{VacuumOptions, vacuum};
use onefold_datasets::{
    Buckets, Commit, DatasetWriter, Layout, PartitionColumn, PartitionKey, PartitionType, Snapshot,
    WriterOptions, bucket_of_session,
};
use onefold_ikjt::{Batches, ReaderOptions};
use onefold_storage::Storage;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::dataset::{Log, Sample, columns, in_buckets, open, open_with, options, samples_of, schema};

const ROUNDS: usize = 20;
const BUCKETS: u32 = 4;
/// The number of readers that begin in a round.
const READERS: usize = 3;
/// The number of samples per batch; every snapshot has more samples.
const BATCH: usize = 10;
/// The age in minutes up to which vacuums keep removed files.
const OLDER_THAN: u64 = 60;
/// The number of minutes by which readers end earlier, because the test itself takes time.
const MARGIN: u64 = 10;

/// A committed snapshot.
struct Committed {
    /// The minute of the commit.
    at: u64,
    samples: Vec<Sample>,
}

/// A reader in the middle of an epoch.
struct Reading {
    snapshot: u64,
    batches: Batches,
    samples: Vec<Sample>,
}

/// A dataset whose age is controlled by [`pass_time`](Self::pass_time) instead of the machine's clock.
struct Aging {
    directory: tempfile::TempDir,
    random: ChaCha8Rng,
    /// The current minute.
    now: u64,
    /// All snapshots by number, including removed ones.
    snapshots: BTreeMap<u64, Committed>,
    /// The partitions of the newest snapshot.
    partitions: Vec<String>,
    partitions_made: usize,
    readers: Vec<Reading>,
    /// The number of readers that have finished.
    finished: usize,
}

impl Aging {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
            random: ChaCha8Rng::seed_from_u64(20),
            now: 0,
            snapshots: BTreeMap::new(),
            partitions: Vec::new(),
            partitions_made: 0,
            readers: Vec::new(),
            finished: 0,
        }
    }

    fn root(&self) -> &Path {
        self.directory.path()
    }

    fn new_partition(&mut self) -> String {
        self.partitions_made += 1;
        format!("p{}", self.partitions_made)
    }

    /// Commits other samples to some partitions, and reads the new snapshot.
    fn commit(&mut self, kind: Commit) {
        let changed = match kind {
            Commit::Create | Commit::Overwrite => {
                self.partitions = (0..3).map(|_| self.new_partition()).collect();
                self.partitions.clone()
            }
            Commit::Append => {
                let partition = self.new_partition();
                self.partitions.push(partition.clone());
                vec![partition]
            }
            Commit::Replace
            | Commit::Merge
            | Commit::Columns
            | Commit::Alter
            | Commit::Forget
            | Commit::Compact => {
                vec![self.partitions[self.random.random_range(0..self.partitions.len())].clone()]
            }
        };
        let buckets = Buckets::with_own_files(BUCKETS);
        let how = WriterOptions { commit: kind, buckets, ..options(Layout::Folded) };
        let mut writer = DatasetWriter::create(self.root(), schema(), how).unwrap();
        writer.set_partition_columns(vec![PartitionColumn::new("part", PartitionType::Text)]).unwrap();
        for partition in changed {
            let (sessions, seed) = (self.random.random_range(4..24), self.random.random_range(0..1 << 32));
            let sessions = Log { sessions, session_size: 4.0, repeat: 0.7, seed }.samples();
            let only = (kind == Commit::Merge).then(|| self.random.random_range(0..BUCKETS));
            let is_written = |id: i64| only.is_none_or(|bucket| bucket_of_session(id, BUCKETS) == bucket);
            let mut samples = in_buckets(&sessions, BUCKETS);
            samples.retain(|(id, _)| is_written(*id));
            let key = PartitionKey::new(vec![("part".to_owned(), partition)]);
            writer.write(&key, &columns(&samples)).unwrap();
        }
        let written = writer.finish().unwrap();
        assert!(written.changed, "{kind:?}");
        let number = written.snapshot.snapshot;
        let options = ReaderOptions { snapshot: Some(number), ..ReaderOptions::new(BATCH) };
        let batches = open(self.root(), options).unwrap().batches().unwrap();
        let samples = batches.flat_map(|step| samples_of(&step.unwrap().batch)).collect();
        self.snapshots.insert(number, Committed { at: self.now, samples });
    }

    /// Returns whether readers may read a snapshot until the minute `until`: it is the newest one, or it was
    /// superseded more recently than the age that vacuums keep.
    fn is_kept(&self, snapshot: u64, until: u64) -> bool {
        let superseded = self.snapshots.get(&(snapshot + 1)).map(|next| next.at);
        superseded.is_none_or(|at| until + MARGIN < at + OLDER_THAN)
    }

    /// Starts reading newer and older snapshots, with a small memory limit, so that most of the data is read later.
    fn open_readers(&mut self) {
        let kept: Vec<u64> =
            self.snapshots.keys().copied().filter(|number| self.is_kept(*number, self.now)).collect();
        for _ in 0..READERS {
            let snapshot = kept[self.random.random_range(0..kept.len())];
            let options = ReaderOptions { snapshot: Some(snapshot), ..ReaderOptions::new(BATCH) };
            let batches = open_with(self.root(), options, (1, 400 << 10)).unwrap().batches().unwrap();
            self.readers.push(Reading { snapshot, batches, samples: Vec::new() });
        }
    }

    /// Takes one or two batches from every reader.
    fn read_on(&mut self) {
        for reader in &mut self.readers {
            for step in reader.batches.by_ref().take(self.random.random_range(1..3)) {
                reader.samples.extend(samples_of(&step.unwrap().batch));
            }
        }
    }

    /// Reads to the end with all readers of snapshots that are not kept until the minute `until`.
    fn finish_readers(&mut self, until: u64) {
        for mut reader in std::mem::take(&mut self.readers) {
            if self.is_kept(reader.snapshot, until) {
                self.readers.push(reader);
                continue;
            }
            reader.samples.extend(reader.batches.flat_map(|step| samples_of(&step.unwrap().batch)));
            let Committed { samples, .. } = &self.snapshots[&reader.snapshot];
            assert!(reader.samples == *samples, "snapshot {} has other samples", reader.snapshot);
            self.finished += 1;
        }
    }

    /// Makes all snapshots older, after finishing the readers that would take too long.
    fn pass_time(&mut self, minutes: u64) {
        self.finish_readers(self.now + minutes);
        self.now += minutes;
        // A vacuum uses the times of snapshots. The times of data files must not change, because readers use them to
        // detect changes.
        for object in Storage::open(self.root()).unwrap().list("snapshots", None).unwrap() {
            let file = fs_err::OpenOptions::new().write(true).open(self.root().join(&object.path)).unwrap();
            file.file().set_modified(object.modified - Duration::from_secs(60 * minutes)).unwrap();
        }
    }
}

#[test]
fn readers_finish_while_others_commit_and_vacuum() {
    let mut dataset = Aging::new();
    dataset.commit(Commit::Create);
    let (mut kinds, mut snapshots_removed, mut files_removed) = (Vec::new(), 0, 0);
    for round in 0..ROUNDS {
        let minutes = dataset.random.random_range(1..30);
        dataset.pass_time(minutes);
        if kinds.is_empty() {
            kinds = vec![Commit::Append, Commit::Replace, Commit::Merge, Commit::Overwrite];
        }
        let next = dataset.random.random_range(0..kinds.len());
        dataset.commit(kinds.swap_remove(next));
        dataset.open_readers();
        dataset.read_on();
        let options = VacuumOptions {
            keep: dataset.random.random_range(1..4),
            older_than: Duration::from_secs(60 * OLDER_THAN),
            dry_run: false,
        };
        let vacuumed = vacuum(&Storage::open(dataset.root()).unwrap(), &options).unwrap();
        snapshots_removed += vacuumed.snapshots_removed.len();
        files_removed += vacuumed.files_removed;
        for number in dataset.snapshots.keys().filter(|number| dataset.is_kept(**number, dataset.now)) {
            assert!(vacuumed.snapshots_kept.contains(number), "round {round}: {vacuumed:?}");
        }
        dataset.read_on();
    }
    // Readers of the newest snapshot are still open. Supersedes the snapshot, and finishes all readers.
    dataset.commit(Commit::Overwrite);
    dataset.finish_readers(dataset.now + 2 * OLDER_THAN);
    assert_eq!((dataset.finished, dataset.readers.len()), (READERS * ROUNDS, 0));
    assert!(snapshots_removed > 8 && files_removed > 8, "{snapshots_removed} {files_removed}");
    assert!(Snapshot::load_at(dataset.root(), Some(1)).is_err());
}
