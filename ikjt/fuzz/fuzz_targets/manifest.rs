//! Manifests of any content: an error, or a manifest that says the same when it is written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onefold_datasets::Manifest;

fuzz_target!(|text: &str| {
    if let Ok(manifest) = Manifest::parse(text) {
        let written = serde_json::to_string(&manifest).expect("JSON");
        assert_eq!(Manifest::parse(&written), Ok(manifest), "{written}");
    }
});
