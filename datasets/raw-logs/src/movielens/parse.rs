//! Parsers of RecBole's atomic files, which contain tab-separated lines below a header of typed names. The checksum
//! of the wheel is verified before parsing, so an error only names the line.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{Error, Result, error};

/// The 19 genres. The id of a genre is its index here, which is its number in MovieLens' own `u.genre`.
const GENRES: &str = "unknown Action Adventure Animation Children's Comedy Crime Documentary Drama \
                      Fantasy Film-Noir Horror Musical Mystery Romance Sci-Fi Thriller War Western";
/// The 21 occupations of MovieLens' `u.occupation`. The id of an occupation is its index here plus 1.
const OCCUPATIONS: &str = "administrator artist doctor educator engineer entertainment executive \
                           healthcare homemaker lawyer librarian marketing none other programmer retired \
                           salesman scientist student technician writer";
/// The genders. The id of a gender is its index here plus 1.
const GENDERS: &str = "F M";
/// The texts of an unknown release year (items 267 and 1412).
const NO_YEAR: [&str; 2] = ["unkonwn", "V"];
/// The year before the first one with an id. The id of a year is the difference to it, and 0 is unknown.
const YEAR_ZERO: i64 = 1900;
/// The ids of users and items.
const IDS: RangeInclusive<i64> = 1..=1_682;

/// The text of one of the files, and its origin.
#[derive(Debug)]
pub(super) struct SourceText {
    /// The path of the wheel, followed by the name of the entry.
    pub(super) path: PathBuf,
    /// The complete text.
    pub(super) text: String,
}

/// A rating of an item by a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rating {
    /// Microseconds since 1970.
    pub(super) timestamp: i64,
    /// The user's id, from 1.
    pub(super) user: i64,
    /// The item's id, from 1.
    pub(super) item: i64,
    /// The rating, from 1 to 5.
    pub(super) rating: i64,
}

/// Attributes of a user, as ids: a row of the users' table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct User {
    pub(super) user_id: i64,
    pub(super) age: i64,
    pub(super) gender: i64,
    pub(super) occupation: i64,
    pub(super) zip: i64,
}

/// Attributes of an item, as ids: a row of the items' table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Item {
    pub(super) item_id: i64,
    pub(super) release_year: i64,
    pub(super) genres: Vec<i64>,
}

/// Parses `ml-100k.inter`, in the order of the file.
///
/// # Errors
///
/// [`Error::Fault`] with the number of the malformed line.
pub(super) fn ratings(source: &SourceText) -> Result<Vec<Rating>> {
    parse(source, |[user, item, rating, seconds]: [&str; 4]| {
        let seconds = seconds.parse::<f64>().ok().filter(|seconds| (0.0..1e11).contains(seconds))?;
        let timestamp = (seconds * 1e6).round() as i64;
        Some(Rating {
            timestamp,
            user: whole(user, IDS)?,
            item: whole(item, IDS)?,
            rating: whole(rating, 1..=5)?,
        })
    })
}

/// Parses `ml-100k.user`. The result is ordered by user id.
pub(super) fn users(source: &SourceText) -> Result<BTreeMap<i64, User>> {
    parse(source, |[user, age, gender, occupation, zip]: [&str; 5]| {
        let user = User {
            user_id: whole(user, IDS)?,
            age: whole(age, 1..=127)?,
            gender: place(gender, GENDERS)? + 1,
            occupation: place(occupation, OCCUPATIONS)? + 1,
            zip: zip_prefix(zip)?,
        };
        Some((user.user_id, user))
    })
}

/// Parses `ml-100k.item`. The result is ordered by item id.
pub(super) fn items(source: &SourceText) -> Result<BTreeMap<i64, Item>> {
    parse(source, |[item, _title, year, genres]: [&str; 4]| {
        let release_year = match NO_YEAR.contains(&year) {
            true => 0,
            false => whole(year, YEAR_ZERO + 1..=YEAR_ZERO + 127)? - YEAR_ZERO,
        };
        let genres = genres.split(' ').map(|genre| place(genre, GENRES)).collect::<Option<_>>()?;
        let item = Item { item_id: whole(item, IDS)?, release_year, genres };
        Some((item.item_id, item))
    })
}

