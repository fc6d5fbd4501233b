//! The SQL of `[[attributes]]`: the rows that can be used, and for every sample the row that is valid at its time.

use super::steps::{StepSql, timestamp};
use super::tables::RowState::{self, ClockChange, Future, NoKey, Past, Usable};
use super::tables::{CANDIDATES, attributes_table};
use crate::config::AttributesConfig;
use crate::error::Result;
use crate::sql::{have_keys, list, numbered, our_keys, quote, shown_keys, table};

impl StepSql<'_> {
    /// Returns the rows of the attributes with their key, `__onefold_from` (the time from which they are valid),
    /// and `__onefold_state` (their [`RowState`]).
    fn attribute_rows(&self, attributes: &AttributesConfig) -> Result<String> {
        let schema = self.columns.of(&attributes.source);
        let keys = numbered("__onefold_k", attributes.on.len());
        let mut read: Vec<String> = attributes
            .on
            .iter()
            .zip(&keys)
            .map(|((_, theirs), key)| format!("{} AS {key}", quote(theirs)))
            .collect();
        let mut nulls: Vec<String> = keys.iter().map(|key| format!("{key} IS NULL")).collect();
        let mut outside = String::new();
        match &attributes.time {
            Some(time) => {
                read.push(format!("{} AS __onefold_from", self.columns.time(schema, time)?));
                nulls.push("__onefold_from IS NULL".to_owned());
                let change = self.change_to_leave_out(time)?;
                read.extend(change.map(|change| format!("{change} AS __onefold_change")));
                outside = self.at_wrong_times(time, "__onefold_from");
            }
            None => read.push("CAST(0 AS BIGINT) AS __onefold_from".to_owned()),
        }
        read.extend(
            attributes.columns.iter().map(|(name, column)| format!("{} AS {}", quote(column), quote(name))),
        );
        Ok(format!(
            "SELECT *, CASE WHEN {} THEN {NoKey} {outside}ELSE {Usable} END AS __onefold_state FROM (SELECT {} FROM {})",
            nulls.join(" OR "),
            read.join(", "),
            table(&attributes.source),
        ))
    }

    /// Returns the numbers of rows of the attributes with a null key or time, with a time at a clock change, with a
    /// time too early, and with a time too late.
    pub(super) fn attribute_counts(&self, attributes: &AttributesConfig) -> Result<String> {
        let count = |state: RowState| format!("count(*) FILTER (WHERE __onefold_state = {state})");
        let rows = self.attribute_rows(attributes)?;
        let counts = [NoKey, ClockChange, Past, Future].map(count);
        Ok(format!("SELECT {} FROM ({rows})", counts.join(", ")))
    }

    /// Returns the first row of the attributes with a state, for a message.
    pub(super) fn example_attribute(&self, attributes: &AttributesConfig, state: RowState) -> Result<String> {
        let mut shown = shown_keys(&attributes.on);
        let time = attributes.time.as_ref().map(|time| &time.column);
        if let Some(time) = time.filter(|time| attributes.on.iter().all(|(_, theirs)| theirs != *time)) {
            shown += &format!(", {} AS {}", timestamp("__onefold_from"), quote(time));
        }
        Ok(format!(
            "SELECT {shown} FROM ({}) WHERE __onefold_state = {state} ORDER BY __onefold_from, 1 LIMIT 1",
            self.attribute_rows(attributes)?
        ))
    }

    /// Returns the distinct attributes with the time from which they are valid.
    pub(super) fn attributes(&self, attributes: &AttributesConfig) -> Result<String> {
        let keys = numbered("__onefold_k", attributes.on.len());
        let columns = list(attributes.columns.iter().map(|(name, _)| name));
        Ok(format!(
            "SELECT DISTINCT {}, __onefold_from, {columns} FROM ({}) WHERE __onefold_state = {Usable}",
            keys.join(", "),
            self.attribute_rows(attributes)?,
        ))
    }

    /// Returns for every key and time of the samples (`__onefold_at`) the start of the validity of the latest row
    /// of the `i`th attributes (`__onefold_latest`). Omits samples without a valid row. This is an as-of join: the
    /// samples and the attributes are sorted together by time, and a running maximum gives the latest attributes. A
    /// range join would compare every sample with all rows of its key.
    pub(super) fn attributes_in_time(&self, i: usize, attributes: &AttributesConfig) -> String {
        let keys = numbered("__onefold_k", attributes.on.len()).join(", ");
        let samples = format!(
            "SELECT DISTINCT {}, __onefold_time AS __onefold_at, __onefold_time AS __onefold_sorted, \
             CAST(NULL AS BIGINT) AS __onefold_from FROM ({}) WHERE {}",
            our_keys(&attributes.on),
            self.distinct(),
            have_keys(&attributes.on)
        );
        let starts = format!(
            "SELECT {keys}, CAST(NULL AS BIGINT) AS __onefold_at, __onefold_from AS __onefold_sorted, __onefold_from FROM {}",
            attributes_table(i)
        );
        // The window frame includes all rows with the same time, so attributes are valid from their own time on.
        let latest = format!(
            "SELECT {keys}, __onefold_at, max(__onefold_from) OVER (PARTITION BY {keys} ORDER BY __onefold_sorted \
             RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS __onefold_latest FROM ({samples} UNION ALL {starts})"
        );
        format!("SELECT * FROM ({latest}) WHERE __onefold_at IS NOT NULL AND __onefold_latest IS NOT NULL")
    }

    /// Returns the first key of the `i`th attributes that has different rows with the same time, for a message.
    pub(super) fn contradiction(&self, i: usize, attributes: &AttributesConfig) -> String {
        let keys = numbered("__onefold_k", attributes.on.len()).join(", ");
        format!(
            "SELECT {} FROM {} GROUP BY {keys}, __onefold_from HAVING count(*) > 1 ORDER BY {keys} LIMIT 1",
            shown_keys(&attributes.on),
            attributes_table(i)
        )
    }

    /// Returns the first sample without a row of the `i`th attributes, for a message.
    pub(super) fn example_without(&self, i: usize) -> String {
        let columns = list(self.identifying());
        format!("SELECT {columns} FROM {CANDIDATES} WHERE __onefold_missing{i} ORDER BY {columns} LIMIT 1")
    }
}
