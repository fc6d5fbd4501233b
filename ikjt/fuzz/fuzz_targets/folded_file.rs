//! Reads data files with arbitrary content, whose footers have the checksum in the manifest: the result is an error
//! or batches, but never a panic, and never memory beyond the limit.
//!
//! `ONEFOLD_FUZZ_DATASET` names a small dataset in the folded layout with one file; each input replaces the file.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use onefold_datasets::footer::Footer;
use onefold_datasets::{
    Commit, DataFile, DatasetWriter, FileSet, RowGroup, Snapshot, WriterOptions, WrittenBucket,
};
use onefold_ikjt::{Checks, Dedupe, Error, ReadRequest, Reader, ReaderOptions, Workers};
use xxhash_rust::xxh3::xxh3_64;

/// A folder for this process, and a dataset whose data file is replaced by every input.
struct Dataset {
    directory: PathBuf,
    snapshot: Snapshot,
}

fn dataset() -> &'static Dataset {
    static DATASET: OnceLock<Dataset> = OnceLock::new();
    DATASET.get_or_init(|| {
        let source =
            PathBuf::from(std::env::var_os("ONEFOLD_FUZZ_DATASET").expect("ONEFOLD_FUZZ_DATASET is set"));
        let snapshot = Snapshot::load(&source).expect("a dataset");
        let directory = std::env::temp_dir().join(format!("onefold-fuzz-{}", std::process::id()));
        Dataset { directory, snapshot }
    })
}

/// Returns the manifest's entry for a file with these bytes, or `None` if it has no footer that describes row groups.
fn described(file: &DataFile, bytes: &[u8]) -> Option<FileSet> {
    let end = bytes.last_chunk::<8>()?;
    let footer_bytes = u32::from_le_bytes([end[0], end[1], end[2], end[3]]).checked_add(8)?;
    let footer = &bytes[bytes.len().checked_sub(footer_bytes as usize)?..];
    let mut file = DataFile {
        bytes_on_disk: bytes.len() as u64,
        footer_bytes,
        footer_checksum: xxh3_64(footer),
        row_group_bytes: Vec::new(),
        ..file.clone()
    };
    let footer = Footer::decode(&file, &Bytes::copy_from_slice(footer)).ok()?;
    let mut row_groups = Vec::new();
    for row_group in footer.metadata.metadata().row_groups() {
        let sizes = row_group.columns().iter().map(|column| column.compressed_size());
        let bytes_on_disk = sizes.fold(0_i64, i64::saturating_add).try_into().unwrap_or(0);
        let samples = row_group.num_rows().try_into().unwrap_or(0);
        file.row_group_bytes.push(bytes_on_disk);
        row_groups.push(RowGroup { samples, bytes_on_disk, ..RowGroup::default() });
    }
    let samples = row_groups.iter().try_fold(0_u64, |sum, row_group| sum.checked_add(row_group.samples))?;
    let has_samples = !row_groups.is_empty() && row_groups.iter().all(|row_group| row_group.samples > 0);
    has_samples.then(|| FileSet {
        bucket: 0,
        samples,
        row_groups,
        files: vec![file],
        changes: Default::default(),
    })
}

/// Commits a dataset that consists of the files of `set`.
fn commit(directory: &Path, snapshot: &Snapshot, set: &FileSet) {
    for folder in ["snapshots", "manifests"] {
        let _ = std::fs::remove_dir_all(directory.join(folder));
    }
    let options = WriterOptions {
        layout: snapshot.layout,
        commit: Commit::Create,
        ..WriterOptions::new(snapshot.order)
    };
    let mut writer =
        DatasetWriter::create(directory, snapshot.schema.clone(), options).expect("a new dataset");
    let statistics = vec![serde_json::json!({ "features": [], "dense": [] }); set.row_groups.len()];
    let written = serde_json::json!({ "key": "", "range": 0, "files": [set], "statistics": statistics });
    let written: WrittenBucket = serde_json::from_value(written).expect("a range of buckets");
    writer.add_part(written).expect("a range of the dataset");
    writer.finish().expect("a commit");
}

fuzz_target!(|bytes: &[u8]| {
    let Dataset { directory, snapshot } = dataset();
    let file = &snapshot.partitions[0].files[0].files[0];
    let Some(set) = described(file, bytes) else { return };
    let path = directory.join(&file.path);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a writable folder");
    std::fs::write(path, bytes).expect("a written file");
    commit(directory, snapshot, &set);
    let workers = Workers::new(1, 256 << 20).expect("a thread");
    for dedupe in [Dedupe::Window, Dedupe::Off] {
        let options =
            ReaderOptions { dedupe, ..ReaderOptions::new(7.min(usize::try_from(set.samples).unwrap_or(7))) };
        let checks = Checks { verify: false, ..Checks::default() };
        let request = ReadRequest { checks, ..options.into() };
        let reader = Reader::open(directory, request, &workers).expect("a valid snapshot");
        for batch in reader.batches().expect("threads") {
            match batch {
                Ok(_) => {}
                Err(error @ Error::Invariant(_)) => panic!("{error}"),
                Err(_) => break,
            }
        }
    }
});
