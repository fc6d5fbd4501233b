//! EB-NeRD, the Ekstra Bladet News Recommendation Dataset (Kruse et al., RecSys Challenge 2024), as raw logs:
//! impressions of a newspaper's pages, the articles shown in each, and those clicked.
//!
//! | table | row | columns |
//! |---|---|---|
//! | `features.parquet` | impression | `request_id`, `split`, `session_id`, `timestamp`, `user_id`, `device_type`, `is_sso_user`, `gender`, `postcode`, `age`, `is_subscriber`, `page_article_id`, `hour`, `history`, `inview`, `inview_click_rate`, `inview_log_age_hours`, `inview_count`, `impression_id` |
//! | `events.parquet` | clicked article | `request_id`, `article_id`, `timestamp` |
//!
//! Impressions arrive in the order of time, then impression id, and are numbered in this order over both splits. A
//! session is (`split`, `session_id`), because session ids repeat between the splits. User attributes are ids: 0 =
//! unknown, else 1 + the logged number (booleans: 1 = no, 2 = yes). `page_article_id` is the article on whose page
//! the others were shown, or 0 for the front page. `history` is the reader's last [`HISTORY_WINDOW`] clicked
//! articles: first those in the history file of the split, then the clicks of earlier impressions in the split.
//! `inview`, `inview_click_rate` and `inview_log_age_hours` have one entry per article shown; the last two are
//! computed from the log before the impression. `read_time`, `scroll_percentage` and `next_*` are known only after
//! the click and are not written. An article that was clicked twice in an impression counts as clicked once.
//!
//! Memory: 28 bytes per impression during the sort and 4 bytes afterwards, half a kilobyte per user and split, a few
//! words per article and session, and one chunk of impressions.

mod arrival;
mod source;
mod state;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayBuilder, ArrayRef, AsArray, Float32Builder, Int64Array, Int64Builder, ListArray, ListBuilder,
    RecordBatch, StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::{DataType, Int64Type, SchemaRef, TimestampMicrosecondType};
use serde::Serialize;

use self::arrival::{Arrival, SPLIT_COLUMN};
use self::source::{SPLITS, column};
pub use self::state::HISTORY_WINDOW;
use self::state::ServiceState;
use crate::Result;
use crate::raw_log::{
    DATASET_CONFIG_FILE, RawLogWriter, TIME, TRAIN_CONFIG_FILE, TableWriter, list_row, schema,
};
use onefold_base::progress::Reporter;

/// The number of impressions that are sorted in memory at once.
const CHUNK_IMPRESSIONS: u32 = 512 << 10;
/// The number of impressions that are written at once.
const BATCH_IMPRESSIONS: usize = 4096;
const MICROS_PER_HOUR: i64 = 3_600_000_000;

/// Columns of an impression that are written unchanged, except for their names.
const PASSED_ON: [(&str, &str); 8] = [
    ("user_id", "user_id"),
    ("device_type", "device_type"),
    ("is_sso_user", "is_sso_user"),
    ("gender", "gender"),
    ("postcode", "postcode"),
    ("age", "age"),
    ("is_subscriber", "is_subscriber"),
    ("article_id", "page_article_id"),
];

/// Figures of the written raw logs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ImportSummary {
    /// The number of articles shown. Each of them becomes one sample.
    pub samples: u64,
    /// The number of impressions.
    pub impressions: u64,
    /// The number of sessions, which are distinct pairs of split and session id.
    pub sessions: u64,
    /// The number of users over both splits.
    pub users: u64,
    /// The number of distinct articles shown.
    pub articles: u64,
    /// The share of samples whose label is 1.
    pub positive_share: f64,
    /// The mean length of `history` over impressions.
    pub mean_history_length: f64,
    /// The number of impressions without articles, which give no samples.
    pub empty_impressions: u64,
    /// The number of clicks on articles that were not shown, which give no samples.
    pub clicks_not_shown: u64,
}

/// Converts the unpacked EB-NeRD at `from` into raw logs at `out`. Existing raw logs are replaced only if
/// `overwrite`.
///
/// # Errors
///
/// [`Error::Storage`](crate::Error::Storage) if `out` may not be replaced, [`Error::Fault`](crate::Error::Fault) that
/// names the file if a file is missing, damaged, empty or has other columns, and [`Error::Io`](crate::Error::Io) if
/// the output cannot be written. After an error, nothing is left at `out`.
pub fn import(from: &Path, out: &Path, overwrite: bool, reporter: &dyn Reporter) -> Result<ImportSummary> {
    import_in_chunks(from, out, overwrite, CHUNK_IMPRESSIONS, reporter)
}

