//! The state of a news service at the time of an impression: the reader's last clicks, and the click rate of every
//! article so far. Only impressions with strictly earlier times count, so impressions of the same time do not affect
//! each other.

use std::collections::{HashMap, VecDeque};

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;

use super::source::{self, Column, Kind, SplitFiles};
use crate::raw_log::list_row;
use crate::{Error, Result, error};

/// The length of a history, in clicked articles.
pub const HISTORY_WINDOW: usize = 50;

/// The number of views, with the mean click rate of all articles, that are added to an article's own views (a
/// Bayesian average).
const PRIOR_VIEWS: f64 = 20.0;
/// The numbers of views and clicks that are added to those of all articles, for the mean click rate: a rate of 1 in
/// 10.
const FIRST_VIEWS: f64 = 10.0;
const FIRST_CLICKS: f64 = 1.0;
const MICROS_PER_HOUR: f64 = 3600.0 * 1e6;

const HISTORY: [Column; 2] = [("user_id", Kind::Id), ("article_id_fixed", Kind::Ids)];

/// A user within a split: the splits have separate histories.
pub(super) type Reader = (i64, i64);

/// The numbers of views and clicks of an article.
#[derive(Debug, Clone, Copy)]
struct Article {
    first_shown: i64,
    views: u32,
    clicks: u32,
}

/// An impression that does not yet count, because others of the same time may follow.
#[derive(Debug)]
struct Impression {
    reader: Reader,
    shown: Vec<i64>,
    clicked: Vec<i64>,
}

/// The state of the service, which advances in time. It holds the history of every reader (about half a kilobyte
/// each) and a few words per article.
#[derive(Debug, Default)]
pub(super) struct ServiceState {
    now: i64,
    pending: Vec<Impression>,
    histories: HashMap<Reader, VecDeque<i64>>,
    articles: HashMap<i64, Article>,
    views: u64,
    clicks: u64,
}

impl ServiceState {
    /// Reads the state before the first impression: the histories in the history files.
    ///
    /// # Errors
    ///
    /// The errors of [`source::open`] and of its rows, and [`Error::Fault`] for a user with two histories.
    pub(super) fn read(splits: &[SplitFiles]) -> Result<Self> {
        let mut state = Self { now: i64::MIN, ..Self::default() };
        for (split, files) in (0..).zip(splits) {
            for batch in source::open(&files.history, &HISTORY)? {
                let batch = batch?;
                let lists = batch.column(1).as_list::<i32>();
                let users = batch.column(0).as_primitive::<Int64Type>().values();
                for (row, user) in users.iter().enumerate() {
                    let clicked = list_row(lists, row);
                    let last = &clicked[clicked.len().saturating_sub(HISTORY_WINDOW)..];
                    if state.histories.insert((split, *user), last.iter().copied().collect()).is_some() {
                        return Err(repeated(files, *user));
                    }
                }
            }
        }
        Ok(state)
    }

    /// Advances to `time`. Afterwards, all earlier impressions count. Times must not decrease.
    pub(super) fn advance(&mut self, time: i64) {
        if time == self.now {
            return;
        }
        for impression in std::mem::take(&mut self.pending) {
            self.learn(&impression);
        }
        self.now = time;
    }

    /// Adds an impression of the current time, which counts for later times. A click on an article that is not in
    /// `shown` counts for the history, but not for a click rate.
    pub(super) fn record(&mut self, reader: Reader, shown: &[i64], clicked: &[i64]) {
        self.pending.push(Impression { reader, shown: shown.to_vec(), clicked: clicked.to_vec() });
    }

    fn learn(&mut self, impression: &Impression) {
        for article in &impression.shown {
            let new = Article { first_shown: self.now, views: 0, clicks: 0 };
            let article_state = self.articles.entry(*article).or_insert(new);
            let clicked = impression.clicked.contains(article);
            article_state.views += 1;
            article_state.clicks += u32::from(clicked);
            self.views += 1;
            self.clicks += u64::from(clicked);
        }
        let history = self.histories.entry(impression.reader).or_default();
        history.extend(&impression.clicked);
        history.drain(..history.len().saturating_sub(HISTORY_WINDOW));
    }

