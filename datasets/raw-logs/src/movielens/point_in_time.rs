//! The state of a service at the time of a request: histories and running means of the user and the item, from ratings
//! with strictly earlier timestamps only. Ratings of the same timestamp do not affect each other.

use std::collections::{HashMap, VecDeque};

use serde::Serialize;

use super::parse::Rating;

/// The length of a history, in items.
pub const HISTORY_WINDOW: usize = 50;
/// The lowest rating that counts as "liked": the label's threshold.
pub const LIKED_RATING: i64 = 4;

/// The number of ratings, with the mean of all users, that are added to the ratings of a user or item (a Bayesian
/// average).
const PRIOR_RATINGS: f64 = 5.0;
/// The mean before the first rating: the middle of the scale.
const FIRST_MEAN: f64 = 3.0;

/// The number and the sum of ratings.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    count: u32,
    sum: f64,
}

impl Tally {
    fn add(&mut self, rating: i64) {
        self.count += 1;
        self.sum += rating as f64;
    }

    /// Returns the mean of these ratings and of [`PRIOR_RATINGS`] more with the value `prior`.
    fn mean(&self, prior: f64) -> f32 {
        ((self.sum + PRIOR_RATINGS * prior) / (f64::from(self.count) + PRIOR_RATINGS)) as f32
    }

    /// Returns `ln(1 + count)`.
    fn log_count(&self) -> f32 {
        f64::from(self.count).ln_1p() as f32
    }
}

/// The ratings of a user so far.
#[derive(Debug, Default)]
struct UserState {
    rated: VecDeque<(i64, i64)>,
    liked: VecDeque<i64>,
    tally: Tally,
}

/// A request with the knowledge of the service at its time. It is a row of the feature log.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Request {
    /// The index in arrival order, from 0.
    pub(super) request_id: i64,
    /// Microseconds since 1970.
    pub(super) timestamp: i64,
    pub(super) user_id: i64,
    pub(super) item_id: i64,
    /// The last [`HISTORY_WINDOW`] items that the user rated, the oldest first. Items of the same time are ordered by
    /// id.
    pub(super) history_items: Vec<i64>,
    /// The ratings of these items, 1 to 5.
    pub(super) history_ratings: Vec<i64>,
    /// The last [`HISTORY_WINDOW`] items that the user liked, the oldest first.
    pub(super) liked_items: Vec<i64>,
    /// `ln(1 + n)` for the n ratings by the user.
    pub(super) user_log_ratings: f32,
    /// The smoothed mean of the ratings by the user.
    pub(super) user_mean_rating: f32,
    /// `ln(1 + n)` for the n ratings of the item.
    pub(super) item_log_ratings: f32,
    /// The smoothed mean of the ratings of the item.
    pub(super) item_mean_rating: f32,
}

/// Calls `each` with the request of every rating. Ratings are in arrival order.
pub(super) fn walk<E>(ratings: &[Rating], mut each: impl FnMut(Request) -> Result<(), E>) -> Result<(), E> {
    let mut users: HashMap<i64, UserState> = HashMap::new();
    let mut items: HashMap<i64, Tally> = HashMap::new();
    let mut all = Tally::default();
    let newcomer = UserState::default();
    let mut request_ids = 0..;
    for moment in ratings.chunk_by(|a, b| a.timestamp == b.timestamp) {
        let prior = if all.count == 0 { FIRST_MEAN } else { all.sum / f64::from(all.count) };
        for (rating, request_id) in moment.iter().zip(&mut request_ids) {
            let user = users.get(&rating.user).unwrap_or(&newcomer);
            let item = items.get(&rating.item).copied().unwrap_or_default();
            each(Request {
                request_id,
                timestamp: rating.timestamp,
                user_id: rating.user,
                item_id: rating.item,
                history_items: user.rated.iter().map(|(item, _)| *item).collect(),
                history_ratings: user.rated.iter().map(|(_, rating)| *rating).collect(),
                liked_items: user.liked.iter().copied().collect(),
                user_log_ratings: user.tally.log_count(),
                user_mean_rating: user.tally.mean(prior),
                item_log_ratings: item.log_count(),
                item_mean_rating: item.mean(prior),
            })?;
        }
        for rating in moment {
            let user = users.entry(rating.user).or_default();
            push_last(&mut user.rated, (rating.item, rating.rating));
            if rating.rating >= LIKED_RATING {
                push_last(&mut user.liked, rating.item);
            }
            user.tally.add(rating.rating);
            items.entry(rating.item).or_default().add(rating.rating);
            all.add(rating.rating);
        }
    }
    Ok(())
}

fn push_last<T>(window: &mut VecDeque<T>, value: T) {
    if window.len() == HISTORY_WINDOW {
        window.pop_front();
    }
    window.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts(ratings: &[(i64, i64, i64, i64)]) -> Vec<Request> {
        let ratings: Vec<Rating> = ratings
            .iter()
            .map(|&(timestamp, user, item, rating)| Rating { timestamp, user, item, rating })
            .collect();
        let mut contexts = Vec::new();
        walk(&ratings, |request| {
            contexts.push(request);
            Ok::<_, ()>(())
        })
        .unwrap();
        contexts
    }

    #[test]
    fn a_history_holds_strictly_earlier_ratings_and_ties_share_it() {
        let contexts = contexts(&[(1, 7, 10, 5), (2, 7, 11, 2), (2, 7, 12, 4), (2, 8, 10, 1), (3, 7, 13, 3)]);
        let items: Vec<&[i64]> = contexts.iter().map(|context| context.history_items.as_slice()).collect();
        assert_eq!(items, [&[][..], &[10], &[10], &[], &[10, 11, 12]]);
        assert_eq!(contexts[4].history_ratings, [5, 2, 4]);
        assert_eq!(contexts[4].liked_items, [10, 12]);
    }

    #[test]
    fn a_history_keeps_the_last_of_its_window() {
        let many: Vec<_> = (0..60).map(|n| (n, 1, 100 + n, if n < 55 { 5 } else { 1 })).collect();
        let contexts = contexts(&many);
        let last = &contexts[59];
        assert_eq!(last.history_items, (109..159).collect::<Vec<i64>>());
        assert_eq!(last.history_ratings.len(), HISTORY_WINDOW);
        assert_eq!(last.liked_items, (105..155).collect::<Vec<i64>>());
    }

    #[test]
    fn means_are_of_earlier_ratings_and_start_from_everybody_s() {
        let contexts = contexts(&[(1, 1, 10, 5), (1, 2, 10, 1), (2, 1, 10, 2), (3, 3, 11, 4)]);
        assert_eq!((contexts[0].user_mean_rating, contexts[1].item_mean_rating), (3.0, 3.0));
        // The mean of all earlier ratings is 3: user 1 gave a 5, and item 10 got a 5 and a 1.
        assert_eq!(contexts[2].user_mean_rating, (5.0 + 5.0 * 3.0) / 6.0);
        assert_eq!(contexts[2].item_mean_rating, 3.0);
        assert_eq!(contexts[2].item_log_ratings, 3f32.ln());
        assert_eq!((contexts[3].user_mean_rating, contexts[3].user_log_ratings), ((8.0 / 3.0) as f32, 0.0));
    }
}
