//! The section of the page about runs that follow their dataset.

use std::path::Path;

use onefold_page::section;
use onefold_page::text::escape;
use serde_json::Value;

use super::{Report, ReportedRun};
use crate::Result;

/// Reads the lines of `follow.jsonl` in the directory of a run. The result is empty if there is no such file.
/// Lines that are not valid JSON, such as a line that is being written, are skipped.
pub(super) fn lines(directory: &Path) -> Result<Vec<Value>> {
    let text = match fs_err::read_to_string(directory.join("follow.jsonl")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Returns the partition of a line about a part; `None` for other lines.
fn partition(line: &Value) -> Option<&str> {
    line["partition"].as_str()
}

/// Returns the lines of a run about parts, with their partitions.
fn parts(run: &ReportedRun) -> impl Iterator<Item = (&str, &Value)> {
    run.followed.iter().filter_map(|line| Some((partition(line)?, line)))
}

impl Report {
    /// Returns the section with drift, freshness and lag by partition, and with the partitions that were
    /// changed after training; empty if no run follows its dataset.
    pub(super) fn following(&self) -> String {
        let lines = || self.runs.iter().flat_map(|run| &run.followed);
        if lines().all(|line| partition(line).is_none()) {
            return String::new();
        }
        let plot = |figure: &str, title: &str| self.by_place(figure, title, ("partition", true), parts);
        let plots = [
            plot("training_loss", "Training loss"),
            plot("psi", "Population stability of dense features"),
            plot("sparse_psi", "Population stability of sparse features"),
            plot("freshness_seconds", "Freshness: from the newest sample to the export, in seconds"),
            plot("commit_to_export_seconds", "From the commit to the export, in seconds"),
            plot("lag_partitions", "Lag: partitions that wait"),
        ];
        let changed = |line: &Value| {
            let (key, snapshot) = (line["changed"].as_str()?, line["snapshot"].as_u64()?);
            Some(format!("<li>{} (snapshot {snapshot})</li>", escape(key)))
        };
        let changed: String = lines().filter_map(changed).collect();
        let changed = match changed.as_str() {
            "" => String::new(),
            items => {
                format!("<h3>Partitions that were changed after they were trained on</h3><ul>{items}</ul>")
            }
        };
        let again = |line: &Value| {
            let key = partition(line).filter(|_| line["late_labels"] == true)?;
            Some(format!("<li>{} (snapshot {})</li>", escape(key), line["snapshot"]))
        };
        let again: String = lines().filter_map(again).collect();
        let again = match again.as_str() {
            "" => String::new(),
            items => {
                format!("<h3>Partitions that were trained on again, with later labels</h3><ul>{items}</ul>")
            }
        };
        let lead = "The population stability index is the largest of all dense or all sparse features, against the \
                    partition before: about 0 where distributions are equal; above 0.25 they are usually called \
                    different.";
        section(
            "Partition by partition",
            lead,
            &format!("<div class=\"pair\">{}</div>{again}{changed}", plots.concat()),
        )
    }
}
