//! The SQL of `[join]`: the events that belong to a sample, and the labels that they determine.

use super::steps::StepSql;
use super::tables::RowState::Usable;
use super::tables::{EVENTS, ROWS, USABLE};
use crate::config::{Credit, JoinConfig, LabelConfig};
use crate::error::Result;
use crate::sessionize::EVENT_TIME;
use crate::sql::{enclosed, equal, first_of_each, numbered, our_keys, quote, shown_keys};

impl StepSql<'_> {
    /// Returns the columns of the events that the labels read.
    pub(super) fn read_by_labels(&self, join: &JoinConfig) -> Result<Vec<String>> {
        let mut read = Vec::new();
        for (_, label) in &join.labels {
            if let LabelConfig::When(sql) | LabelConfig::Value { aggregate: sql, .. } = label {
                read.extend(self.columns.read_by(self.columns.of(&join.source), sql)?);
            }
        }
        Ok(first_of_each(&read))
    }

    /// Returns for every key of `[join]` the numbers of its events that are late, early, or belong to no row. An
    /// event is late if even the last sample at or before it is further away than the window.
    pub(super) fn event_classes(&self, join: &JoinConfig) -> String {
        let (keys, ours) = (numbered("__onefold_k", join.on.len()).join(", "), our_keys(&join.on));
        let samples = format!(
            "SELECT {ours}, __onefold_time AS __onefold_at, 0 AS __onefold_kind FROM ({})",
            self.distinct()
        );
        let events = format!(
            "SELECT {keys}, __onefold_time AS __onefold_at, 1 AS __onefold_kind FROM {EVENTS} WHERE {USABLE}"
        );
        let others = format!(
            "SELECT {ours}, coalesce(__onefold_time, 0) AS __onefold_at, 2 AS __onefold_kind FROM {ROWS} \
             WHERE __onefold_state <> {Usable}"
        );
        let over = format!(
            "OVER (PARTITION BY {keys} ORDER BY __onefold_at, __onefold_kind \
             ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
        );
        let seen = format!(
            "SELECT {keys}, __onefold_kind, __onefold_at, \
             max(CASE WHEN __onefold_kind = 0 THEN __onefold_at END) {over} AS __onefold_seen \
             FROM ({samples} UNION ALL {events} UNION ALL {others})"
        );
        format!(
            "SELECT {keys}, count(*) FILTER (WHERE __onefold_kind = 1 AND __onefold_at > __onefold_seen + {}) AS __onefold_late, \
             CASE WHEN min(__onefold_kind) = 0 THEN count(*) FILTER (WHERE __onefold_kind = 1 AND __onefold_seen IS NULL) \
             ELSE 0 END AS __onefold_early, \
             CASE WHEN min(__onefold_kind) = 1 AND max(__onefold_kind) = 1 THEN count(*) ELSE 0 END AS __onefold_orphans \
             FROM ({seen}) GROUP BY {keys}",
            join.window_micros
        )
    }

    /// Returns the first key with events of a class, for a message.
    pub(super) fn example_event(&self, join: &JoinConfig, class: &str) -> String {
        format!(
            "SELECT {} FROM ({}) WHERE __onefold_{class} > 0 ORDER BY {} LIMIT 1",
            shown_keys(&join.on),
            self.event_classes(join),
            numbered("__onefold_k", join.on.len()).join(", ")
        )
    }

    /// Returns the labels by key and time of a sample, computed from the events in its window.
    pub(super) fn labels(&self, join: &JoinConfig) -> Result<String> {
        match join.credit {
            Credit::Every => Ok(self.labels_of_every(join)),
            Credit::Last => self.labels_of_one(join, "max"),
            Credit::First => self.labels_of_one(join, "min"),
        }
    }

    /// Returns the labels as aggregates over events, and the time of the latest event if that is kept. `time` is the
    /// column with the time of the event, and `sample` with that of the sample.
    fn label_columns(&self, join: &JoinConfig, time: &str, sample: &str) -> String {
        let seconds = format!("({time} - {sample} + 999999) / 1000000");
        let labels = join.labels.iter().map(|(name, label)| match label {
            LabelConfig::When(sql) => {
                format!("max(CASE WHEN {} THEN 1 ELSE 0 END) AS {}", enclosed(sql), quote(name))
            }
            LabelConfig::Value { aggregate, .. } => {
                format!("CAST({} AS DOUBLE) AS {}", enclosed(aggregate), quote(name))
            }
            LabelConfig::Delay(Some(sql)) => {
                format!(
                    "CAST(min(CASE WHEN {} THEN {seconds} END) AS DOUBLE) AS {}",
                    enclosed(sql),
                    quote(name)
                )
            }
            LabelConfig::Delay(None) => format!("CAST(max({seconds}) AS DOUBLE) AS {}", quote(name)),
        });
        let latest = self.keeps_event_times().then(|| format!("max({time}) AS {EVENT_TIME}"));
        labels.chain(latest).collect::<Vec<_>>().join(", ")
    }

    /// Returns the [`labels`](Self::labels) if an event belongs to one of the samples whose windows contain it: the
    /// sample with the largest or the smallest time. Events and samples are sorted together, once.
    fn labels_of_one(&self, join: &JoinConfig, which: &str) -> Result<String> {
        let (keys, ours) = (numbered("__onefold_k", join.on.len()).join(", "), our_keys(&join.on));
        let read: Vec<String> = self.read_by_labels(join)?.iter().map(|name| quote(name)).collect();
        let read_of = |value: &dyn Fn(&String) -> String| -> String {
            read.iter().map(|name| format!(", {} AS {name}", value(name))).collect()
        };
        let events = format!(
            "SELECT {keys}, __onefold_time AS __onefold_at, 1 AS __onefold_kind{} FROM {EVENTS} WHERE {USABLE}",
            read_of(&String::clone)
        );
        let samples = format!(
            "SELECT {ours}, __onefold_time AS __onefold_at, 0 AS __onefold_kind{} FROM ({})",
            read_of(&|_| "NULL".to_owned()),
            self.distinct()
        );
        let credited = format!(
            "SELECT *, {which}(CASE WHEN __onefold_kind = 0 THEN __onefold_at END) OVER (PARTITION BY {keys} \
             ORDER BY __onefold_at RANGE BETWEEN {} PRECEDING AND CURRENT ROW) AS __onefold_credited \
             FROM ({events} UNION ALL {samples})",
            join.window_micros
        );
        Ok(format!(
            "SELECT {keys}, __onefold_credited AS __onefold_at, count(*) AS __onefold_events, {} FROM ({credited}) \
             WHERE __onefold_kind = 1 AND __onefold_credited IS NOT NULL GROUP BY {keys}, __onefold_credited",
            self.label_columns(join, "__onefold_at", "__onefold_credited")
        ))
    }

    /// Returns the [`labels`](Self::labels) if an event belongs to all samples whose windows contain it.
    fn labels_of_every(&self, join: &JoinConfig) -> String {
        let keys = numbered("__onefold_k", join.on.len());
        let samples: Vec<String> = (0..join.on.len()).map(|i| format!("__onefold_s{i}")).collect();
        let ours: Vec<String> = join
            .on
            .iter()
            .zip(&samples)
            .map(|((ours, _), name)| format!("{} AS {name}", quote(ours)))
            .collect();
        // Several samples may have the same key and time. If the join's key identifies a sample, each key has one
        // sample.
        let key = &self.config.samples.key;
        let alone = !key.is_empty() && key.iter().all(|name| join.on.iter().any(|(ours, _)| ours == name));
        let distinct = if alone { "" } else { "DISTINCT " };
        let named: Vec<String> =
            samples.iter().zip(&keys).map(|(sample, key)| format!("{sample} AS {key}")).collect();
        format!(
            "SELECT {}, __onefold_at, count(*) AS __onefold_events, {} FROM (SELECT * FROM {EVENTS} WHERE {USABLE}) \
             JOIN (SELECT {distinct}{}, __onefold_time AS __onefold_at FROM ({})) ON {} AND __onefold_time >= __onefold_at \
             AND __onefold_time <= __onefold_at + {} GROUP BY {}, __onefold_at",
            named.join(", "),
            self.label_columns(join, "__onefold_time", "__onefold_at"),
            ours.join(", "),
            self.distinct(),
            equal(keys.iter().zip(&samples)),
            join.window_micros,
            samples.join(", "),
        )
    }
}
