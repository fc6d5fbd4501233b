//! MovieLens 100K (Harper and Konstan, "The MovieLens Datasets", 2015) as raw logs: 100,000 ratings of 1,682
//! films by 943 users in 1997 and 1998. The wheel of `recbole` 1.2.1 on PyPI ships them.
//!
//! A rating is treated as a request: the service shows an item and logs its knowledge, and the user answers with a
//! rating. Requests arrive in the order of time, then user, then item, and are numbered in this order.
//!
//! | table | row | columns |
//! |---|---|---|
//! | `features.parquet` | request | `request_id`, `timestamp`, `user_id`, `item_id`; `history_items`, `history_ratings`, `liked_items`; `user_log_ratings`, `user_mean_rating`, `item_log_ratings`, `item_mean_rating` |
//! | `events.parquet` | rating | `request_id`, `timestamp`, `rating` |
//! | `users.parquet` | user | `user_id`, `age`, `gender`, `occupation`, `zip` |
//! | `items.parquet` | item | `item_id`, `release_year`, `genres` |
//!
//! Timestamps are UTC. Histories and means use only ratings with strictly earlier timestamps. Attributes are ids:
//! `age` in years; `gender` 1 = F, 2 = M; `occupation` 1 + its index among the 21 in alphabetical order; `zip` 1 +
//! the first digit, or 11 + the index of the first letter (Canada), from A; `release_year` the year − 1900, 0 =
//! unknown; `genres` the numbers in MovieLens' own `u.genre`, from 0.

mod parse;
mod point_in_time;
mod wheel;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use arrow::datatypes::{DataType, SchemaRef};
use arrow::temporal_conversions::timestamp_us_to_datetime;
use serde::Serialize;

use self::parse::{Item, Rating, SourceText, User};
pub use self::point_in_time::{HISTORY_WINDOW, LIKED_RATING};
use self::wheel::{CachedWheel, Wheel};
use crate::Result;
use crate::raw_log::{DATASET_CONFIG_FILE, RawLogWriter, TIME, TRAIN_CONFIG_FILE, schema};
use onefold_base::progress::Reporter;
use onefold_storage::path_on_disk;

/// The wheel that contains the files.
const WHEEL: Wheel = Wheel {
    requirement: "recbole==1.2.1",
    file_name: "recbole-1.2.1-py3-none-any.whl",
    sha256: "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
};
/// The directory of the files in the wheel.
const FOLDER: &str = "recbole/dataset_example/ml-100k";
/// The directory of the wheel in the cache.
const CACHE_FOLDER: &str = "movielens-100k";
/// A session ends when its user is inactive for a longer time. This is `gap` in `dataset.toml`.
const SESSION_GAP_MICROS: i64 = 30 * 60 * 1_000_000;
/// The number of tenths of the ratings that are used for training.
const TRAIN_TENTHS: usize = 8;
/// The number of rows that are collected in memory before they are written.
const BATCH_ROWS: usize = 8192;

/// Figures of the written raw logs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FetchSummary {
    /// The number of ratings. Each of them becomes one sample.
    pub samples: u64,
    /// The number of samples before the cut in time.
    pub train_samples: u64,
    /// The number of sessions, by user and gap.
    pub sessions: u64,
    /// The number of users.
    pub users: u64,
    /// The number of items.
    pub items: u64,
    /// The share of samples whose label is 1.
    pub positive_share: f64,
    /// The mean length of `history_items`.
    pub mean_history_length: f64,
    /// Whether the wheel was downloaded and not found in the cache.
    pub downloaded: bool,
}

/// Fetches MovieLens 100K into the cache, unless it is already there, and writes it as raw logs to `out`. If `cache`
/// is `None`, the environment determines the cache (`ONEFOLD_CACHE`, `XDG_CACHE_HOME`, `HOME`). Existing raw logs at
/// `out` are replaced only if `overwrite`.
///
/// # Errors
///
/// [`Error::Storage`](crate::Error::Storage) if `out` may not be replaced; [`Error::Fault`](crate::Error::Fault) if
/// Python's pip is missing or fails, or, with file and line, if the data are malformed;
/// [`Error::Io`](crate::Error::Io) and [`Error::Fault`](crate::Error::Fault) if the output cannot be written. After
/// an error, nothing is left at `out`.
pub fn fetch(
    out: &Path,
    cache: Option<&Path>,
    overwrite: bool,
    reporter: &dyn Reporter,
) -> Result<FetchSummary> {
    // This is checked first, to avoid a useless download.
    let writer = RawLogWriter::create(out, overwrite)?;
    let cache = match cache {
        Some(cache) => path_on_disk(cache, "downloads are kept on a local disk", "give a local path")?,
        None => wheel::default_cache(|name| std::env::var_os(name))?,
    };
    let cached = wheel::fetch(&WHEEL, &cache.join(CACHE_FOLDER), OsStr::new("python3"), reporter)?;
    let summary = write(&writer, &cached, reporter)?;
    writer.commit()?;
    Ok(summary)
}

