//! Data files of any content, whose checksums agree: an error, or batches; never a panic, never memory beyond the limit.
//!
//! `ONEFOLD_FUZZ_DATASET` names a small dataset in the folded layout with one file; each input takes the file's place.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use onefold_datasets::Manifest;
use onefold_ikjt::{Dedupe, Error, Reader, ReaderOptions};

/// A copy of the dataset of its own for this process, whose data file is replaced by every input.
struct Dataset {
    directory: PathBuf,
    manifest: Manifest,
}

fn dataset() -> &'static Dataset {
    static DATASET: OnceLock<Dataset> = OnceLock::new();
    DATASET.get_or_init(|| {
        let source = PathBuf::from(std::env::var_os("ONEFOLD_FUZZ_DATASET").expect("ONEFOLD_FUZZ_DATASET is set"));
        let manifest = Manifest::load(&source).expect("a dataset");
        let directory = std::env::temp_dir().join(format!("onefold-fuzz-{}", std::process::id()));
        let file = directory.join(&manifest.partitions[0].files[0].path);
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("a writable folder");
        Dataset { directory, manifest }
    })
}

fuzz_target!(|bytes: &[u8]| {
    let Dataset { directory, manifest } = dataset();
    let mut manifest = manifest.clone();
    manifest.partitions.truncate(1);
    manifest.partitions[0].files.truncate(1);
    let file = &mut manifest.partitions[0].files[0];
    std::fs::write(directory.join(&file.path), bytes).expect("a written file");
    file.bytes_on_disk = bytes.len() as u64;
    let samples = file.samples;
    manifest.partitions[0].samples = samples;
    manifest.statistics.samples = samples;
    manifest.statistics.sessions = manifest.partitions[0].sessions;
    manifest.statistics.bytes_on_disk = bytes.len() as u64;
    std::fs::write(directory.join("manifest.json"), serde_json::to_string(&manifest).expect("JSON")).expect("a written manifest");
    for dedupe in [Dedupe::Window, Dedupe::Off] {
        let options = ReaderOptions {
            dedupe,
            threads: 1,
            verify: false,
            memory_limit: 256 << 20,
            ..ReaderOptions::new(7.min(samples as usize))
        };
        let reader = Reader::open(directory, options).expect("a valid manifest");
        for batch in reader.batches().expect("threads") {
            match batch {
                Ok(_) => {}
                Err(Error::Invariant { place, message }) => panic!("{place}: {message}"),
                Err(_) => break,
            }
        }
    }
});