    /// Returns the last [`HISTORY_WINDOW`] articles that the reader clicked, oldest first.
    pub(super) fn history(&self, reader: Reader) -> impl Iterator<Item = i64> {
        self.histories.get(&reader).into_iter().flatten().copied()
    }

    /// Returns the smoothed clicks per view of the article so far.
    pub(super) fn click_rate(&self, article: i64) -> f32 {
        let prior = (self.clicks as f64 + FIRST_CLICKS) / (self.views as f64 + FIRST_VIEWS);
        let (views, clicks) =
            self.articles.get(&article).map_or((0, 0), |article| (article.views, article.clicks));
        ((f64::from(clicks) + PRIOR_VIEWS * prior) / (f64::from(views) + PRIOR_VIEWS)) as f32
    }

    /// Returns `ln(1 + h)` for the h hours since the article was first shown, or 0 if it has not been shown.
    pub(super) fn log_age_hours(&self, article: i64) -> f32 {
        let age = self
            .articles
            .get(&article)
            .map_or(0.0, |article| self.now.saturating_sub(article.first_shown) as f64);
        (age / MICROS_PER_HOUR).ln_1p() as f32
    }
}

fn repeated(files: &SplitFiles, user: i64) -> Error {
    let message = format!("user {user} has two rows");
    error::source(&files.history, message, "the file is damaged; download it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(state: &ServiceState, reader: Reader) -> Vec<i64> {
        state.history(reader).collect()
    }

    #[test]
    fn clicks_become_history_only_for_later_moments_of_the_same_split() {
        let mut state = ServiceState::default();
        state.histories.insert((0, 7), [1, 2].into());
        state.advance(10);
        state.record((0, 7), &[3, 4], &[4]);
        state.advance(10);
        assert_eq!(history(&state, (0, 7)), [1, 2]);
        state.advance(11);
        assert_eq!(history(&state, (0, 7)), [1, 2, 4]);
        assert!(history(&state, (1, 7)).is_empty());
    }

    #[test]
    fn a_history_keeps_the_last_of_its_window() {
        let mut state = ServiceState::default();
        for time in 1..=60 {
            state.advance(time);
            state.record((0, 7), &[time], &[time]);
        }
        state.advance(61);
        assert_eq!(history(&state, (0, 7)), (11..=60).collect::<Vec<i64>>());
    }

    #[test]
    fn click_rates_are_those_of_earlier_views() {
        let mut state = ServiceState::default();
        let hour = MICROS_PER_HOUR as i64;
        state.advance(hour);
        assert_eq!(state.click_rate(3), 0.1);
        for _ in 0..100 {
            state.record((0, 7), &[3], &[3]);
        }
        assert_eq!((state.click_rate(3), state.log_age_hours(3)), (0.1, 0.0));
        state.advance(2 * hour);
        let prior = 101.0 / 110.0; // all articles: 100 clicks in 100 views, on top of 1 in 10
        assert_eq!(state.click_rate(3), ((100.0 + PRIOR_VIEWS * prior) / (100.0 + PRIOR_VIEWS)) as f32);
        assert_eq!(state.click_rate(4), prior as f32);
        assert_eq!((state.log_age_hours(3), state.log_age_hours(4)), (2f32.ln(), 0.0));
    }

    #[test]
    fn a_click_on_an_article_that_was_not_shown_counts_for_the_history_only() {
        let mut state = ServiceState::default();
        state.advance(1);
        state.record((0, 7), &[3], &[9]);
        state.advance(2);
        assert_eq!(history(&state, (0, 7)), [9]);
        assert!(!state.articles.contains_key(&9));
        assert_eq!((state.views, state.clicks), (1, 0));
    }
}
