//! Strict parsers of RecBole's atomic files: tab-separated lines under a header of typed names.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use onefold_datasets::suggest;

use crate::{Error, Result};

/// The 19 genres; a genre's id is its place here, which is its number in MovieLens' own `u.genre`.
pub(super) const GENRES: [&str; 19] = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
];
/// The 21 occupations of MovieLens' `u.occupation`; an occupation's id is its place here plus 1.
pub(super) const OCCUPATIONS: [&str; 21] = [
    "administrator",
    "artist",
    "doctor",
    "educator",
    "engineer",
    "entertainment",
    "executive",
    "healthcare",
    "homemaker",
    "lawyer",
    "librarian",
    "marketing",
    "none",
    "other",
    "programmer",
    "retired",
    "salesman",
    "scientist",
    "student",
    "technician",
    "writer",
];
/// Genders; a gender's id is its place here plus 1.
const GENDERS: [&str; 2] = ["F", "M"];
/// The best rating; the worst is 1.
pub(super) const LAST_RATING: i64 = 5;
/// The text in place of an unknown release year (items 267 and 1412).
const NO_YEAR: [&str; 2] = ["unkonwn", "V"];
/// The year before the first with an id; a year's id is its distance from it, and 0 is unknown.
const YEAR_ZERO: i64 = 1900;
/// The largest id of a release year.
pub(super) const LAST_YEAR_ID: i64 = 127;
/// The largest id of an age, which is the age in years.
pub(super) const LAST_AGE_ID: i64 = 127;
/// The range of ids of users and items. They become table rows, so a damaged line must not make a table huge.
const IDS: RangeInclusive<i64> = 1..=10_000_000;

const RATING_COLUMNS: [&str; 4] = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"];
const USER_COLUMNS: [&str; 5] =
    ["user_id:token", "age:token", "gender:token", "occupation:token", "zip_code:token"];
const ITEM_COLUMNS: [&str; 4] =
    ["item_id:token", "movie_title:token_seq", "release_year:token", "class:token_seq"];

/// One of the files and its origin.
#[derive(Debug)]
pub(super) struct SourceText {
    /// The wheel's path with the entry's name behind it.
    pub(super) path: PathBuf,
    /// The whole text.
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
    /// 1 to 5.
    pub(super) rating: i64,
}

/// Attributes of a user, as ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct User {
    pub(super) age: i64,
    pub(super) gender: i64,
    pub(super) occupation: i64,
    pub(super) zip: i64,
}

/// Attributes of an item, as ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) release_year: i64,
    pub(super) genres: Vec<i64>,
}

/// Reads `ml-100k.inter`, in the file's order.
///
/// # Errors
///
/// [`Error::Fault`] with the line, for a malformed line, and for a file without ratings.
pub(super) fn ratings(source: &SourceText) -> Result<Vec<Rating>> {
    let mut seen = HashSet::new();
    let mut ratings = Vec::new();
    for line in lines(source, RATING_COLUMNS)? {
        let line = line?;
        let user = line.whole(0, IDS)?;
        let item = line.whole(1, IDS)?;
        line.must_be_new(&mut seen, (user, item), "rates an item that the user has rated in a line above")?;
        let timestamp = line.micros(3)?;
        ratings.push(Rating { timestamp, user, item, rating: line.whole(2, 1..=LAST_RATING)? });
    }
    match ratings.is_empty() {
        true => Err(wrong(source, "it holds no ratings".to_owned())),
        false => Ok(ratings),
    }
}

/// Reads `ml-100k.user`, by user id.
///
/// # Errors
///
/// [`Error::Fault`] with the line, for a line that is malformed or repeats a user.
pub(super) fn users(source: &SourceText) -> Result<BTreeMap<i64, User>> {
    let mut users = BTreeMap::new();
    for line in lines(source, USER_COLUMNS)? {
        let line = line?;
        let user = User {
            age: line.whole(1, 1..=LAST_AGE_ID)?,
            gender: line.place(2, &GENDERS)? + 1,
            occupation: line.place(3, &OCCUPATIONS)? + 1,
            zip: line.zip_prefix(4)?,
        };
        if users.insert(line.whole(0, IDS)?, user).is_some() {
            return Err(line.wrong("describes a user that a line above describes"));
        }
    }
    Ok(users)
}

