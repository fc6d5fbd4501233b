//! Problems of steps, and the location of a step.

use std::path::Path;
use std::sync::Arc;

use onefold_base::fault::unexpected;

use crate::error::Error;

/// An error of a step with a hint, but without the location. [`StepLocation::error`] adds the location.
#[derive(Debug)]
pub(super) struct Problem {
    message: String,
    hint: String,
}

pub(super) type Checked<T> = std::result::Result<T, Problem>;

impl Problem {
    pub(super) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }
}

/// Converts an error about an invalid tensor, which indicates a bug in an operator.
impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let hint = unexpected(&message);
        Self::new(message, hint)
    }
}

/// The location of a step.
#[derive(Debug, Clone)]
pub(super) struct StepLocation {
    pub(super) path: Arc<Path>,
    /// The line of the file, from 1.
    pub(super) line: usize,
    /// The number of the step, from 1.
    pub(super) step: usize,
    pub(super) op: Arc<str>,
}

impl StepLocation {
    pub(super) fn error(&self, problem: Problem) -> Error {
        let Self { path, line, step, op } = self;
        let Problem { message, hint } = problem;
        let message = format!("`{}`, line {line}, step {step} (`{op}`): {message}", path.display());
        Error::options(message, hint)
    }
}