/// Writes the raw logs from the files in a wheel.
fn write(writer: &RawLogWriter, wheel: &CachedWheel, reporter: &dyn Reporter) -> Result<FetchSummary> {
    let logs = Logs::read(&wheel.path)?;
    let cut = cut(&logs.ratings)
        .ok_or_else(|| parse::wrong(&wheel.path, "its ratings cannot be divided by time".to_owned()))?;
    let history_items = logs.write_requests(writer, reporter)?;
    writer.write_table("users.parquet", user_schema(), &logs.users.values().collect::<Vec<_>>())?;
    writer.write_table("items.parquet", item_schema(), &logs.items.values().collect::<Vec<_>>())?;
    writer.write_text(DATASET_CONFIG_FILE, &dataset_config(cut)?)?;
    writer.write_text(TRAIN_CONFIG_FILE, include_str!("movielens/train.toml"))?;
    let samples = logs.ratings.len();
    let liked = logs.ratings.iter().filter(|rating| rating.rating >= LIKED_RATING).count();
    Ok(FetchSummary {
        samples: samples as u64,
        train_samples: logs.ratings.partition_point(|rating| rating.timestamp < cut) as u64,
        sessions: sessions(&logs.ratings),
        users: logs.users.len() as u64,
        items: logs.items.len() as u64,
        positive_share: liked as f64 / samples as f64,
        mean_history_length: history_items as f64 / samples as f64,
        downloaded: wheel.downloaded,
    })
}

/// The contents of the files.
#[derive(Debug)]
struct Logs {
    /// The ratings in arrival order.
    ratings: Vec<Rating>,
    users: BTreeMap<i64, User>,
    items: BTreeMap<i64, Item>,
}

impl Logs {
    fn read(wheel: &Path) -> Result<Self> {
        let text = |name: &str| -> Result<SourceText> {
            let entry = format!("{FOLDER}/{name}");
            Ok(SourceText { text: wheel::read_entry(wheel, &entry)?, path: wheel.join(entry) })
        };
        let mut ratings = parse::ratings(&text("ml-100k.inter")?)?;
        ratings.sort_by_key(|rating| (rating.timestamp, rating.user, rating.item));
        let users = parse::users(&text("ml-100k.user")?)?;
        let items = parse::items(&text("ml-100k.item")?)?;
        Ok(Self { ratings, users, items })
    }

    /// Writes the feature log and the event log. Returns the number of items in all histories.
    fn write_requests(&self, writer: &RawLogWriter, reporter: &dyn Reporter) -> Result<u64> {
        let mut features = writer.table("features.parquet", feature_schema())?;
        let mut rows = Vec::with_capacity(BATCH_ROWS);
        let mut history_items = 0;
        reporter.begin("requests", Some(self.ratings.len() as u64), "ratings");
        point_in_time::walk(&self.ratings, |request| -> Result<()> {
            history_items += request.history_items.len() as u64;
            rows.push(request);
            if rows.len() == BATCH_ROWS {
                features.write_rows(&rows)?;
                rows.clear();
                reporter.advance(BATCH_ROWS as u64);
                reporter.go_on()?;
            }
            Ok(())
        })?;
        features.write_rows(&rows)?;
        reporter.end();
        features.finish()?;
        let event = |(request_id, rating): (i64, &Rating)| Event {
            request_id,
            timestamp: rating.timestamp,
            rating: rating.rating,
        };
        let events: Vec<Event> = (0..).zip(&self.ratings).map(event).collect();
        writer.write_table("events.parquet", event_schema(), &events)?;
        Ok(history_items)
    }
}

/// A row of the event log.
#[derive(Debug, Serialize)]
struct Event {
    request_id: i64,
    timestamp: i64,
    rating: i64,
}

/// Returns the timestamp of the cut. At most [`TRAIN_TENTHS`] of the ratings are before it, or fewer if ratings have
/// equal timestamps. Returns `None` if no rating is before it. The ratings are in arrival order.
fn cut(ratings: &[Rating]) -> Option<i64> {
    let cut = ratings.get(ratings.len() * TRAIN_TENTHS / 10)?.timestamp;
    ratings.first().is_some_and(|first| first.timestamp < cut).then_some(cut)
}

