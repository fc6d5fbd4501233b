//! Data files of any content, whose checksums agree: an error, or batches; never a panic, never memory beyond the
//! limit.
//!
//! `ONEFOLD_FUZZ_DATASET` names a small dataset in the folded layout with one file; each input takes the file's place.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use onefold_datasets::footer::read_footer;
use onefold_datasets::{RowGroup, Snapshot};
use onefold_ikjt::{Dedupe, Error, Reader, ReaderOptions, Workers};
use onefold_storage::Storage;

/// A copy of the dataset of its own for this process, whose data file is replaced by every input.
struct Dataset {
    directory: PathBuf,
    snapshot: Snapshot,
}

fn dataset() -> &'static Dataset {
    static DATASET: OnceLock<Dataset> = OnceLock::new();
    DATASET.get_or_init(|| {
        let source = PathBuf::from(std::env::var_os("ONEFOLD_FUZZ_DATASET").expect("ONEFOLD_FUZZ_DATASET is set"));
        let snapshot = Snapshot::load(&source).expect("a dataset");
        let directory = std::env::temp_dir().join(format!("onefold-fuzz-{}", std::process::id()));
        let file = directory.join(&snapshot.partitions[0].files[0].path);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("a writable folder");
        std::fs::create_dir_all(directory.join("snapshots")).expect("a writable folder");
        Dataset { directory, snapshot }
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Dataset { directory, snapshot } = dataset();
    let mut snapshot = snapshot.clone();
    snapshot.snapshot = 1;
    snapshot.partitions.truncate(1);
    snapshot.partitions[0].files.truncate(1);
    let file = &mut snapshot.partitions[0].files[0];
    std::fs::write(directory.join(&file.path), bytes).expect("a written file");
    file.bytes_on_disk = bytes.len() as u64;
    let samples = file.samples;
    // Row groups of other sizes than the snapshot says would give a changed file away.
    let storage = Storage::open(directory).expect("a folder");
    if let Ok(Ok(footer)) = read_footer(&storage, &file.path, bytes.len() as u64, None) {
        let row_groups = footer.metadata().row_groups().iter().map(|row_group| {
            let sizes = row_group.columns().iter().map(|column| column.compressed_size());
            RowGroup {
                samples: row_group.num_rows().try_into().unwrap_or(0),
                bytes_on_disk: sizes.fold(0_i64, i64::saturating_add).try_into().unwrap_or(0),
                ..RowGroup::default()
            }
        });
        let row_groups: Vec<RowGroup> = row_groups.collect();
        let sum = row_groups.iter().fold(0, |sum: u64, row_group| sum.saturating_add(row_group.samples));
        if sum == samples && row_groups.iter().all(|row_group| row_group.samples > 0) {
            file.row_groups = row_groups;
        }
    }
    snapshot.partitions[0].samples = samples;
    snapshot.statistics.samples = samples;
    snapshot.statistics.sessions = snapshot.partitions[0].sessions;
    snapshot.statistics.bytes_on_disk = bytes.len() as u64;
    std::fs::write(directory.join("snapshots/00000001.json"), serde_json::to_string(&snapshot).expect("JSON")).expect("a written snapshot");
    let workers = Workers::new(1, 256 << 20).expect("a thread");
    for dedupe in [Dedupe::Window, Dedupe::Off] {
        let options = ReaderOptions {
            dedupe,
            verify: false,
            ..ReaderOptions::new(7.min(samples as usize))
        };
        let reader = Reader::open(directory, options, &workers).expect("a valid snapshot");
        for batch in reader.batches().expect("threads") {
            match batch {
                Ok(_) => {}
                Err(error @ Error::Invariant(_)) => panic!("{error}"),
                Err(_) => break,
            }
        }
    }
});