/// Reads `ml-100k.item`, by item id.
///
/// # Errors
///
/// [`Error::Fault`] with the line, for a line that is malformed or repeats an item.
pub(super) fn items(source: &SourceText) -> Result<BTreeMap<i64, Item>> {
    let mut items = BTreeMap::new();
    for line in lines(source, ITEM_COLUMNS)? {
        let line = line?;
        let release_year = match NO_YEAR.contains(&line.fields[2]) {
            true => 0,
            false => line.whole(2, YEAR_ZERO + 1..=YEAR_ZERO + LAST_YEAR_ID)? - YEAR_ZERO,
        };
        let genres = line.fields[3].split(' ').map(|genre| line.place_of(3, genre, &GENRES));
        let item = Item { release_year, genres: genres.collect::<Result<_>>()? };
        if items.insert(line.whole(0, IDS)?, item).is_some() {
            return Err(line.wrong("describes an item that a line above describes"));
        }
    }
    Ok(items)
}

/// One line below the header, split into its fields.
#[derive(Debug)]
struct Line<'a, const N: usize> {
    source: &'a SourceText,
    number: usize,
    columns: [&'static str; N],
    fields: [&'a str; N],
}

/// The lines below a header that must name `columns`.
fn lines<'a, const N: usize>(
    source: &'a SourceText,
    columns: [&'static str; N],
) -> Result<impl Iterator<Item = Result<Line<'a, N>>>> {
    let mut lines = source.text.lines().zip(1..);
    match lines.next() {
        Some((header, _)) if header.split('\t').eq(columns) => {}
        Some((header, _)) => {
            let message = format!("line 1: the columns are `{}`, not `{}`", header.trim(), columns.join(" "));
            return Err(wrong(source, message.replace('\t', " ")));
        }
        None => return Err(wrong(source, "it is empty".to_owned())),
    }
    Ok(lines.map(move |(text, number)| {
        let fields: Vec<&str> = text.split('\t').collect();
        let count = fields.len();
        let fields = <[&str; N]>::try_from(fields).map_err(|_| {
            wrong(source, format!("line {number}: it has {count} fields between tabs, not {N}"))
        })?;
        Ok(Line { source, number, columns, fields })
    }))
}

impl<const N: usize> Line<'_, N> {
    /// The field at `index` as a whole number in `range`; `3.0` is whole, too.
    fn whole(&self, index: usize, range: RangeInclusive<i64>) -> Result<i64> {
        let field = self.fields[index];
        let digits = field.strip_suffix(".0").unwrap_or(field);
        let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.parse().ok().filter(|number| plain && range.contains(number));
        number.ok_or_else(|| {
            self.wrong_field(index, &format!("not a whole number from {} to {}", range.start(), range.end()))
        })
    }

    /// The field at `index`, in seconds since 1970, as microseconds.
    fn micros(&self, index: usize) -> Result<i64> {
        let seconds = self.fields[index].parse::<f64>().ok().filter(|seconds| (0.0..1e11).contains(seconds));
        let micros = seconds.map(|seconds| (seconds * 1e6).round() as i64);
        micros.ok_or_else(|| self.wrong_field(index, "not a number of seconds since 1970"))
    }

    /// The place of the field at `index` among `known`.
    fn place(&self, index: usize, known: &[&str]) -> Result<i64> {
        self.place_of(index, self.fields[index], known)
    }

    /// The place of `value`, a part of the field at `index`, among `known`.
    fn place_of(&self, index: usize, value: &str, known: &[&str]) -> Result<i64> {
        let place = known.iter().position(|name| *name == value).map(|place| place as i64);
        place.ok_or_else(|| {
            self.wrong_field(
                index,
                &format!("and `{value}` is not known; {}", suggest(value, known.iter().copied())),
            )
        })
    }

    /// The id of the first character of the zip code at `index`, which names a region.
    fn zip_prefix(&self, index: usize) -> Result<i64> {
        match self.fields[index].bytes().next() {
            Some(digit @ b'0'..=b'9') => Ok(i64::from(digit - b'0') + 1),
            Some(letter @ b'A'..=b'Z') => Ok(i64::from(letter - b'A') + 11),
            _ => Err(self.wrong_field(index, "which starts with neither a digit nor a capital letter")),
        }
    }

    fn must_be_new<K: Hash + Eq>(&self, seen: &mut HashSet<K>, key: K, message: &str) -> Result<()> {
        if seen.insert(key) { Ok(()) } else { Err(self.wrong(message)) }
    }

    fn wrong_field(&self, index: usize, expected: &str) -> Error {
        let column = self.columns[index].split(':').next().unwrap_or_default();
        self.wrong(&format!("`{column}` is `{}`, {expected}", self.fields[index]))
    }

    fn wrong(&self, message: &str) -> Error {
        wrong(self.source, format!("line {}: {message}", self.number))
    }
}

