//! Detects jumps of the loss.

use serde::Serialize;

/// The number of first steps in which no jump is detected.
const FIRST_STEPS: f64 = 50.0;
/// The approximate number of steps in the mean of the usual loss; later steps have more weight.
const USUAL: f64 = 100.0;
/// The approximate number of steps in the mean of the present loss.
const PRESENT: f64 = 10.0;
/// A jump exceeds this fraction of the usual loss, and …
const SHARE: f64 = 0.25;
/// … this multiple of the mean distance between a step's loss and the usual loss.
const DEVIATIONS: f64 = 3.0;

/// An increase of the loss of some steps over the loss of earlier steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LossJump {
    /// The step at which the jump was detected.
    pub step: u64,
    /// The mean loss of about 100 earlier steps.
    pub before: f64,
    /// The mean loss of about 10 steps.
    pub loss: f64,
}

/// Exponential moving averages of the loss.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct LossWatch {
    steps: f64,
    /// The average over about [`USUAL`] steps, and the average distance from it.
    usual: f64,
    distance: f64,
    /// The average over about [`PRESENT`] steps.
    present: f64,
    /// The first jump, if there was one.
    pub(super) jump: Option<LossJump>,
}

impl LossWatch {
    /// Adds the loss of step `step`.
    pub(super) fn add(&mut self, step: u64, loss: f64) {
        self.steps += 1.0;
        // In the first steps, this is the mean of all steps.
        let toward = |mean: f64, value: f64, of: f64| mean + (value - mean) / of.min(self.steps);
        let present = toward(self.present, loss, PRESENT);
        let margin = (SHARE * self.usual.abs()).max(DEVIATIONS * self.distance);
        if self.jump.is_none() && self.steps > FIRST_STEPS && present > self.usual + margin {
            self.jump = Some(LossJump { step, before: self.usual, loss: present });
        }
        let distance = toward(self.distance, (loss - self.usual).abs(), USUAL);
        // In the first step, there is no distance yet.
        self.distance = if self.steps > 1.0 { distance } else { 0.0 };
        self.usual = toward(self.usual, loss, USUAL);
        self.present = present;
    }

    /// Returns the whole state as numbers, for a checkpoint.
    pub(super) fn to_numbers(self) -> Vec<f64> {
        let mut numbers = vec![self.steps, self.usual, self.distance, self.present];
        numbers.extend(self.jump.iter().flat_map(|jump| [jump.step as f64, jump.before, jump.loss]));
        numbers
    }

    /// Restores the state from the result of [`to_numbers`](Self::to_numbers); returns `None` if the numbers
    /// are malformed.
    pub(super) fn from_numbers(numbers: &[f64]) -> Option<Self> {
        let (&[steps, usual, distance, present], jump) = numbers.split_first_chunk::<4>()?;
        let jump = match jump {
            [] => None,
            &[step, before, loss] => Some(LossJump { step: step as u64, before, loss }),
            _ => return None,
        };
        Some(Self { steps, usual, distance, present, jump })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a pseudo-random number in [0, 1) that depends only on the step.
    fn noise(step: u64) -> f64 {
        (step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn watch(losses: impl IntoIterator<Item = f64>) -> LossWatch {
        let mut watch = LossWatch::default();
        (1..).zip(losses).for_each(|(step, loss)| watch.add(step, loss));
        watch
    }

    #[test]
    fn a_jump_is_noticed_within_a_few_steps() {
        let losses = (0..500).map(|i| if i < 300 { 0.5 } else { 0.8 } + 0.1 * noise(i));
        let jump = watch(losses).jump.unwrap();
        assert!((303..320).contains(&jump.step), "{jump:?}");
        assert!((0.5..0.65).contains(&jump.before) && jump.loss > jump.before * 1.25, "{jump:?}");
    }

    #[test]
    fn noise_single_batches_and_slow_changes_are_no_jumps() {
        assert_eq!(watch((0..2000).map(|i| 0.3 + 0.3 * noise(i))).jump, None);
        // The loss falls, and then rises by a fifth over 500 steps.
        let slow = (0..1500).map(|i| 0.7 - 0.3 * (i as f64 / 500.0).min(1.0) + 0.08 * (i as f64 / 1500.0));
        assert_eq!(watch(slow).jump, None);
        assert_eq!(watch((0..500).map(|i| if i == 300 { 1.2 } else { 0.5 })).jump, None);
        // Losses of counts are negative if the mean is large.
        assert_eq!(watch((0..500).map(|i| -4.0 + noise(i))).jump, None);
        assert!(watch((0..500).map(|i| if i < 300 { -4.0 + noise(i) } else { 1.0 })).jump.is_some());
        // Jumps in the first steps are not reported.
        assert_eq!(watch((0..500).map(|i| if i < 20 { 0.2 } else { 0.5 })).jump, None);
    }

    #[test]
    fn a_resumed_watch_sees_the_same() {
        let loss = |i: u64| if i < 120 { 0.5 } else { 0.9 } + 0.1 * noise(i);
        let whole = watch((0..200).map(loss));
        assert!(whole.jump.is_some());
        for at in [0, 1, 60, 130] {
            let begun = watch((0..at).map(loss)).to_numbers();
            let mut resumed = LossWatch::from_numbers(&begun).unwrap();
            (at..200).for_each(|i| resumed.add(i + 1, loss(i)));
            assert_eq!(resumed, whole);
        }
        assert_eq!(LossWatch::from_numbers(&[1.0, 2.0]), None);
        assert_eq!(LossWatch::from_numbers(&[1.0, 2.0, 0.0, 2.0, 7.0]), None);
    }
}
