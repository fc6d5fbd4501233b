//! Chooses the time column of a log, and finds out how to read its values.

use chrono::Utc;
use chrono::format::StrftimeItems;
use datafusion::arrow::compute::kernels::cast_utils::string_to_datetime;

use super::columns::{Column, Type, in_comment, is_word, tokens};
use crate::clock::{Zone, parse_with_format};
use crate::config::EpochUnit;
use crate::times::{FIRST_PLAUSIBLE, shown};

/// The formats of times in texts. The first format that fits is used.
const FORMATS: [&str; 17] = [
    "%m/%d/%Y %I:%M:%S %p",
    "%m/%d/%Y %H:%M:%S",
    "%d/%m/%Y %H:%M:%S",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    "%Y/%m/%d %H:%M:%S",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%dT%H:%M",
    "%d/%b/%Y:%H:%M:%S %z",
    "%a %b %d %H:%M:%S %Y",
    "%a, %d %b %Y %H:%M:%S %z",
    "%Y/%m/%d",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%Y",
];
/// Words in the names of times, and of days.
const TIMES: &str = "timestamp time ts datetime when at utc";
const DAYS: &str = "date day";
/// Words in the names of times that are not the time of the row.
const OTHER_TIMES: &str = "birth birthday end expires expiry updated modified publish published release released checkin \
    checkout ci co last next click clicked valid signup registered purchased bought until dwell";
/// Words in the names of times since the beginning of a log. Such a name has no other words.
const RELATIVE: &str = "timestamp time ts start event t offset elapsed datetime seconds date";

/// The way to read a column as a time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Found {
    /// The keys of the configuration besides `column`, as TOML.
    pub(super) keys: Vec<String>,
    /// The times of the first rows, in microseconds since 1970.
    micros: Vec<i64>,
    /// The evidence for this way.
    how: String,
    /// A question for the user to check, if the choice is not certain.
    pub(super) doubt: Option<String>,
}

impl Found {
    fn new(keys: &[String], micros: Vec<i64>, how: impl Into<String>) -> Option<Self> {
        let keys = keys.to_vec();
        (!micros.is_empty()).then(|| Self { keys, micros, how: how.into(), doubt: None })
    }

    /// Returns the choice and its evidence, for a comment.
    pub(super) fn evidence(&self, column: &Column) -> String {
        let first = self.micros.iter().min().copied().unwrap_or_default();
        let last = self.micros.iter().max().copied().unwrap_or_default();
        let value = column.present().next().unwrap_or_default();
        let (first, last) = (in_comment(&shown(first)), in_comment(&shown(last)));
        format!("{}: {}, {first} to {last}", in_comment(value), self.how)
    }

    /// Returns whether the times of `column` have neither a zone nor an offset, and are no counts since 1970.
    pub(super) fn is_local(&self, column: &Column) -> bool {
        let has_offset = |text: &str| {
            text.get(10..).is_some_and(|rest| rest.contains(['Z', '+', '-']) || rest.contains("UTC"))
        };
        let is_count = self.keys.iter().any(|key| key.starts_with("unit"));
        !is_count && !column.present().any(has_offset)
    }

    /// Returns whether a time is before the earliest accepted time, and whether a time is after now.
    pub(super) fn is_past_and_future(&self) -> (bool, bool) {
        let now = Utc::now().timestamp_micros();
        let has_limit = self.keys.iter().any(|key| key.starts_with("not_before"));
        let is_past = |micros: &i64| *micros < FIRST_PLAUSIBLE;
        (!has_limit && self.micros.iter().any(is_past), self.micros.iter().any(|micros| *micros > now))
    }
}

/// Returns the column that is most likely the time of the rows.
pub(super) fn choose(columns: &[Column]) -> Option<(&Column, Found)> {
    let candidates = columns.iter().filter_map(|column| {
        let found = read(column)?;
        Some((score(column, &found), column, found))
    });
    // The first column wins among columns with equal scores.
    let best = candidates.reduce(|best, other| if other.0 > best.0 { other } else { best });
    best.map(|(_, column, found)| (column, found))
}

fn score(column: &Column, found: &Found) -> i32 {
    let mut score = match column.kind {
        Type::Time => 30,
        Type::Text => 25,
        _ => 20,
    };
    let says = |words: &str| i32::from(column.says(words));
    score += 20 * says(TIMES) + 10 * says(DAYS);
    score += 5 * says("event impression request search log shown searched view created");
    score -= 40 * says(OTHER_TIMES);
    if found.doubt.is_some() {
        score -= 30;
    }
    // The time of a row is normally not null.
    score - 40 * i32::from(2 * column.nulls() > column.values.len()) - 10 * i32::from(column.nulls() > 0)
}