/// Returns the number of sessions. A session ends with a pause of the user that is longer than the gap.
fn sessions(ratings: &[Rating]) -> u64 {
    let mut last = BTreeMap::new();
    let starts = ratings.iter().filter(|rating| {
        let before = last.insert(rating.user, rating.timestamp);
        before.is_none_or(|before| rating.timestamp - before > SESSION_GAP_MICROS)
    });
    starts.count() as u64
}

fn list_type() -> DataType {
    DataType::new_list(DataType::Int64, true)
}

fn feature_schema() -> SchemaRef {
    schema([
        ("request_id", DataType::Int64),
        ("timestamp", TIME),
        ("user_id", DataType::Int64),
        ("item_id", DataType::Int64),
        ("history_items", list_type()),
        ("history_ratings", list_type()),
        ("liked_items", list_type()),
        ("user_log_ratings", DataType::Float32),
        ("user_mean_rating", DataType::Float32),
        ("item_log_ratings", DataType::Float32),
        ("item_mean_rating", DataType::Float32),
    ])
}

fn event_schema() -> SchemaRef {
    schema([("request_id", DataType::Int64), ("timestamp", TIME), ("rating", DataType::Int64)])
}

fn user_schema() -> SchemaRef {
    schema(["user_id", "age", "gender", "occupation", "zip"].map(|name| (name, DataType::Int64)))
}

fn item_schema() -> SchemaRef {
    schema([("item_id", DataType::Int64), ("release_year", DataType::Int64), ("genres", list_type())])
}

