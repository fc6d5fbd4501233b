//! Edits snapshots and manifests, for tests of damaged datasets.

use std::path::Path;

use onefold_storage::Storage;
use serde_json::{Value, json};

use super::manifest::Manifest;
use super::manifests::checksum;
use crate::names::snapshot_path;

/// Edits snapshot 1 of the dataset at `root` as JSON.
pub(crate) fn edit_snapshot(root: &Path, edit: impl FnOnce(&mut Value)) {
    let path = root.join(snapshot_path(1));
    let mut snapshot = serde_json::from_slice(&fs_err::read(&path).unwrap()).unwrap();
    edit(&mut snapshot);
    fs_err::write(path, snapshot.to_string()).unwrap();
}

/// Edits the only manifest of snapshot 1 as JSON with the keys `rows` and `statistics`, and updates the
/// checksums.
pub(crate) fn edit_manifest(root: &Path, edit: impl FnOnce(&mut Value)) {
    let storage = Storage::open(root).unwrap();
    edit_snapshot(root, |snapshot| {
        let entry: super::ManifestEntry = serde_json::from_value(snapshot["manifests"][0].clone()).unwrap();
        let file = entry.open(&storage, true).unwrap();
        let (rows, mut parts, mut statistics) =
            (file.rows().unwrap(), file.statistics().unwrap(), Vec::new());
        while let Some(part) = parts.next().unwrap() {
            statistics.extend(part);
        }
        let mut content = json!({ "rows": rows, "statistics": statistics });
        edit(&mut content);
        let manifest = Manifest {
            names: file.names.clone(),
            rows: serde_json::from_value(content["rows"].take()).unwrap(),
            statistics: serde_json::from_value(content["statistics"].take()).unwrap(),
        };
        let encoded = manifest.encode().unwrap();
        let (statistics, rest) = encoded.bytes.split_at(encoded.statistics_bytes as usize);
        let described = &mut snapshot["manifests"][0];
        described["bytes"] = json!(encoded.bytes.len());
        described["statistics_bytes"] = json!(encoded.statistics_bytes);
        described["statistics_checksum"] = json!(checksum(statistics));
        described["checksum"] = json!(checksum(rest));
        described["rows"] = json!([[0, manifest.rows.len()]]);
        fs_err::write(root.join(entry.path), &encoded.bytes).unwrap();
    });
}
