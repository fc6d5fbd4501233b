//! `onefold-ingest drop-features` and `rename-feature`.

use std::path::PathBuf;

use onefold_datasets::{Snapshot, drop_features, rename_feature};
use onefold_storage::Storage;
use onefold_terminal::Printer;
use serde::Serialize;

#[derive(Debug, clap::Args)]
pub(crate) struct DropArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The sparse, sequence and dense features to drop
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RenameArguments {
    /// The dataset: a path or a URL, such as `s3://bucket/folder`
    dataset: PathBuf,
    /// The name of a sparse, sequence or dense feature
    old: String,
    /// The new name of the feature
    new: String,
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct Altered {
    /// The number of the new snapshot.
    snapshot: u64,
    /// The features of the dataset after the change.
    features: Vec<String>,
}

/// Drops features.
pub(crate) fn run_drop(arguments: &DropArguments, printer: &Printer) -> anyhow::Result<()> {
    let DropArguments { dataset, names } = arguments;
    let snapshot = drop_features(&Storage::open(dataset)?, names)?;
    print(&format!("dropped `{}`", names.join("`, `")), &snapshot, printer)
}

/// Renames a feature.
pub(crate) fn run_rename(arguments: &RenameArguments, printer: &Printer) -> anyhow::Result<()> {
    let RenameArguments { dataset, old, new } = arguments;
    let snapshot = rename_feature(&Storage::open(dataset)?, old, new)?;
    print(&format!("renamed `{old}` to `{new}`"), &snapshot, printer)
}

fn print(done: &str, snapshot: &Snapshot, printer: &Printer) -> anyhow::Result<()> {
    let sparse = snapshot.schema.sparse_features().map(|feature| feature.name.clone());
    let features: Vec<String> = snapshot.schema.dense.iter().cloned().chain(sparse).collect();
    let number = snapshot.snapshot;
    let text = format!("{done}: snapshot {number} has {} features", features.len());
    Ok(printer.summary(&text, &Altered { snapshot: number, features })?)
}
