//! Measures the time of a training loop.

use std::time::{Duration, Instant};

/// The times and counts of this process.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub(super) resumed_from_step: Option<u64>,
    pub(super) samples: u64,
    pub(super) training: Duration,
    pub(super) waited: Duration,
    pub(super) evaluation: Duration,
    pub(super) checkpoint: Duration,
    pub(super) checkpoints: u64,
    /// The values of `samples`, `training` and `waited` at the last log line, from which the next rates are
    /// computed.
    pub(super) window: (u64, Duration, Duration),
    pub(super) rates: Option<Rates>,
    pub(super) noted: Option<Instant>,
}

/// The rates since the last log line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    pub(super) samples_per_second: f64,
    pub(super) waiting_share: f64,
}

impl Clock {
    /// Returns the rates since the last log line.
    pub(super) fn rates_since_window(&self) -> Rates {
        let (samples, training, waited) = self.window;
        let seconds = (self.training - training).as_secs_f64().max(1e-9);
        Rates {
            samples_per_second: (self.samples - samples) as f64 / seconds,
            waiting_share: (self.waited - waited).as_secs_f64() / seconds,
        }
    }

    /// Returns the rates since the last log line, and starts a new window.
    pub(super) fn end_window(&mut self) -> Rates {
        let rates = self.rates_since_window();
        self.window = (self.samples, self.training, self.waited);
        self.rates = Some(rates);
        rates
    }
}