fn import_in_chunks(
    from: &Path,
    out: &Path,
    overwrite: bool,
    chunk: u32,
    reporter: &dyn Reporter,
) -> Result<ImportSummary> {
    let splits = source::find(from)?;
    let writer = RawLogWriter::create(out, overwrite)?;
    let arrival = Arrival::read(&splits)?;
    let mut logs = Logs::start(&writer, ServiceState::read(&splits)?)?;
    reporter.begin("impressions", Some(u64::from(arrival.count)), "impressions");
    for start in (0..arrival.count).step_by(chunk as usize) {
        let end = arrival.count.min(start.saturating_add(chunk));
        let impressions = arrival.chunk(start..end)?;
        for offset in (0..impressions.num_rows()).step_by(BATCH_IMPRESSIONS) {
            let rows = BATCH_IMPRESSIONS.min(impressions.num_rows() - offset);
            logs.write(&impressions.slice(offset, rows))?;
            reporter.advance(rows as u64);
            reporter.go_on()?;
        }
    }
    reporter.end();
    let summary = logs.finish()?;
    writer.write_text(DATASET_CONFIG_FILE, include_str!("ebnerd/dataset.toml"))?;
    writer.write_text(TRAIN_CONFIG_FILE, include_str!("ebnerd/train.toml"))?;
    writer.commit()?;
    Ok(summary)
}

/// The two logs during the import.
#[derive(Debug)]
struct Logs {
    features: TableWriter,
    events: TableWriter,
    state: ServiceState,
    next_request: i64,
    sessions: HashSet<(i64, i64)>,
    users: HashSet<i64>,
    articles: HashSet<i64>,
    positives: u64,
    history_items: u64,
    summary: ImportSummary,
}

impl Logs {
    fn start(writer: &RawLogWriter, state: ServiceState) -> Result<Self> {
        Ok(Self {
            features: writer.table("features.parquet", feature_schema())?,
            events: writer.table("events.parquet", event_schema())?,
            state,
            next_request: 0,
            sessions: HashSet::new(),
            users: HashSet::new(),
            articles: HashSet::new(),
            positives: 0,
            history_items: 0,
            summary: ImportSummary::default(),
        })
    }

    /// Writes impressions. Successive calls must follow the order of arrival.
    fn write(&mut self, impressions: &RecordBatch) -> Result<()> {
        let rows = Impressions::of(impressions)?;
        let mut known = Known::default();
        let mut clicks = Vec::new();
        for row in 0..impressions.num_rows() {
            let (time, reader) = (rows.times.value(row), (rows.splits.value(row), rows.users.value(row)));
            let shown = list_row(rows.shown, row);
            let clicked = distinct(list_row(rows.clicked, row));
            self.state.advance(time);
            self.history_items += known.append(&self.state, reader, shown);
            self.state.record(reader, shown, &clicked);
            let request_id = self.next_request + row as i64;
            let click = |article_id: &i64| Click { request_id, article_id: *article_id, timestamp: time };
            clicks.extend(clicked.iter().map(click));
            self.sessions.insert((reader.0, rows.sessions.value(row)));
            self.users.insert(reader.1);
            self.count(shown, &clicked);
        }
        let features = feature_rows(impressions, self.next_request, &rows, known)?;
        self.features.write(&features)?;
        self.events.write_rows(&clicks)?;
        self.next_request += impressions.num_rows() as i64;
        Ok(())
    }

    fn count(&mut self, shown: &[i64], clicked: &[i64]) {
        self.articles.extend(shown);
        self.positives += shown.iter().filter(|article| clicked.contains(article)).count() as u64;
        let summary = &mut self.summary;
        summary.samples += shown.len() as u64;
        summary.impressions += 1;
        summary.empty_impressions += u64::from(shown.is_empty());
        summary.clicks_not_shown += clicked.iter().filter(|article| !shown.contains(article)).count() as u64;
    }

    fn finish(self) -> Result<ImportSummary> {
        self.features.finish()?;
        self.events.finish()?;
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        Ok(ImportSummary {
            sessions: self.sessions.len() as u64,
            users: self.users.len() as u64,
            articles: self.articles.len() as u64,
            positive_share: share(self.positives, self.summary.samples),
            mean_history_length: share(self.history_items, self.summary.impressions),
            ..self.summary
        })
    }
}

/// The columns of impressions that the import uses.
#[derive(Debug)]
struct Impressions<'a> {
    splits: &'a Int64Array,
    sessions: &'a Int64Array,
    users: &'a Int64Array,
    times: &'a TimestampMicrosecondArray,
    shown: &'a ListArray,
    clicked: &'a ListArray,
}

