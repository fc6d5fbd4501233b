//! Progress of long-running work. Libraries report to a [`Reporter`] and never print.

use std::io;

/// A receiver of progress reports of long-running work.
pub trait Reporter: Send + Sync {
    /// Begins a stage of `total` units, or of unknown size. `unit` is the name of a unit.
    fn begin(&self, stage: &str, total: Option<u64>, unit: &str);
    /// Reports that `amount` more units are done.
    fn advance(&self, amount: u64);
    /// Replaces the note that is shown after the progress (a loss, a file name).
    fn note(&self, text: &str);
    /// Ends the stage.
    fn end(&self);
    /// Checks whether the work should continue. Long-running work calls this regularly and returns the error like any
    /// other.
    ///
    /// # Errors
    ///
    /// The receiver wants to stop the work.
    fn go_on(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A reporter that ignores all reports, for tests and for callers that need no progress.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {}
    fn advance(&self, _: u64) {}
    fn note(&self, _: &str) {}
    fn end(&self) {}
}