/// Returns how to read the values of a column as times; `None` if they are not times, or nothing indicates that they
/// are.
pub(super) fn read(column: &Column) -> Option<Found> {
    if column.is_list || column.is_folder || column.is_empty() {
        return None;
    }
    let is_named = column.says(TIMES) || column.says(DAYS);
    match column.kind {
        Type::Time => Found::new(&[], all(column, iso)?, "a timestamp"),
        Type::Text => of_texts(column),
        kind if kind.is_integer() || kind.is_float() => {
            let numbers = column.numbers()?;
            if kind.is_integer()
                && is_named
                && let Some(micros) =
                    all(column, |text| (text.len() == 8).then(|| by_format(text, "%Y%m%d")).flatten())
            {
                return Found::new(&["format = \"%Y%m%d\"".to_owned()], micros, "digits of a date");
            }
            if column.is_binary() || (column.is_id() && !is_named) {
                return None;
            }
            by_unit(column, &numbers, is_named).or_else(|| relative(column, &numbers))
        }
        _ => None,
    }
}

/// Returns whether the values of a column are names of time zones, as `Europe/Madrid`.
pub(super) fn are_zones(column: &Column) -> bool {
    let is_zone = |text: &str| (text.contains('/') || text == "UTC") && text.parse::<Zone>().is_ok();
    column.kind == Type::Text && !column.is_empty() && column.present().all(is_zone)
}

fn all(column: &Column, micros: impl Fn(&str) -> Option<i64>) -> Option<Vec<i64>> {
    column.present().map(micros).collect()
}

fn iso(text: &str) -> Option<i64> {
    string_to_datetime(&Utc, text).ok().map(|time| time.timestamp_micros())
}

fn by_format(text: &str, format: &str) -> Option<i64> {
    let items = StrftimeItems::new(format).parse().ok()?;
    parse_with_format(text.trim(), &items, None).map(|instant| instant.micros)
}

fn of_texts(column: &Column) -> Option<Found> {
    if let Some(micros) = all(column, |text| if text.len() < 10 { None } else { iso(text) }) {
        return Found::new(&[], micros, "a text in ISO 8601");
    }
    let fits = |format: &'static str| Some((format, all(column, |text| by_format(text, format))?));
    let fitting: Vec<(&str, Vec<i64>)> = FORMATS.into_iter().filter_map(fits).collect();
    // If both orders of day and month fit, the first rows of a log are more likely to be close in time.
    let length = |micros: &[i64]| {
        micros.iter().max().zip(micros.iter().min()).map(|(last, first)| last.saturating_sub(*first))
    };
    let (format, micros) = fitting.iter().min_by_key(|(_, micros)| length(micros))?;
    let other = match format.get(..5) {
        Some("%m/%d") => "%d/%m",
        Some("%d/%m") => "%m/%d",
        _ => "",
    };
    let both_fit = !other.is_empty() && fitting.iter().any(|(format, _)| format.starts_with(other));
    let doubt = both_fit.then(|| format!("day and month may be the other way round, as `{other}/%Y`"));
    let found = Found::new(&[format!("format = \"{format}\"")], micros.clone(), "without a zone, so UTC")?;
    Some(Found { doubt, ..found })
}

/// Reads counts since 1970, in the unit in which all values are between 1990 and now. If the name is that of a time, a
/// quarter of the values may be others, such as -1 for an unknown time.
fn by_unit(column: &Column, numbers: &[f64], is_named: bool) -> Option<Found> {
    let now = Utc::now().timestamp_micros() as f64;
    let in_unit = |unit: EpochUnit| -> Option<Vec<i64>> {
        let micros = numbers.iter().map(|number| number * 1e6 / unit.per_second() as f64);
        let micros: Vec<f64> = micros.collect();
        let plausible =
            micros.iter().filter(|micros| (FIRST_PLAUSIBLE as f64..=now).contains(*micros)).count();
        let is_unit = plausible == micros.len() || (is_named && 4 * plausible >= 3 * micros.len());
        is_unit.then(|| micros.into_iter().map(|micros| micros as i64).collect())
    };
    let (unit, micros) = EpochUnit::ALL.into_iter().find_map(|unit| Some((unit, in_unit(unit)?)))?;
    let name = match unit {
        EpochUnit::Second => "seconds",
        EpochUnit::Millisecond => "milliseconds",
        EpochUnit::Microsecond => "microseconds",
        EpochUnit::Nanosecond => "nanoseconds",
    };
    let found = Found::new(&[format!("unit = \"{unit}\"")], micros, name)?;
    let doubt = (!is_named)
        .then(|| format!("nothing but its values says that `{}` is a time", in_comment(&column.name)));
    Some(Found { doubt, ..found })
}

/// Reads counts since the beginning of the log. Their unit is unknown.
fn relative(column: &Column, numbers: &[f64]) -> Option<Found> {
    let words = tokens(&column.name);
    let is_named = !words.is_empty() && words.iter().all(|word| is_word(word, RELATIVE));
    let is_short = numbers.iter().all(|number| (0.0..=1e9).contains(number));
    if column.is_unnamed || !is_named || !is_short || column.nulls() > 0 {
        return None;
    }
    let keys = ["unit = \"s\"".to_owned(), "not_before = 1970-01-01".to_owned()];
    let micros = numbers.iter().map(|number| (number * 1e6) as i64).collect();
    let found =
        Found::new(&keys, micros, "no time since 1970, so perhaps seconds since the beginning of the log")?;
    Some(Found { doubt: Some("the unit may be another one: `s`, `ms`, `us` or `ns`".to_owned()), ..found })
}
