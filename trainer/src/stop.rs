//! Ending a run from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A cooperative stop flag, checked between steps: cheap to clone, raised once.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag on SIGTERM and SIGINT. The second signal ends the process at once, as it would have without.
    ///
    /// # Errors
    ///
    /// The operating system's error if signals cannot be handled.
    pub fn on_signals() -> std::io::Result<Self> {
        let stop = Self::new();
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            // What is registered first runs first: it sees the flag only at the second signal.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop.0))?;
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Raises the flag.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
