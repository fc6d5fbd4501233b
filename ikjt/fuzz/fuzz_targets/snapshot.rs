//! Parses snapshots with arbitrary content: the result is an error, or a snapshot that does not change when it is
//! written and parsed again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onefold_datasets::Snapshot;

fuzz_target!(|text: &str| {
    if let Ok(snapshot) = Snapshot::parse(text) {
        let written = serde_json::to_string(&snapshot).expect("JSON");
        assert_eq!(Snapshot::parse(&written), Ok(snapshot), "{written}");
    }
});