/// An error in one of the files.
pub(super) fn wrong(source: &SourceText, message: String) -> Error {
    let hint =
        "the file is not MovieLens 100K as RecBole ships it; delete the cached wheel and fetch it again";
    Error::source(&source.path, message, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> SourceText {
        SourceText { path: "recbole.whl/ml-100k.x".into(), text: text.to_owned() }
    }

    const RATINGS: &str = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n";
    const USERS: &str = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n";
    const ITEMS: &str = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n";

    #[test]
    fn lines_become_ratings_users_and_items() {
        let rating = Rating { timestamp: 881_250_949_000_000, user: 196, item: 242, rating: 3 };
        assert_eq!(ratings(&source(&format!("{RATINGS}196\t242\t3\t881250949\n"))).unwrap(), [rating]);
        assert_eq!(ratings(&source(&format!("{RATINGS}196\t242\t3.0\t881250949.0\r\n"))).unwrap(), [rating]);
        let parsed =
            users(&source(&format!("{USERS}7\t24\tM\twriter\t05711\n9\t30\tF\tartist\tT8H1N\n"))).unwrap();
        assert_eq!(parsed[&7], User { age: 24, gender: 2, occupation: 21, zip: 1 });
        assert_eq!(parsed[&9], User { age: 30, gender: 1, occupation: 2, zip: 30 });
        let text = format!("{ITEMS}1\tToy Story\t1995\tAnimation Children's\n2\tunkonwn\tunkonwn\tunknown\n");
        let parsed = items(&source(&text)).unwrap();
        assert_eq!(parsed[&1], Item { release_year: 95, genres: vec![3, 4] });
        assert_eq!(parsed[&2], Item { release_year: 0, genres: vec![0] });
    }

    #[test]
    fn a_malformed_line_is_named_with_its_column() {
        let cases = [
            ("1\t2\t3", "line 2: it has 3 fields between tabs, not 4"),
            ("1\t2\t6\t9", "line 2: `rating` is `6`, not a whole number from 1 to 5"),
            ("1\t2\t3.5\t9", "line 2: `rating` is `3.5`, not"),
            ("0\t2\t3\t9", "line 2: `user_id` is `0`, not"),
            ("1\t-2\t3\t9", "line 2: `item_id` is `-2`, not"),
            ("1\t+2\t3\t9", "line 2: `item_id` is `+2`, not"),
            ("1\t99999999999999999999\t3\t9", "line 2: `item_id` is `99999999999999999999`, not"),
            ("1\t2\t3\tNaN", "line 2: `timestamp` is `NaN`, not"),
            ("1\t2\t3\t9\n\n", "line 3: it has 1 fields"),
            ("1\t2\t3\t9\n1\t2\t4\t10", "line 3: rates an item that the user has rated in a line above"),
        ];
        for (line, message) in cases {
            let error = ratings(&source(&format!("{RATINGS}{line}"))).unwrap_err().to_string();
            assert!(
                error.contains(message) && error.contains("`recbole.whl/ml-100k.x`"),
                "{line:?}: {error}"
            );
        }
    }

    #[test]
    fn unknown_values_and_repeated_keys_are_errors() {
        let user = |lines: &str| users(&source(&format!("{USERS}{lines}"))).unwrap_err().to_string();
        assert!(user("1\t24\tM\twritter\t0").contains("did you mean `writer`?"));
        assert!(user("1\t24\tM\twriter\t").contains("`zip_code` is ``"));
        assert!(user("1\t24\tM\twriter\t0\n1\t25\tF\twriter\t0").contains("line 3: describes a user"));
        let item = |lines: &str| items(&source(&format!("{ITEMS}{lines}"))).unwrap_err().to_string();
        assert!(item("1\tx\t95\tDrama").contains("`release_year` is `95`"));
        assert!(item("1\tx\t1995\tDrama  War").contains("`class` is `Drama  War`"));
    }

    #[test]
    fn an_empty_log_and_another_header_are_errors() {
        assert!(ratings(&source("")).unwrap_err().to_string().contains("it is empty"));
        assert!(ratings(&source(RATINGS)).unwrap_err().to_string().contains("it holds no ratings"));
        let error = ratings(&source("user_id:token\titem_id:token\n")).unwrap_err().to_string();
        assert!(error.contains("line 1: the columns are `user_id:token item_id:token`, not"), "{error}");
    }
}