impl<'a> Impressions<'a> {
    fn of(rows: &'a RecordBatch) -> Result<Self> {
        Ok(Self {
            splits: column(rows, SPLIT_COLUMN)?.as_primitive::<Int64Type>(),
            sessions: column(rows, "session_id")?.as_primitive::<Int64Type>(),
            users: column(rows, "user_id")?.as_primitive::<Int64Type>(),
            times: column(rows, "impression_time")?.as_primitive::<TimestampMicrosecondType>(),
            shown: column(rows, "article_ids_inview")?.as_list::<i32>(),
            clicked: column(rows, "article_ids_clicked")?.as_list::<i32>(),
        })
    }
}

/// Returns the ids without repetitions. The join with the clicks would make one sample per repetition.
fn distinct(ids: &[i64]) -> Vec<i64> {
    let mut seen = HashSet::new();
    ids.iter().copied().filter(|id| seen.insert(*id)).collect()
}

/// The columns of the feature log with the service's knowledge at the time of an impression.
#[derive(Debug, Default)]
struct Known {
    history: ListBuilder<Int64Builder>,
    click_rate: ListBuilder<Float32Builder>,
    log_age_hours: ListBuilder<Float32Builder>,
}

impl Known {
    /// Appends an impression, and returns the length of its history.
    fn append(&mut self, state: &ServiceState, reader: state::Reader, shown: &[i64]) -> u64 {
        let before = self.history.values().len();
        self.history.values().extend(state.history(reader).map(Some));
        self.history.append(true);
        self.click_rate.values().extend(shown.iter().map(|article| Some(state.click_rate(*article))));
        self.click_rate.append(true);
        self.log_age_hours.values().extend(shown.iter().map(|article| Some(state.log_age_hours(*article))));
        self.log_age_hours.append(true);
        (self.history.values().len() - before) as u64
    }
}

/// A row of the event log.
#[derive(Debug, Serialize)]
struct Click {
    request_id: i64,
    article_id: i64,
    timestamp: i64,
}

fn feature_rows(
    impressions: &RecordBatch,
    first_request: i64,
    rows: &Impressions<'_>,
    mut known: Known,
) -> Result<RecordBatch> {
    let requests = first_request..first_request + impressions.num_rows() as i64;
    let splits =
        rows.splits.values().iter().map(|split| SPLITS.get(*split as usize).copied().unwrap_or_default());
    let hours = rows.times.values().iter().map(|time| time.div_euclid(MICROS_PER_HOUR).rem_euclid(24));
    let counts = rows.shown.value_offsets().windows(2).map(|pair| i64::from(pair[1] - pair[0]));
    let mut columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(requests)),
        Arc::new(StringArray::from_iter_values(splits)),
        Arc::new(rows.sessions.clone()),
        Arc::new(rows.times.clone()),
    ];
    for (name, _) in PASSED_ON {
        columns.push(column(impressions, name)?.clone());
    }
    let made: [ArrayRef; 7] = [
        Arc::new(Int64Array::from_iter_values(hours)),
        Arc::new(known.history.finish()),
        Arc::new(rows.shown.clone()),
        Arc::new(known.click_rate.finish()),
        Arc::new(known.log_age_hours.finish()),
        Arc::new(Int64Array::from_iter_values(counts)),
        column(impressions, "impression_id")?.clone(),
    ];
    columns.extend(made);
    Ok(RecordBatch::try_new(feature_schema(), columns)?)
}

fn feature_schema() -> SchemaRef {
    let list = |item| DataType::new_list(item, true);
    let mut fields = vec![
        ("request_id", DataType::Int64),
        ("split", DataType::Utf8),
        ("session_id", DataType::Int64),
        ("timestamp", TIME),
    ];
    fields.extend(PASSED_ON.map(|(_, name)| (name, DataType::Int64)));
    fields.extend([
        ("hour", DataType::Int64),
        ("history", list(DataType::Int64)),
        ("inview", list(DataType::Int64)),
        ("inview_click_rate", list(DataType::Float32)),
        ("inview_log_age_hours", list(DataType::Float32)),
        ("inview_count", DataType::Int64),
        ("impression_id", DataType::Int64),
    ]);
    schema(fields)
}

fn event_schema() -> SchemaRef {
    schema([("request_id", DataType::Int64), ("article_id", DataType::Int64), ("timestamp", TIME)])
}

#[cfg(test)]
mod tests;
