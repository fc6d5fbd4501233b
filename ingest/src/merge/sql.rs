//! The SQL of a merge: finds the sessions of the dataset that late samples continue, the samples that exist already,
//! and the sessions that late and existing samples form together.
//!
//! A dataset does not store the users or keys that identify its sessions, but a session's id is computed from them and
//! from the session's start ([`onefold_datasets::session_id`]). A session of the dataset therefore belongs to the user
//! of a late sample if the id computed from this user and the session's start equals the session's id. Only sessions
//! with the same 16 high bits, which depend on the user alone, are compared.

use onefold_datasets::Sessions;

use crate::cluster::Origin::{Known, Late, Old};
use crate::cluster::{DIGEST, OLD_SESSION, ORIGIN, PARTITION, RECORD, SEQUENCE, partition_column};
use crate::config::Config;
use crate::session_ids::SESSION_ID;
use crate::sessionize::{
    self, KEY, SESSION, START, SampleOrder, TIME, TOTALS, bucket, identity, quoted, same_session,
};

/// The times of the samples of the dataset.
pub(super) const OLD_TIMES: &str = "__onefold_old_times";
/// The hashes of the keys of the samples of the dataset.
pub(super) const OLD_KEYS: &str = "__onefold_old_keys";
/// The samples of the dataset with all columns.
pub(super) const OLD_SAMPLES: &str = "__onefold_old_samples";
/// The records of the samples of the dataset.
pub(super) const OLD_RECORDS: &str = "__onefold_old_records";
/// The sessions of the dataset, with their first and last time.
pub(super) const OLD_SESSIONS: &str = "__onefold_old_sessions";
/// The sessions of the dataset whose identities late samples have, with the identity.
pub(super) const FOUND: &str = "__onefold_found";
/// The identities and keys of the samples in the sessions of [`FOUND`].
pub(super) const KNOWN_KEYS: &str = "__onefold_known_keys";
/// The digests of samples of the dataset, by partition and session.
pub(super) const OLD_DIGESTS: &str = "__onefold_old_digests";
/// The records of late samples.
pub(super) const LATE_RECORDS: &str = "__onefold_late_records";
/// The number of samples per digest in the sessions of [`FOUND`], if samples have no keys.
pub(super) const KNOWN_DIGESTS: &str = "__onefold_known_digests";
/// The sessions that late samples and sessions of the dataset form: a row for each instant of a late sample, and for
/// each session of the dataset.
pub(super) const MERGED: &str = "__onefold_merged";
/// The sessions that late samples are added to.
pub(super) const GROWN: &str = "__onefold_grown";
/// The sessions of the dataset that become part of the sessions of [`GROWN`].
pub(super) const MOVED: &str = "__onefold_moved";
/// The number of a sample among equal late samples, from 1, if samples have no keys.
const COPY: &str = "__onefold_copy";
/// The first and the last time of a session.
const FIRST: &str = "__onefold_first_time";
pub(super) const LAST: &str = "__onefold_last_time";
/// The range of buckets of a session.
pub(super) const RANGE: &str = "__onefold_range";
/// A number of samples or rows.
pub(super) const COUNT: &str = "__onefold_count";

/// Generates the SQL for one configuration.
pub(super) struct Sql<'a> {
    pub(super) config: &'a Config,
    pub(super) order: SampleOrder,
    /// The query of the identities and times of late samples.
    pub(super) instants: String,
}

