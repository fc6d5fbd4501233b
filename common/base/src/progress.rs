//! Progress of long work. Libraries report to a [`Reporter`] and never print.

use std::io;

/// Where long work tells how far it is.
pub trait Reporter: Send + Sync {
    /// A stage begins; `total` is its size in `unit`s, if that is known.
    fn begin(&self, stage: &str, total: Option<u64>, unit: &str);
    /// `amount` more units are done.
    fn advance(&self, amount: u64);
    /// Replaces the note behind the progress (a loss, a file name).
    fn note(&self, text: &str);
    /// The stage is over.
    fn end(&self);
    /// Whether to go on: long work asks now and then, and ends with the error as with any other.
    ///
    /// # Errors
    ///
    /// Whoever is told wants the work to end.
    fn go_on(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A reporter that tells nobody: for tests and for libraries' callers that do not care.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn begin(&self, _: &str, _: Option<u64>, _: &str) {}
    fn advance(&self, _: u64) {}
    fn note(&self, _: &str) {}
    fn end(&self) {}
}
