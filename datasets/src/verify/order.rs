//! Checks the order of samples and sessions, within and between row groups.

use crate::{Buckets, Order, Problem, SESSION_COLUMN, TIME_COLUMN};

/// Returns a message if the order does not allow session `now` after session `before`.
fn wrong_succession(order: Order, before: i64, now: i64) -> Option<String> {
    (order == Order::SessionHash && now < before)
        .then(|| format!("session {now} follows session {before}; sessions are ordered by their ids"))
}

/// Returns a message if the bucket of session `now`, which follows session `before`, is lower than the bucket
/// of `before`.
fn wrong_bucket(buckets: Buckets, before: i64, now: i64) -> Option<String> {
    let [first, second] = [before, now].map(|session| buckets.bucket_of(session));
    (second < first)
        .then(|| format!("session {now} of bucket {second} follows session {before} of bucket {first}"))
}

/// A summary of a row group, for checks against the neighbouring row groups.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Span {
    pub(super) rows: usize,
    /// The session and time of the first row.
    first: (i64, i64),
    /// The session and time of the last row.
    last: (i64, i64),
    /// The start time of the first session that begins after row 0, if it is in the same bucket.
    first_start: Option<i64>,
    /// The start time of the last session that begins after row 0.
    last_start: Option<i64>,
    /// In clustered order, the session of each run of consecutive samples of one session; in arrival order,
    /// each session once.
    runs: Vec<i64>,
    /// The decoded size in bytes if every sample had its own copies of its lists.
    pub(super) decoded_bytes: u64,
}