impl Sql<'_> {
    /// Returns the start of the day or hour of [`START`], or 0.
    fn period(&self) -> String {
        self.config.partition_by.map_or_else(|| "CAST(0 AS BIGINT)".to_owned(), sessionize::start_of_period)
    }

    /// Returns the query of the partition columns, ranges of buckets and times of the late samples, with one row per
    /// day or hour. [`START`] and [`LAST`] are the first and last time.
    pub(super) fn places(&self) -> String {
        let partition = self.partition_list();
        let times = format!(
            "SELECT {partition}{SESSION_ID}({}, '') AS {SESSION}, {TIME} AS {START} FROM ({})",
            sessionize::whose(self.config),
            self.instants
        );
        let places = format!(
            "SELECT {partition}{} AS {RANGE}, {} AS __onefold_period, {START} AS moment FROM ({times})",
            self.range(),
            self.period()
        );
        format!(
            "SELECT {partition}{RANGE}, min(moment) AS {START}, max(moment) AS {LAST} FROM ({places}) GROUP BY {partition}{RANGE}, __onefold_period"
        )
    }

    /// Returns the partition columns, each followed by a comma.
    fn partition_list(&self) -> String {
        quoted(&self.config.partition_columns).iter().map(|column| format!("{column}, ")).collect()
    }

    fn range(&self) -> String {
        format!("CAST({} AS BIGINT)", bucket(self.order.buckets.ranges()))
    }

    /// Returns the query of [`OLD_SESSIONS`].
    pub(super) fn old_sessions(&self) -> String {
        let partition: String =
            (0..self.config.partition_columns.len()).map(|i| format!("{}, ", partition_column(i))).collect();
        let session = format!("{partition}{PARTITION}, {OLD_SESSION}");
        format!(
            "SELECT {session}, min({TIME}) AS {FIRST}, max({TIME}) AS {LAST} FROM {OLD_TIMES} GROUP BY {session}"
        )
    }

    /// Returns the query of [`FOUND`].
    pub(super) fn found(&self) -> String {
        let by = identity(self.config).join(", ");
        let identities = format!(
            "SELECT *, {SESSION_ID}({}, '') >> 47 AS high FROM \
             (SELECT {by}, min({TIME}) AS lowest, max({TIME}) AS highest FROM ({}) GROUP BY {by})",
            sessionize::whose(self.config),
            self.instants
        );
        let partition: String = quoted(&self.config.partition_columns)
            .iter()
            .enumerate()
            .map(|(i, column)| format!(" AND i.{column} = o.{}", partition_column(i)))
            .collect();
        let near = match self.config.session {
            Sessions::Key(_) => String::new(),
            Sessions::Gap { gap_micros, .. } => {
                format!(" AND o.{FIRST} - {gap_micros} <= i.highest AND o.{LAST} + {gap_micros} >= i.lowest")
            }
        };
        let pairs = format!(
            "SELECT i.*, o.{PARTITION}, o.{OLD_SESSION}, o.{FIRST}, o.{LAST} FROM ({identities}) i \
             JOIN (SELECT *, {OLD_SESSION} >> 47 AS high FROM {OLD_SESSIONS}) o ON i.high = o.high{partition}{near}"
        );
        format!(
            "SELECT {by}, {PARTITION}, {OLD_SESSION}, {FIRST}, {LAST} FROM ({pairs}) WHERE {} = {OLD_SESSION}",
            sessionize::session_id(self.config, FIRST)
        )
    }

    /// Returns the query of the partitions and ranges of the sessions of [`FOUND`].
    pub(super) fn found_ranges(&self) -> String {
        format!(
            "SELECT DISTINCT {PARTITION}, {} AS {RANGE} FROM (SELECT {PARTITION}, {OLD_SESSION} AS {SESSION} FROM {FOUND})",
            self.range()
        )
    }

    /// Returns the identity as columns with other names, for joins.
    fn renamed_identity(&self) -> Vec<String> {
        let columns = identity(self.config);
        columns.iter().enumerate().map(|(i, column)| format!("f.{column} AS __onefold_i{i}")).collect()
    }

    /// Returns the query of [`KNOWN_KEYS`].
    pub(super) fn known_keys(&self) -> String {
        let by = self.renamed_identity().join(", ");
        format!(
            "SELECT DISTINCT {by}, k.{KEY} FROM {FOUND} f JOIN {OLD_KEYS} k \
             ON f.{PARTITION} = k.{PARTITION} AND f.{OLD_SESSION} = k.{OLD_SESSION}"
        )
    }

    /// Returns the query of the rows of a view of late samples whose keys are not in [`KNOWN_KEYS`].
    pub(super) fn without_known_keys(&self, view: &str) -> String {
        let on: String = identity(self.config)
            .iter()
            .enumerate()
            .map(|(i, column)| format!("k.__onefold_i{i} = s.{column} AND "))
            .collect();
        let hash = sessionize::key_hash(self.config).unwrap_or_default();
        format!(
            "SELECT s.* FROM {KNOWN_KEYS} k RIGHT ANTI JOIN (SELECT *, {hash} AS {KEY} FROM {view}) s ON {on}k.{KEY} = s.{KEY}"
        )
    }

    /// Returns the query of [`OLD_DIGESTS`].
    pub(super) fn old_digests(&self) -> String {
        format!(
            "SELECT {PARTITION}, {OLD_SESSION}, {TIME}, {} FROM {OLD_RECORDS} WHERE NOT {TOTALS}",
            DIGEST.join(", ")
        )
    }

    /// Returns the query of the records of late samples in `records`, with [`COPY`] if samples have no keys. Totals are
    /// among them.
    pub(super) fn copies(&self, records: &str) -> String {
        if self.is_keyed() {
            return format!("SELECT * FROM {records}");
        }
        let by = identity(self.config).join(", ");
        format!(
            "SELECT *, CAST(row_number() OVER (PARTITION BY {TOTALS}, {by}, {TIME}, {} ORDER BY {TIME}) AS BIGINT) AS {COPY} \
             FROM {records}",
            DIGEST.join(", ")
        )
    }

    fn is_keyed(&self) -> bool {
        !self.config.samples.key.is_empty()
    }

    /// Returns the query of [`KNOWN_DIGESTS`].
    pub(super) fn known_digests(&self) -> String {
        let digest = DIGEST.join(", ");
        let identity = self.renamed_identity();
        let by: Vec<String> = (0..identity.len()).map(|i| format!("__onefold_i{i}")).collect();
        let by = by.join(", ");
        format!(
            "SELECT {by}, {TIME}, {digest}, count(*) AS {COUNT} FROM \
             (SELECT {}, o.{TIME}, o.{}, o.{} FROM {FOUND} f JOIN {OLD_DIGESTS} o \
             ON f.{PARTITION} = o.{PARTITION} AND f.{OLD_SESSION} = o.{OLD_SESSION}) GROUP BY {by}, {TIME}, {digest}",
            identity.join(", "),
            DIGEST[0],
            DIGEST[1],
        )
    }

    /// Returns the query of the number of late samples that the dataset already has.
    pub(super) fn known_samples(&self) -> String {
        let marked = self.marked(&format!("r.{TIME}"));
        format!("SELECT count(*) FROM ({marked}) WHERE {ORIGIN} = {Known}")
    }

    /// Returns the query of [`MERGED`]: instants and sessions by identity, with the start and the id of the session
    /// that they become part of.
    pub(super) fn merged(&self) -> String {
        let by = identity(self.config).join(", ");
        let none = format!("CAST(NULL AS BIGINT) AS {PARTITION}, CAST(NULL AS BIGINT) AS {OLD_SESSION}");
        let (late, starts);
        let over =
            format!("OVER (PARTITION BY {by} ORDER BY {FIRST}, {LAST}, {PARTITION}, {OLD_SESSION} ROWS");
        match self.config.session {
            Sessions::Key(_) => {
                late = format!(
                    "SELECT {by}, min({TIME}) AS {FIRST}, max({TIME}) AS {LAST}, {none} FROM {LATE_RECORDS} GROUP BY {by}"
                );
                starts =
                    format!("SELECT *, min({FIRST}) {over} UNBOUNDED PRECEDING) AS {START} FROM all_of_them");
            }
            Sessions::Gap { gap_micros, .. } => {
                late = format!(
                    "SELECT DISTINCT {by}, {TIME} AS {FIRST}, {TIME} AS {LAST}, {none} FROM {LATE_RECORDS}"
                );
                let reached = format!(
                    "SELECT *, max({LAST}) {over} BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached FROM all_of_them"
                );
                let begins =
                    format!("CASE WHEN {FIRST} - reached <= {gap_micros} THEN NULL ELSE {FIRST} END");
                starts = format!(
                    "SELECT *, max({begins}) {over} UNBOUNDED PRECEDING) AS {START} FROM ({reached})"
                );
            }
        }
        let sessions = format!("SELECT {by}, {FIRST}, {LAST}, {PARTITION}, {OLD_SESSION} FROM {FOUND}");
        format!(
            "WITH all_of_them AS ({late} UNION ALL {sessions}) \
             SELECT {by}, {FIRST} AS {TIME}, {PARTITION}, {OLD_SESSION}, {START}, {} AS {SESSION} FROM ({starts})",
            sessionize::session_id(self.config, START)
        )
    }

    /// Returns the query of the sessions of late samples, like [`sessionize::sessions`] for a build.
    pub(super) fn sessions(&self) -> String {
        let time = match self.config.session {
            Sessions::Key(_) => String::new(),
            Sessions::Gap { .. } => format!("{TIME}, "),
        };
        let by = identity(self.config).join(", ");
        format!("SELECT {by}, {time}{START}, {SESSION} FROM {MERGED} WHERE {OLD_SESSION} IS NULL")
    }

    /// Returns the query of late samples with their [`ORIGIN`]. If several late samples are equal, as many of them are
    /// known as the dataset has. Samples with known keys have been dropped before.
    fn marked(&self, columns: &str) -> String {
        if self.is_keyed() {
            return format!("SELECT {columns}, CAST({Late} AS BIGINT) AS {ORIGIN} FROM {LATE_RECORDS} r");
        }
        let identity = identity(self.config);
        let same = identity.iter().enumerate().map(|(i, column)| format!("k.__onefold_i{i} = r.{column}"));
        let same = same.chain([TIME, DIGEST[0], DIGEST[1]].map(|column| format!("k.{column} = r.{column}")));
        format!(
            "SELECT {columns}, CASE WHEN r.{COPY} <= k.{COUNT} THEN CAST({Known} AS BIGINT) ELSE CAST({Late} AS BIGINT) END AS {ORIGIN} \
             FROM {KNOWN_DIGESTS} k RIGHT JOIN {LATE_RECORDS} r ON {}",
            same.collect::<Vec<_>>().join(" AND ")
        )
    }

    /// Returns the query of [`GROWN`].
    pub(super) fn grown(&self) -> String {
        let columns: Vec<String> = identity(self.config)
            .iter()
            .map(|column| format!("r.{column}"))
            .chain([format!("r.{TIME}")])
            .collect();
        let partition: String =
            quoted(&self.config.partition_columns).iter().map(|column| format!("s.{column}, ")).collect();
        let session = format!("{partition}n.{START}, n.{SESSION}");
        format!(
            "SELECT {session}, count(*) AS {COUNT} FROM ({}) n JOIN ({}) s ON {} WHERE s.{ORIGIN} = {Late} GROUP BY {session}",
            self.sessions(),
            self.marked(&columns.join(", ")),
            same_session(self.config)
        )
    }

    /// Returns the query of the partitions and ranges of [`GROWN`] sessions, with the number of late samples that they
    /// get.
    pub(super) fn grown_ranges(&self) -> String {
        let partition = self.partition_list();
        let places = format!(
            "SELECT {partition}{} AS __onefold_period, {} AS {RANGE}, {COUNT} FROM {GROWN}",
            self.period(),
            self.range()
        );
        format!(
            "SELECT {partition}__onefold_period AS {START}, {RANGE}, CAST(sum({COUNT}) AS BIGINT) AS {COUNT} FROM ({places}) \
             GROUP BY {partition}__onefold_period, {RANGE}"
        )
    }

    /// Returns the query of [`MOVED`].
    pub(super) fn moved(&self) -> String {
        let partition: String =
            quoted(&self.config.partition_columns).iter().map(|column| format!("g.{column}, ")).collect();
        format!(
            "SELECT {partition}m.{PARTITION}, m.{OLD_SESSION}, m.{START}, m.{SESSION} FROM {GROWN} g JOIN {MERGED} m \
             ON m.{SESSION} = g.{SESSION} AND m.{START} = g.{START} WHERE m.{OLD_SESSION} IS NOT NULL"
        )
    }

    /// Returns the query of the partitions from which and to which sessions of the dataset move, with their ranges.
    pub(super) fn moves(&self) -> String {
        let partition = self.partition_list();
        let places = format!(
            "SELECT {partition}{} AS __onefold_period, {} AS {RANGE}, {PARTITION} FROM {MOVED}",
            self.period(),
            self.range()
        );
        format!(
            "SELECT DISTINCT {partition}__onefold_period AS {START}, {RANGE}, {PARTITION} FROM ({places})"
        )
    }

    /// Returns the column that orders samples with equal times before the columns of the configuration do.
    pub(super) fn first(&self) -> Option<&'static str> {
        (!self.config.order.is_empty()).then_some(SEQUENCE)
    }

    /// Returns the query of the records of late samples, and of the dataset if `with_old`, in no order.
    pub(super) fn records(&self, with_old: bool) -> String {
        let columns = sessionize::key_columns(self.config);
        let key = (!self.config.samples.key.is_empty()).then_some(KEY);
        let rest: Vec<&str> = key.into_iter().chain([TIME]).chain(DIGEST).collect();
        let record = |of: &str| format!("arrow_cast({of}.{RECORD}, 'Binary') AS {RECORD}");
        let of = |of: &str, columns: &[String]| -> Vec<String> {
            columns.iter().map(|column| format!("{of}.{column}")).collect()
        };
        let rest: Vec<String> = rest.into_iter().map(str::to_owned).collect();
        let mut wanted = of("r", &quoted(&columns));
        wanted.extend(of("r", &rest));
        wanted.push(format!("r.{RECORD}"));
        let mut late = of("s", &quoted(&columns));
        late.extend(of("s", &rest));
        late.push(record("s"));
        let late = format!(
            "SELECT {}, n.{START}, n.{SESSION}, s.{ORIGIN}, CAST(NULL AS BIGINT) AS {SEQUENCE}, FALSE AS {TOTALS} FROM ({}) n JOIN ({}) s ON {}",
            late.join(", "),
            self.sessions(),
            self.marked(&wanted.join(", ")),
            same_session(self.config)
        );
        let mut all = late;
        if with_old {
            let is_partition =
                |column: &String| self.config.partition_columns.iter().position(|p| p == column);
            let columns =
                columns.iter().zip(quoted(&columns)).map(|(column, quoted)| match is_partition(column) {
                    Some(i) => format!("s.{} AS {quoted}", partition_column(i)),
                    None => format!("NULL AS {quoted}"),
                });
            let mut old: Vec<String> = columns.collect();
            old.extend(of("s", &rest));
            old.push(record("s"));
            let place = format!(
                "SELECT o.{PARTITION}, o.{OLD_SESSION}, coalesce(m.{START}, o.{FIRST}) AS {START}, \
                 coalesce(m.{SESSION}, o.{OLD_SESSION}) AS {SESSION} FROM {MOVED} m RIGHT JOIN {OLD_SESSIONS} o \
                 ON m.{PARTITION} = o.{PARTITION} AND m.{OLD_SESSION} = o.{OLD_SESSION}"
            );
            all = format!(
                "{all} UNION ALL SELECT {}, n.{START}, n.{SESSION}, CAST({Old} AS BIGINT), s.{SEQUENCE}, s.{TOTALS} FROM ({place}) n \
                 RIGHT JOIN {OLD_RECORDS} s ON n.{PARTITION} = s.{PARTITION} AND n.{OLD_SESSION} = s.{OLD_SESSION}",
                old.join(", ")
            );
        }
        all
    }
}
