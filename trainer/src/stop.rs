//! A flag that ends a run from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A stop flag that is checked between steps. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Returns a flag that is not raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a flag that SIGTERM and SIGINT raise. The second signal ends the process immediately, with the
    /// signal's default action.
    ///
    /// # Errors
    ///
    /// An operating-system error if signals cannot be handled.
    pub fn on_signals() -> std::io::Result<Self> {
        let stop = Self::new();
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            // Handlers run in the order of registration. The conditional one acts only if the flag is already
            // set, that is, at the second signal.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop.0))?;
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Raises the flag.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether the flag was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
