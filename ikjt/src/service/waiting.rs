//! Reports on stderr why a client waits, if it waits for long.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A client that has waited for so long says why.
const LONG: Duration = Duration::from_secs(4);

/// How often it says so again.
const AGAIN: Duration = Duration::from_secs(60);

/// How often it looks whether it has waited for long.
const LOOK: Duration = Duration::from_millis(500);

/// Something that a client waits for now and then.
#[derive(Debug)]
pub(super) struct Waiting {
    /// Words before " has waited".
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

    fn now(&self) -> MutexGuard<'_, Option<Wait>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It waits, from now on if it has not waited before.
    pub(super) fn because(&self, why: impl Into<String>) {
        let (mut now, why) = (self.now(), why.into());
        match &mut *now {
            Some(wait) => wait.why = why,
            None => *now = Some(Wait { why, since: Instant::now(), said: None }),
        }
    }

    /// It waits no more.
    pub(super) fn over(&self) {
        *self.now() = None;
    }

    /// The line to print at a time, if any.
    fn line(&self, at: Instant) -> Option<String> {
        let mut now = self.now();
        let wait = now.as_mut()?;
        let seconds = at.saturating_duration_since(wait.since);
        let is_new = wait.said.is_none_or(|said| at.saturating_duration_since(said) >= AGAIN);
        if seconds < LONG || !is_new {
            return None;
        }
        wait.said = Some(at);
        Some(format!("{} has waited for {:.0} seconds: {}", self.who, seconds.as_secs_f64(), wait.why))
    }

    /// Says on stderr why it waits, if it has for long.
    #[expect(
        clippy::print_stderr,
        reason = "programs and notebooks without a log must see why nothing happens"
    )]
    pub(super) fn say_if_long(&self) {
        if let Some(line) = self.line(Instant::now()) {
            eprintln!("{line}");
        }
    }

    /// Does `work`, which says what it waits for.
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
    fn a_long_wait_is_said_once_a_minute_with_its_last_reason() {
        let waiting = Waiting::new("the client".to_owned());
        assert_eq!(waiting.line(Instant::now()), None);
        waiting.because("the master does not answer");
        let since = waiting.now().as_ref().unwrap().since;
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