/// Returns the text of `dataset.toml`, which holds out the samples from `cut` on.
fn dataset_config(cut: i64) -> Result<String> {
    let cut = timestamp_us_to_datetime(cut).ok_or_else(|| {
        arrow::error::ArrowError::CastError(format!("{cut} µs is not a date of the calendar"))
    })?;
    Ok(include_str!("movielens/dataset.toml")
        .replace("{cut}", &cut.format("%Y-%m-%d %H:%M:%S%.f").to_string())
        .replace("{liked_rating}", &LIKED_RATING.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use arrow::array::{AsArray, RecordBatch};
    use arrow::datatypes::{Float32Type, Int64Type, TimestampMicrosecondType};
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;
    use onefold_base::progress::Silent;

    const RATINGS: &str = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n";
    const USERS: &str = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n\
        1\t24\tM\twriter\t05711\n2\t30\tF\tartist\tT8H1N\n";
    const ITEMS: &str = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n\
        1\tToy Story\t1995\tAnimation Comedy\n2\tFour Rooms\t1995\tThriller\n3\tunkonwn\tunkonwn\tunknown\n";

    /// Writes a wheel with these rating lines below the header.
    fn wheel(folder: &Path, ratings: &str) -> CachedWheel {
        let path = folder.join("recbole.whl");
        let mut archive = zip::ZipWriter::new(fs_err::File::create(&path).unwrap());
        let texts =
            [("inter", format!("{RATINGS}{ratings}")), ("user", USERS.into()), ("item", ITEMS.into())];
        for (name, text) in texts {
            let entry = format!("{FOLDER}/ml-100k.{name}");
            archive.start_file(entry, zip::write::SimpleFileOptions::default()).unwrap();
            archive.write_all(text.as_bytes()).unwrap();
        }
        archive.finish().unwrap();
        CachedWheel { path, downloaded: false }
    }

    fn write_to(out: &Path, ratings: &str) -> Result<FetchSummary> {
        let folder = tempfile::tempdir().unwrap();
        let writer = RawLogWriter::create(out, false)?;
        let summary = write(&writer, &wheel(folder.path(), ratings), &Silent)?;
        writer.commit()?;
        Ok(summary)
    }

    fn read(path: &Path) -> RecordBatch {
        let file = fs_err::File::open(path).unwrap().into_parts().0;
        let mut batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
        batches.next().unwrap().unwrap()
    }

    fn integers<'a>(rows: &'a RecordBatch, name: &str) -> &'a [i64] {
        rows.column_by_name(name).unwrap().as_primitive::<Int64Type>().values()
    }

    /// The lines are out of order. User 1 has two sessions (separated by 30 minutes and 1 second), and user 2 has
    /// one.
    const FIVE: &str = "1\t3\t4\t3901\n2\t2\t5\t2100\n1\t2\t5\t300\n1\t1\t2\t300\n2\t1\t3\t3900\n";

    #[test]
    fn ratings_arrive_in_order_of_time_user_and_item() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        write_to(&out, FIVE).unwrap();
        let features = read(&out.join("features.parquet"));
        assert_eq!(integers(&features, "request_id"), [0, 1, 2, 3, 4]);
        assert_eq!(integers(&features, "user_id"), [1, 1, 2, 2, 1]);
        assert_eq!(integers(&features, "item_id"), [1, 2, 2, 1, 3]);
        let times = features.column_by_name("timestamp").unwrap().as_primitive::<TimestampMicrosecondType>();
        assert_eq!(times.value(4), 3_901_000_000);
        let history = features.column_by_name("history_items").unwrap().as_list::<i32>();
        assert_eq!(history.value(4).as_primitive::<Int64Type>().values(), &[1, 2]);
        assert!(history.value(1).is_empty());
        let mean = features.column_by_name("user_mean_rating").unwrap().as_primitive::<Float32Type>();
        assert_eq!(mean.value(0), 3.0);
        let events = read(&out.join("events.parquet"));
        assert_eq!(integers(&events, "request_id"), [0, 1, 2, 3, 4]);
        assert_eq!(integers(&events, "rating"), [2, 5, 5, 3, 4]);
        assert_eq!(integers(&read(&out.join("users.parquet")), "occupation"), [21, 2]);
        assert_eq!(integers(&read(&out.join("items.parquet")), "release_year"), [95, 95, 0]);
    }

    #[test]
    fn the_summary_counts_samples_sessions_and_split() {
        let directory = tempfile::tempdir().unwrap();
        let summary = write_to(&directory.path().join("out"), FIVE).unwrap();
        let expected = FetchSummary {
            samples: 5,
            train_samples: 4,
            sessions: 3,
            users: 2,
            items: 3,
            positive_share: 0.6,
            mean_history_length: 0.6,
            downloaded: false,
        };
        assert_eq!(summary, expected);
    }

    #[test]
    fn a_cache_that_is_no_local_folder_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for (cache, message) in [("~/cache", "did not expand `~`"), ("s3://bucket/cache", "on a local disk")]
        {
            let fetched = fetch(&directory.path().join("out"), Some(Path::new(cache)), false, &Silent);
            let error = fetched.unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(cache), "{error}");
        }
    }

    fn at(timestamps: &[i64]) -> Vec<Rating> {
        timestamps.iter().map(|&timestamp| Rating { timestamp, user: 1, item: 1, rating: 1 }).collect()
    }

    #[test]
    fn the_cut_does_not_separate_equal_times() {
        assert_eq!(cut(&at(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])), Some(9));
        assert_eq!(cut(&at(&[1, 2, 3, 4, 5, 6, 7, 7, 7, 7])), Some(7));
        assert_eq!(cut(&at(&[1, 1])), None);
    }

    #[test]
    fn a_gap_of_just_half_an_hour_does_not_end_a_session() {
        let half_hour = 1_800_000_000;
        assert_eq!(sessions(&at(&[0, half_hour])), 1);
        assert_eq!(sessions(&at(&[0, half_hour + 1])), 2);
    }

    #[test]
    fn the_configurations_are_filled_in() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        write_to(&out, FIVE).unwrap();
        let text = fs_err::read_to_string(out.join(DATASET_CONFIG_FILE)).unwrap();
        assert!(text.contains("TIMESTAMP '1970-01-01 01:05:01'"), "{text}");
        assert!(text.contains("e.rating >= 4"), "{text}");
        let train = fs_err::read_to_string(out.join(TRAIN_CONFIG_FILE)).unwrap();
        assert!(train.parse::<toml::Table>().unwrap().contains_key("model"), "{train}");
    }

    #[test]
    fn fractions_of_seconds_survive_in_the_cut() {
        let text = dataset_config(1_500_000).unwrap();
        assert!(text.contains("TIMESTAMP '1970-01-01 00:00:01.500'"), "{text}");
    }

    #[test]
    fn errors_leave_nothing_behind() {
        let cases = [
            ("", "its ratings cannot be divided by time"),
            ("1\t1\t3\t5\n1\t2\t3\n", "ml-100k.inter`: line 3 is malformed"),
            ("1\t1\t3\t5\n1\t2\t3\t5\n", "its ratings cannot be divided by time"),
        ];
        let directory = tempfile::tempdir().unwrap();
        for (ratings, message) in cases {
            let error = write_to(&directory.path().join("out"), ratings).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains("recbole.whl"), "{error}");
            assert_eq!(fs_err::read_dir(directory.path()).unwrap().count(), 0);
        }
    }
}