/// Returns a row group's span and the errors in its order: column, row and message.
pub(super) fn check_row_group(
    order: Order,
    buckets: Buckets,
    sessions: &[i64],
    times: &[i64],
) -> (Span, Vec<(&'static str, usize, String)>) {
    let mut span = Span { rows: times.len(), ..Span::default() };
    let (Some(first), Some(last)) = (times.first(), times.last()) else { return (span, Vec::new()) };
    span.first = (sessions[0], *first);
    span.last = (sessions[sessions.len() - 1], *last);
    match order.is_clustered() {
        true => span.runs.push(sessions[0]),
        false => span.runs = distinct(sessions.to_vec()),
    }
    let mut numbers = Finding::default();
    let mut descending = Finding::default();
    let mut starts = Finding::default();
    let bucket = |row: usize| buckets.bucket_of(sessions[row]);
    let mut is_first_bucket = true;
    for row in 1..times.len() {
        let (before, now) = (sessions[row - 1], sessions[row]);
        let enters_bucket = before != now && bucket(row - 1) != bucket(row);
        if enters_bucket {
            is_first_bucket = false;
            if let Some(message) = wrong_bucket(buckets, before, now) {
                numbers.add(row, || message);
            }
            if order.is_clustered() {
                span.runs.push(now);
            }
            span.last_start = Some(times[row]);
            continue;
        }
        if !order.is_clustered() || before == now {
            if times[row] < times[row - 1] {
                descending.add(row, || earlier(order));
            }
            continue;
        }
        span.runs.push(now);
        if let Some(message) = wrong_succession(order, before, now) {
            numbers.add(row, || message);
        }
        if order == Order::Session && span.last_start.is_some_and(|last| times[row] < last) {
            starts.add(row, || STARTS_EARLIER.to_owned());
        }
        if is_first_bucket && span.first_start.is_none() {
            span.first_start = Some(times[row]);
        }
        span.last_start = Some(times[row]);
    }
    span.runs.shrink_to_fit();
    let found = [(SESSION_COLUMN, numbers), (TIME_COLUMN, descending), (TIME_COLUMN, starts)];
    (span, found.into_iter().filter_map(|(column, finding)| finding.told(column)).collect())
}

/// Returns the distinct sessions in ascending order.
fn distinct(mut sessions: Vec<i64>) -> Vec<i64> {
    sessions.sort_unstable();
    sessions.dedup();
    sessions
}

const STARTS_EARLIER: &str = "the session starts earlier than the one before it";

fn earlier(order: Order) -> String {
    let within = if order.is_clustered() { " of its session" } else { "" };
    format!("the sample is earlier than the one before it{within}")
}

/// The first invalid row of a row group, and the number of invalid rows.
#[derive(Debug, Default)]
struct Finding {
    first: Option<(usize, String)>,
    rows: usize,
}

impl Finding {
    fn add(&mut self, row: usize, message: impl FnOnce() -> String) {
        self.rows += 1;
        if self.first.is_none() {
            self.first = Some((row, message()));
        }
    }

    fn told(self, column: &'static str) -> Option<(&'static str, usize, String)> {
        let (row, message) = self.first?;
        let message = match self.rows {
            1 => message,
            rows => format!("{message} (and so in {} more rows of the row group)", rows - 1),
        };
        Some((column, row, message))
    }
}

/// Checks the order of a range of buckets of a partition, row group by row group.
#[derive(Debug)]
pub(super) struct OrderCheck {
    order: Order,
    buckets: Buckets,
    /// The session of each run of samples of the last bucket so far. In arrival order, a session may be in
    /// it several times, but at most half of it are repetitions.
    runs: Vec<i64>,
    /// The number of distinct sessions at the start of `runs`, in arrival order.
    distinct: usize,
    /// The number of sessions of earlier buckets.
    sessions: u64,
    /// A session whose samples are not contiguous, in clustered order.
    split: Option<i64>,
    /// The session and time of the last row; `None` before the first row group and after an unreadable one.
    last: Option<(i64, i64)>,
    /// The start time of the session of the last row, if it is known.
    session_start: Option<i64>,
    /// The row groups so far.
    row_groups: Vec<Ended>,
}

/// The end of a row group of a partition.
#[derive(Debug)]
struct Ended {
    path: String,
    index: usize,
    decoded_bytes: u64,
    inside_session: bool,
}

impl OrderCheck {
    pub(super) fn new(order: Order, buckets: Buckets) -> Self {
        Self {
            order,
            buckets,
            runs: Vec::new(),
            distinct: 0,
            sessions: 0,
            split: None,
            last: None,
            session_start: None,
            row_groups: Vec::new(),
        }
    }

    /// Adds the next row group of the range, or `None` for one that could not be read.
    pub(super) fn next(&mut self, path: &str, index: usize, span: Option<Span>) -> Vec<Problem> {
        let Some(span) = span.filter(|span| span.rows > 0) else {
            (self.last, self.session_start) = (None, None);
            return Vec::new();
        };
        let problem = |column: &str, message: String| {
            Problem::new(path, message).in_row_group(index).in_column(column).in_row(0)
        };
        let mut problems = Vec::new();
        let (session, time) = span.first;
        let bucket = |session| self.buckets.bucket_of(session);
        if let Some((last, _)) = self.last
            && bucket(last) != bucket(session)
        {
            let wrong = wrong_bucket(self.buckets, last, session);
            problems.extend(wrong.map(|message| problem(SESSION_COLUMN, message)));
            (self.last, self.session_start) = (None, None);
        }
        let continues = self.order.is_clustered() && self.last.is_some_and(|(last, _)| last == session);
        if let (true, Some(before)) = (continues, self.row_groups.last_mut()) {
            before.inside_session = true;
        }
        match self.last {
            Some((_, last)) if (continues || !self.order.is_clustered()) && time < last => {
                problems.push(problem(TIME_COLUMN, earlier(self.order)));
            }
            Some((last, _)) if self.order.is_clustered() && !continues => {
                let wrong = wrong_succession(self.order, last, session);
                problems.extend(wrong.map(|message| problem(SESSION_COLUMN, message)));
            }
            _ => {}
        }
        if self.order == Order::Session {
            let starts = [(!continues).then_some(time), span.first_start];
            for start in starts.into_iter().flatten() {
                if self.session_start.is_some_and(|before| start < before) {
                    problems.push(problem(TIME_COLUMN, STARTS_EARLIER.to_owned()).in_row(None));
                }
                self.session_start = Some(start);
            }
            self.session_start = span.last_start.or(self.session_start);
        }
        self.last = Some(span.last);
        self.add_runs(&span.runs[usize::from(continues)..]);
        let (path, decoded_bytes) = (path.to_owned(), span.decoded_bytes);
        self.row_groups.push(Ended { path, index, decoded_bytes, inside_session: false });
        problems
    }

    /// Adds runs of samples. A session belongs to one bucket, so the sessions of a bucket are counted when the
    /// next bucket begins.
    fn add_runs(&mut self, runs: &[i64]) {
        let buckets = self.buckets;
        for of_bucket in runs.chunk_by(|a, b| buckets.bucket_of(*a) == buckets.bucket_of(*b)) {
            let bucket = buckets.bucket_of(of_bucket[0]);
            if self.runs.last().is_some_and(|last| buckets.bucket_of(*last) != bucket) {
                self.end_bucket();
            }
            self.runs.extend_from_slice(of_bucket);
        }
        if !self.order.is_clustered() && self.runs.len() > 2 * self.distinct {
            self.runs = distinct(std::mem::take(&mut self.runs));
            self.distinct = self.runs.len();
        }
    }

    /// Counts the sessions of the last bucket and forgets them.
    fn end_bucket(&mut self) {
        let mut runs = std::mem::take(&mut self.runs);
        runs.sort_unstable();
        if self.order.is_clustered() {
            let split = runs.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
            self.split = self.split.or(split);
        }
        runs.dedup();
        self.sessions += runs.len() as u64;
        self.distinct = 0;
    }

    /// Returns the memory in bytes that the sessions of the last bucket take at most after some more were
    /// added, apart from the memory of those: a vector at most doubles.
    pub(super) fn bytes(&self) -> u64 {
        2 * size_of::<i64>() as u64 * self.runs.len() as u64
    }

    /// Returns the number of sessions of the range, and in clustered order a session whose samples are not
    /// contiguous, if there is one.
    pub(super) fn sessions(&mut self) -> (u64, Option<i64>) {
        self.end_bucket();
        (self.sessions, self.split)
    }

    /// Returns the number of row groups that begin inside a session.
    pub(super) fn row_groups_inside_sessions(&self) -> u64 {
        self.row_groups.iter().filter(|ended| ended.inside_session).count() as u64
    }

    /// Returns problems for row groups that end inside a session although they had room for more samples.
    ///
    /// The writer ends a row group at the first session boundary after a target size, and inside a session
    /// only after twice that size. A row group that ends inside a session is therefore at least as large as
    /// the others, apart from one sample. This check allows half of that size, because a partition's files
    /// may come from writers with different samples.
    pub(super) fn small_row_groups(&self) -> Vec<Problem> {
        let whole = self.row_groups.iter().filter(|ended| !ended.inside_session);
        let largest = whole.map(|ended| ended.decoded_bytes).max().unwrap_or(0);
        let small = |ended: &&Ended| ended.inside_session && ended.decoded_bytes < largest / 2;
        let problem = |ended: &Ended| {
            let message = format!(
                "it ends inside a session with {} decoded bytes, another row group has {largest}",
                ended.decoded_bytes
            );
            Problem::new(&ended.path, message).in_row_group(ended.index)
        };
        self.row_groups.iter().filter(small).map(problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUCKETS: Buckets = Buckets { number: 2, in_range: 2 };
    /// The first session of bucket 1.
    const SECOND: i64 = 1 << 62;

    /// The session and time of a sample.
    type SessionAndTime = (i64, i64);

    /// Returns the messages for row groups of (session, time) pairs.
    fn messages(order: Order, row_groups: &[&[(i64, i64)]]) -> Vec<String> {
        let mut check = OrderCheck::new(order, BUCKETS);
        let mut found = Vec::new();
        for (index, rows) in row_groups.iter().enumerate() {
            let (sessions, times): (Vec<i64>, Vec<i64>) = rows.iter().copied().unzip();
            let (span, within) = check_row_group(order, BUCKETS, &sessions, &times);
            found.extend(within.into_iter().map(|(column, row, _)| format!("{index} {column} {row}")));
            let between = check.next("file", index, Some(span));
            found.extend(between.into_iter().map(|p| {
                format!("{index} {} {}", p.column.unwrap(), p.row.map_or("-".into(), |row| row.to_string()))
            }));
        }
        found
    }

    #[test]
    fn sound_orders_have_no_problem() {
        let split: [&[(i64, i64)]; 3] = [&[(0, 5), (0, 9), (1, 5)], &[(1, 5), (1, 30)], &[(2, 6), (3, 6)]];
        assert!(messages(Order::Session, &split).is_empty());
        let by_hash: [&[(i64, i64)]; 2] = [&[(0, 50), (1, 3), (2, 4)], &[(3, 1), (3, 2)]];
        assert!(messages(Order::SessionHash, &by_hash).is_empty());
        let arrival: [&[(i64, i64)]; 2] = [&[(4, 1), (0, 1), (4, 2)], &[(1, 2), (0, 3)]];
        assert!(messages(Order::Arrival, &arrival).is_empty());
    }

    #[test]
    fn every_kind_of_disorder_is_found_with_its_row() {
        let within: [(Order, &[SessionAndTime], &str); 4] = [
            (Order::Session, &[(0, 5), (0, 4)], "0 timestamp 1"),
            (Order::SessionHash, &[(0, 5), (2, 6), (1, 7)], "0 session_id 2"),
            (Order::Session, &[(0, 1), (1, 6), (2, 5)], "0 timestamp 2"),
            (Order::Arrival, &[(0, 5), (1, 4)], "0 timestamp 1"),
        ];
        for (order, rows, expected) in within {
            assert_eq!(messages(order, &[rows]), [expected], "{rows:?}");
        }
        let between: [(Order, [&[SessionAndTime]; 2], &str); 5] = [
            (Order::Session, [&[(0, 5)], &[(0, 4)]], "1 timestamp 0"),
            (Order::SessionHash, [&[(2, 5)], &[(0, 6)]], "1 session_id 0"),
            (Order::Session, [&[(0, 5), (0, 9)], &[(0, 9), (1, 4)]], "1 timestamp -"),
            (Order::Session, [&[(0, 5), (1, 8)], &[(2, 7)]], "1 timestamp -"),
            (Order::Arrival, [&[(0, 5)], &[(1, 4)]], "1 timestamp 0"),
        ];
        for (order, rows, expected) in between {
            assert_eq!(messages(order, &rows), [expected], "{rows:?}");
        }
    }

    #[test]
    fn every_bucket_has_its_own_order() {
        for order in [Order::Session, Order::SessionHash, Order::Arrival] {
            let within: [(i64, i64); 4] = [(0, 5), (1, 9), (SECOND, 1), (SECOND + 1, 2)];
            assert!(messages(order, &[&within]).is_empty(), "{order:?}");
            assert!(messages(order, &[&within[..2], &within[2..]]).is_empty(), "{order:?}");
            assert_eq!(messages(order, &[&[within[2], within[0]]]), ["0 session_id 1"], "{order:?}");
            assert_eq!(messages(order, &[&within[2..], &within[..2]]), ["1 session_id 0"], "{order:?}");
        }
        // The order continues within the second bucket.
        let rows = [(0, 5), (SECOND, 7), (SECOND + 1, 6)];
        assert_eq!(messages(Order::Session, &[&rows]), ["0 timestamp 2"]);
        assert_eq!(messages(Order::Session, &[&rows[..2], &rows[2..]]), ["1 timestamp -"]);
    }

    #[test]
    fn a_session_may_be_cut_only_where_it_does_not_fit() {
        let mut check = OrderCheck::new(Order::Session, BUCKETS);
        for (index, (first, last, decoded_bytes)) in
            [((0, 1), (1, 5), 100), ((1, 5), (1, 6), 210), ((1, 6), (3, 9), 120), ((4, 9), (4, 9), 10)]
                .into_iter()
                .enumerate()
        {
            let runs = (first.0..=last.0).collect();
            let span = Span { rows: 2, first, last, runs, decoded_bytes, ..Span::default() };
            assert!(check.next("file", index, Some(span)).is_empty());
        }
        assert_eq!((check.row_groups_inside_sessions(), check.sessions()), (2, (5, None)));
        assert!(check.small_row_groups().is_empty());
        check.row_groups[0].decoded_bytes = 59;
        let small = check.small_row_groups();
        assert_eq!((small.len(), small[0].row_group), (1, Some(0)));
    }

    #[test]
    fn hashed_sessions_are_contiguous_and_in_their_order() {
        let found = |order, row_groups: [&[SessionAndTime]; 2]| {
            let mut check = OrderCheck::new(order, BUCKETS);
            let mut problems = 0;
            for (index, rows) in row_groups.iter().enumerate() {
                let (sessions, times): (Vec<i64>, Vec<i64>) = rows.iter().copied().unzip();
                let (span, within) = check_row_group(order, BUCKETS, &sessions, &times);
                problems += within.len() + check.next("file", index, Some(span)).len();
            }
            (problems, check.sessions())
        };
        assert_eq!(found(Order::Session, [&[(9, 1), (9, 5), (4, 2)], &[(4, 3), (7, 3)]]), (0, (3, None)));
        assert_eq!(found(Order::Session, [&[(9, 1), (4, 2)], &[(9, 3)]]), (0, (2, Some(9))));
        assert_eq!(found(Order::Session, [&[(9, 5), (4, 2)], &[(8, 6)]]).0, 1);
        assert_eq!(found(Order::SessionHash, [&[(4, 7), (9, 1)], &[(9, 2), (11, 1)]]), (0, (3, None)));
        assert_eq!(found(Order::SessionHash, [&[(9, 1)], &[(4, 2)]]).0, 1);
    }
}
