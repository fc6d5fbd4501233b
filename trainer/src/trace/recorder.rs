//! Records the moments of a step at which a rank starts a new activity.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use onefold_base::sync::locked;

use super::{Activity, Kind, Span};

/// Records one step at a time. Outside of a step, for example in an evaluation, it records nothing.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<Option<UnderWay>>);

/// A step that is being recorded.
#[derive(Debug)]
struct UnderWay {
    clock: SystemTime,
    began: Instant,
    /// The activities and their starts, relative to the beginning of the step.
    marks: Vec<(Activity, Duration)>,
}

/// A recorded step.
#[derive(Debug)]
pub(super) struct Recorded {
    /// The beginning in microseconds since 1970.
    pub(super) began_micros: u64,
    pub(super) length: Duration,
    /// The activities and their starts, in ascending order; the first start is zero.
    pub(super) marks: Vec<(Activity, Duration)>,
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, Option<UnderWay>> {
        locked(&self.0)
    }

    /// Begins a step with `activity`, and discards an unfinished step.
    pub(crate) fn begin(&self, activity: Activity) {
        let mut marks = Vec::with_capacity(32);
        marks.push((activity, Duration::ZERO));
        *self.lock() = Some(UnderWay { clock: SystemTime::now(), began: Instant::now(), marks });
    }

    /// Starts a new activity. Returns the previous one, or `None` outside of a step.
    pub(crate) fn turn_to(&self, activity: Activity) -> Option<Activity> {
        let mut state = self.lock();
        let UnderWay { began, marks, .. } = state.as_mut()?;
        let before = marks.last().map(|(before, _)| *before);
        marks.push((activity, began.elapsed()));
        before
    }

    /// Runs `work` as `activity`, and then resumes the previous activity.
    pub(crate) fn during<T>(&self, activity: Activity, work: impl FnOnce() -> T) -> T {
        let before = self.turn_to(activity);
        let result = work();
        if let Some(before) = before {
            self.turn_to(before);
        }
        result
    }

    /// Ends the step and returns it, or `None` outside of a step.
    pub(super) fn end(&self) -> Option<Recorded> {
        let UnderWay { clock, began, marks } = self.lock().take()?;
        let since_1970 = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(Recorded { began_micros: since_1970.as_micros() as u64, length: began.elapsed(), marks })
    }
}

impl Recorded {
    /// Returns the activities with their starts and ends.
    fn turns(&self) -> impl Iterator<Item = (Activity, Duration, Duration)> {
        let ends = self.marks.iter().skip(1).map(|(_, start)| *start).chain([self.length]);
        self.marks.iter().zip(ends).map(|((activity, start), end)| (*activity, *start, end))
    }

    /// Returns the time by kind, in the order of [`Kind::ALL`].
    pub(super) fn times(&self) -> [Duration; 4] {
        let mut times = [Duration::ZERO; 4];
        for (activity, start, end) in self.turns() {
            times[activity.kind() as usize] += end - start;
        }
        times
    }

    /// Returns the spans in whole microseconds. Spans that become empty are merged into their neighbours.
    pub(super) fn spans(&self) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::with_capacity(self.marks.len());
        for (name, start, end) in self.turns() {
            let (start_micros, end_micros) = (start.as_micros() as u64, end.as_micros() as u64);
            match spans.last_mut() {
                _ if start_micros == end_micros => {}
                Some(last) if last.name == name => last.end_micros = end_micros,
                _ => spans.push(Span { name, start_micros, end_micros }),
            }
        }
        spans
    }
}

const _: () = {
    let mut place = 0;
    while place < Kind::ALL.len() {
        assert!(Kind::ALL[place] as usize == place, "a kind's number is its place");
        place += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(marks: &[(Activity, u64)], length: u64) -> Recorded {
        let marks = marks.iter().map(|&(activity, nanos)| (activity, Duration::from_nanos(nanos))).collect();
        Recorded { began_micros: 0, length: Duration::from_nanos(length), marks }
    }

    #[test]
    fn a_step_is_divided_without_gaps() {
        use Activity::{Answers, Backward, Forward, Input};
        let marks = [
            (Forward, 0),
            (Answers, 1_000),
            (Forward, 5_500),
            // Too short for whole microseconds, so `Forward` continues.
            (Input, 8_100),
            (Forward, 8_200),
            (Backward, 9_000),
        ];
        let step = recorded(&marks, 12_900);
        let micros = step.times().map(|time| time.as_nanos());
        assert_eq!(micros, [1_000 + 2_600 + 800 + 3_900, 4_500, 0, 100]);
        assert_eq!(micros.iter().sum::<u128>(), 12_900);
        let span = |name, start_micros, end_micros| Span { name, start_micros, end_micros };
        let expected = [span(Forward, 0, 1), span(Answers, 1, 5), span(Forward, 5, 9), span(Backward, 9, 12)];
        assert_eq!(step.spans(), expected);
    }

    #[test]
    fn waiting_interrupts_and_evaluations_are_no_steps() {
        let recorder = Recorder::default();
        assert_eq!(recorder.during(Activity::Answers, || 7), 7);
        assert!(recorder.end().is_none());
        recorder.begin(Activity::Forward);
        recorder.during(Activity::Answers, || ());
        recorder.turn_to(Activity::Backward);
        let step = recorder.end().unwrap();
        let activities: Vec<_> = step.marks.iter().map(|(activity, _)| *activity).collect();
        assert_eq!(activities, [Activity::Forward, Activity::Answers, Activity::Forward, Activity::Backward]);
        assert_eq!(step.times().iter().sum::<Duration>(), step.length);
        assert!(recorder.end().is_none());
    }
}
