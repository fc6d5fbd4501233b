//! `[samples] order = "rows"`: logs in which the order of rows replaces times.

use std::collections::BTreeMap;

use onefold_datasets::Sessions;

use super::columns::wrong;
use super::{Config, EpochUnit, Rows, SamplesConfig, Session, SourceConfig, TimeConfig};
use crate::error::MessageAndHint;

/// The key that declares samples without times.
const KEY: &str = "`[samples].order`";

/// Returns the time column of samples without times: the row number in the source of the samples, together with the
/// number of the row's file if the source has one.
///
/// # Errors
///
/// A message and a hint if no source of the samples has row numbers, or several have.
pub(super) fn time(
    samples: &SamplesConfig,
    sources: &BTreeMap<String, SourceConfig>,
) -> Result<TimeConfig, MessageAndHint> {
    let of_files = |name: &&String| sources.contains_key(*name);
    let only = match &samples.rows {
        Rows::Source(name) => Some(name).filter(of_files),
        Rows::Query(_) => None,
    };
    let mut numbered = sources.iter().filter_map(|(name, source)| {
        let number = source.row_number.as_ref().filter(|_| only.is_none_or(|only| only == name))?;
        Some((name, source, number))
    });
    match (numbered.next(), numbered.next()) {
        (Some((_, source, number)), None) => Ok(TimeConfig {
            place: KEY.to_owned(),
            column: number.clone(),
            file: source.file_number.clone(),
            unit: Some(EpochUnit::Microsecond),
            not_before: Some(0),
            not_after: Some(i64::MAX),
            ..TimeConfig::default()
        }),
        (None, _) => {
            let hint = "number them: `log = { path = \"log/*.csv\", row_number = \"place\", file_number = \"part\" }`";
            Err(wrong(format!("{KEY} is \"rows\", but the samples' source does not number its rows"), hint))
        }
        (Some((a, ..)), Some((b, ..))) => {
            let message = format!("{KEY} is \"rows\", and several sources number their rows: `{a}`, `{b}`");
            Err(wrong(message, "remove `row_number` from all sources but the one whose rows are samples"))
        }
    }
}

/// Returns the sessions of samples without times: the sessions of the key, or one session per row.
///
/// # Errors
///
/// A message and a hint if the section needs times.
pub(super) fn sessions(section: Option<&Session>, time: &TimeConfig) -> Result<Sessions, MessageAndHint> {
    let Some(section) = section else {
        return Ok(Sessions::Key(time.columns().map(str::to_owned).collect()));
    };
    let keys = [
        ("`[session].time`", section.time.is_some()),
        ("`[session].gap`", section.gap.is_some()),
        ("`[session].user`", section.user.is_some()),
        ("`[session].order`", !section.order.is_empty()),
    ];
    if let Some((key, _)) = keys.into_iter().find(|(_, given)| *given) {
        return Err(needs_times(key));
    }
    if section.key.is_empty() {
        let message = "`[session]` has no `key`";
        return Err(wrong(
            message,
            "write `key = [\"user_id\"]`, or remove the section: each row is then a session",
        ));
    }
    Ok(Sessions::Key(section.key.clone()))
}

/// Refuses sections that need times, if samples have no times.
///
/// # Errors
///
/// A message and a hint for the first of these sections.
pub(super) fn check(config: &Config) -> Result<(), MessageAndHint> {
    let checks = config.checks.as_ref();
    let sections = [
        ("`[join]`", config.join.is_some()),
        ("the `time` of `[[attributes]]`", config.attributes.iter().any(|section| section.time.is_some())),
        ("`[partition].by`", config.partition_by.is_some()),
        ("`[checks].not_before`", checks.is_some_and(|checks| checks.not_before.is_some())),
        ("`[checks].not_after`", checks.is_some_and(|checks| checks.not_after.is_some())),
        ("`[checks].clock_changes`", checks.is_some_and(|checks| checks.clock_changes.is_some())),
    ];
    match sections.into_iter().find(|(_, given)| config.samples.by_rows && *given) {
        Some((section, _)) => Err(needs_times(section)),
        None => Ok(()),
    }
}

/// Returns the error for a key that needs times.
pub(super) fn needs_times(key: &str) -> MessageAndHint {
    let message = format!("{key} needs times, but {KEY} is \"rows\": the samples have none");
    wrong(
        message,
        "remove it; or remove `order`, and name the column of the samples' times as `[session].time`",
    )
}
