//! Checks the order of the samples of a range of buckets while they arrive.

use std::collections::HashSet;

use crate::{Buckets, Error, Order, Result, SESSION_COLUMN, TIME_COLUMN};

/// Checks the order of samples, and counts sessions.
#[derive(Debug)]
pub(super) struct SampleOrder {
    order: Order,
    buckets: Buckets,
    /// The bucket of the last sample.
    bucket: u32,
    /// The session and time of the last sample of the bucket.
    last: Option<(i64, i64)>,
    /// The start time of the last sample's session.
    start: i64,
    /// The number of sessions so far.
    pub(super) sessions: u64,
    /// The sessions so far, at about 16 bytes per session. Used only for samples in arrival order.
    seen: HashSet<i64>,
}

impl SampleOrder {
    pub(super) fn new(order: Order, buckets: Buckets) -> Self {
        let seen = HashSet::new();
        Self { order, buckets, bucket: 0, last: None, start: i64::MIN, sessions: 0, seen }
    }

    /// Adds the next sample, and returns whether it starts a run of samples of one session.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the sample belongs before the previous one.
    pub(super) fn sample(&mut self, session: i64, time: i64) -> Result<bool> {
        let bucket = self.buckets.bucket_of(session);
        if bucket < self.bucket {
            return Err(self.misplaced(session, time));
        }
        if bucket > self.bucket {
            (self.bucket, self.last) = (bucket, None);
            // A session never continues in another bucket.
            self.seen.clear();
        }
        let starts = self.last.is_none_or(|(last, _)| last != session);
        if let Some((last, last_time)) = self.last {
            let ascends = match (self.order, starts) {
                (Order::Arrival, _) | (_, false) => last_time <= time,
                (Order::Session, true) => (self.start, last) < (time, session),
                (Order::SessionHash, true) => last < session,
            };
            if !ascends {
                return Err(self.misplaced(session, time));
            }
        }
        if starts {
            self.start = time;
            let new = self.order.is_clustered() || self.seen.insert(session);
            self.sessions += u64::from(new);
        }
        self.last = Some((session, time));
        Ok(starts)
    }

    fn misplaced(&self, session: i64, time: i64) -> Error {
        let (column, by) = match self.order {
            Order::Session => (SESSION_COLUMN, "bucket, start of the session, session and time"),
            Order::SessionHash => (SESSION_COLUMN, "bucket, session and time"),
            Order::Arrival => (TIME_COLUMN, "bucket and time"),
        };
        Error::column(
            column,
            format!("a sample of session {session} at {time} comes after one that it belongs before"),
            format!("sort the samples of a partition by {by} before writing"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(order: Order, samples: &[(i64, i64)]) -> Result<(Vec<bool>, u64)> {
        let mut check = SampleOrder::new(order, Buckets { number: 2, in_range: 2 });
        let starts = samples.iter().map(|(session, time)| check.sample(*session, *time));
        let starts = starts.collect::<Result<_>>()?;
        Ok((starts, check.sessions))
    }

    #[test]
    fn sessions_are_counted_in_every_order() {
        let clustered = [(7, 1), (7, 5), (9, 1), (9, 2)];
        for order in [Order::Session, Order::SessionHash] {
            assert_eq!(check(order, &clustered).unwrap(), (vec![true, false, true, false], 2));
        }
        let arrival = [(7, 1), (9, 1), (9, 2), (7, 5)];
        assert_eq!(check(Order::Arrival, &arrival).unwrap(), (vec![true, true, false, true], 2));
    }

    #[test]
    fn every_bucket_has_its_own_order() {
        let of_bucket_1 = |session: i64| 1 << 62 | session;
        for order in [Order::Session, Order::SessionHash, Order::Arrival] {
            let samples = [(7, 5), (9, 6), (of_bucket_1(3), 1), (of_bucket_1(3), 2), (of_bucket_1(4), 9)];
            assert_eq!(check(order, &samples).unwrap(), (vec![true, true, true, false, true], 4));
            assert!(check(order, &[(of_bucket_1(3), 1), (7, 5)]).is_err(), "{order:?}");
        }
    }

    #[test]
    fn sessions_of_earlier_buckets_are_forgotten() {
        let mut order = SampleOrder::new(Order::Arrival, Buckets { number: 2, in_range: 2 });
        for session in (0..100).chain([1 << 62]) {
            order.sample(session, 5).unwrap();
        }
        assert_eq!((order.seen.len(), order.sessions), (1, 101));
    }

    #[test]
    fn samples_out_of_order_are_refused() {
        for (order, samples) in [
            (Order::Session, [(7, 5), (7, 1)]),
            (Order::Session, [(7, 5), (3, 1)]),
            (Order::Session, [(7, 5), (3, 5)]),
            (Order::SessionHash, [(7, 5), (3, 9)]),
            (Order::Arrival, [(7, 5), (9, 4)]),
        ] {
            let error = check(order, &samples).unwrap_err().to_string();
            assert!(error.contains("comes after one that it belongs before"), "{order:?}: {error}");
        }
    }
}