/// Parses the lines below the header, which have `N` fields each.
fn parse<'a, const N: usize, T, C: FromIterator<T>>(
    source: &'a SourceText,
    record: impl Fn([&'a str; N]) -> Option<T>,
) -> Result<C> {
    let parsed = source.text.lines().zip(1..).skip(1).map(|(line, number)| {
        let fields: Vec<&'a str> = line.split('\t').collect();
        let parsed = <[&'a str; N]>::try_from(fields).ok().and_then(&record);
        parsed.ok_or_else(|| wrong(&source.path, format!("line {number} is malformed")))
    });
    parsed.collect()
}

/// Parses a whole number in `range`.
fn whole(field: &str, range: RangeInclusive<i64>) -> Option<i64> {
    field.parse().ok().filter(|number| range.contains(number))
}

/// Returns the index of a field in the list `known`.
fn place(field: &str, known: &str) -> Option<i64> {
    known.split(' ').position(|name| name == field).map(|place| place as i64)
}

/// Returns the id of the first character of a zip code, which indicates a region.
fn zip_prefix(zip: &str) -> Option<i64> {
    match zip.bytes().next()? {
        digit @ b'0'..=b'9' => Some(i64::from(digit - b'0') + 1),
        letter @ b'A'..=b'Z' => Some(i64::from(letter - b'A') + 11),
        _ => None,
    }
}

/// Makes an error about one of the files.
pub(super) fn wrong(path: &Path, message: String) -> Error {
    let hint =
        "the file is not MovieLens 100K as RecBole ships it; delete the cached wheel and fetch it again";
    error::source(path, message, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(lines: &str) -> SourceText {
        SourceText { path: "recbole.whl/ml-100k.x".into(), text: format!("a header\n{lines}") }
    }

    #[test]
    fn lines_become_ratings_users_and_items() {
        let rating = Rating { timestamp: 881_250_949_000_000, user: 196, item: 242, rating: 3 };
        assert_eq!(ratings(&source("196\t242\t3\t881250949\n")).unwrap(), [rating]);
        let parsed = users(&source("7\t24\tM\twriter\t05711\n9\t30\tF\tartist\tT8H1N\n")).unwrap();
        assert_eq!(parsed[&7], User { user_id: 7, age: 24, gender: 2, occupation: 21, zip: 1 });
        assert_eq!(parsed[&9], User { user_id: 9, age: 30, gender: 1, occupation: 2, zip: 30 });
        let text = "1\tToy Story\t1995\tAnimation Children's\n2\tunkonwn\tunkonwn\tunknown\n";
        let parsed = items(&source(text)).unwrap();
        assert_eq!(parsed[&1], Item { item_id: 1, release_year: 95, genres: vec![3, 4] });
        assert_eq!(parsed[&2], Item { item_id: 2, release_year: 0, genres: vec![0] });
    }

    #[test]
    fn a_malformed_line_is_named() {
        for line in ["1\t2\t3", "1\t2\t6\t9", "0\t2\t3\t9", "1\t-2\t3\t9", "1\t2\t3\tNaN"] {
            let error = ratings(&source(&format!("1\t2\t3\t9\n{line}\n"))).unwrap_err().to_string();
            assert!(error.starts_with("`recbole.whl/ml-100k.x`: line 3 is malformed\n"), "{error}");
        }
        for line in ["1\t24\tM\twritter\t0", "1\t24\tM\twriter\t", "1\t24\tX\twriter\t0"] {
            assert!(users(&source(line)).is_err(), "{line}");
        }
        for line in ["1\tx\t95\tDrama", "1\tx\t1995\tDrama  War"] {
            assert!(items(&source(line)).is_err(), "{line}");
        }
    }
}
