//! The order of the samples of one bucket of a partition, checked as they come.

use std::collections::HashSet;

use crate::{Error, Order, Result, SESSION_COLUMN, TIME_COLUMN};

/// Checks the order, and counts sessions.
#[derive(Debug)]
pub(super) struct SampleOrder {
    order: Order,
    /// Session and time of the last sample.
    last: Option<(i64, i64)>,
    /// The start of the last sample's session.
    start: i64,
    sessions: u64,
    /// The sessions so far. Only samples in arrival order need it; it takes about 16 bytes a session.
    seen: HashSet<i64>,
}

impl SampleOrder {
    pub(super) fn new(order: Order) -> Self {
        Self { order, last: None, start: i64::MIN, sessions: 0, seen: HashSet::new() }
    }

    /// Sessions so far.
    pub(super) fn sessions(&self) -> u64 {
        self.sessions
    }

    /// Adds the next sample; says whether it starts a run of samples of one session.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a sample that belongs before the one that came before it.
    pub(super) fn sample(&mut self, session: i64, time: i64) -> Result<bool> {
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
            Order::Session => (SESSION_COLUMN, "the start of the session, session and time"),
            Order::SessionHash => (SESSION_COLUMN, "session and time"),
            Order::Arrival => (TIME_COLUMN, "time"),
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
        let mut check = SampleOrder::new(order);
        let starts = samples.iter().map(|(session, time)| check.sample(*session, *time));
        let starts = starts.collect::<Result<_>>()?;
        Ok((starts, check.sessions()))
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
