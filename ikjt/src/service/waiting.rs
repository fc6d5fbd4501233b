//! Reports on stderr why a client waits, if it waits for long.

use std::future::Future;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use onefold_base::sync::locked;

/// The time of waiting after which a client reports the reason.
const LONG: Duration = Duration::from_secs(4);

/// The interval of further reports.
const AGAIN: Duration = Duration::from_secs(60);

/// The interval of checking the time of waiting.
const LOOK: Duration = Duration::from_millis(500);

/// The waiting of a client, which may be interrupted and continued.
#[derive(Debug)]
pub(super) struct Waiting {
    /// The subject of the report, which precedes " has waited".
    who: String,
    now: Mutex<Option<Wait>>,
}

#[derive(Debug)]
struct Wait {
    why: String,
    since: Instant,
    said: Option<Instant>,
}

impl Waiting {
    pub(super) fn new(who: String) -> Self {
        Self { who, now: Mutex::default() }
    }

    /// Records the reason for waiting. The wait begins now, unless it has begun before.
    pub(super) fn because(&self, why: impl Into<String>) {
        let (mut now, why) = (locked(&self.now), why.into());
        match &mut *now {
            Some(wait) => wait.why = why,
            None => *now = Some(Wait { why, since: Instant::now(), said: None }),
        }
    }

    /// Ends the wait.
    pub(super) fn over(&self) {
        *locked(&self.now) = None;
    }

    /// Returns the line to print at a time, if one is due.
    fn line(&self, at: Instant) -> Option<String> {
        let mut now = locked(&self.now);
        let wait = now.as_mut()?;
        let seconds = at.saturating_duration_since(wait.since);
        let is_new = wait.said.is_none_or(|said| at.saturating_duration_since(said) >= AGAIN);
        if seconds < LONG || !is_new {
            return None;
        }
        wait.said = Some(at);
        Some(format!("{} has waited for {:.0} seconds: {}", self.who, seconds.as_secs_f64(), wait.why))
    }

    /// Prints the reason for waiting on stderr, if a report is due.
    #[expect(
        clippy::print_stderr,
        reason = "programs and notebooks without a log must see why nothing happens"
    )]
    pub(super) fn say_if_long(&self) {
        if let Some(line) = self.line(Instant::now()) {
            eprintln!("{line}");
        }
    }

    /// Runs `work`, and reports its waits meanwhile.
    pub(super) async fn watch<T>(&self, work: impl Future<Output = T>) -> T {
        let say = async {
            loop {
                tokio::time::sleep(LOOK).await;
                self.say_if_long();
            }
        };
        tokio::select! {
            done = work => done,
            () = say => unreachable!("it says so for ever"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_reported_once_a_minute_with_its_latest_reason() {
        let waiting = Waiting::new("the client".to_owned());
        assert_eq!(waiting.line(Instant::now()), None);
        waiting.because("the master does not answer");
        let since = locked(&waiting.now).as_ref().unwrap().since;
        let after = |seconds| since + Duration::from_secs(seconds);
        assert_eq!(waiting.line(since), None);
        waiting.because("there is no worker");
        let line = waiting.line(after(5)).unwrap();
        assert!(
            line.starts_with("the client has waited for ") && line.ends_with(": there is no worker"),
            "{line}"
        );
        assert_eq!(waiting.line(after(50)), None);
        assert!(waiting.line(after(70)).is_some());
        waiting.over();
        assert_eq!(waiting.line(after(500)), None);
    }
}
