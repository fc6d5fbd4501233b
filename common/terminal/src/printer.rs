//! The output of a command during its work and at its end: for a person at a terminal, or for a program that called
//! it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use onefold_base::progress::Reporter;
use onefold_base::sync::locked;
use serde::Serialize;

use crate::OutputOptions;

/// The receiver of a command's output: a terminal or a calling program.
pub struct Printer(Output);

enum Output {
    Terminal { options: OutputOptions, bar: Mutex<ProgressBar> },
    Caller { reporter: Arc<dyn Reporter>, summary: Mutex<Option<String>> },
}

impl Printer {
    /// Returns a printer that writes to the terminal.
    pub fn new(options: OutputOptions) -> Self {
        Self(Output::Terminal { options, bar: Mutex::new(ProgressBar::hidden()) })
    }

    /// Returns a printer that prints nothing: `reporter` receives the progress, and
    /// [`take_summary`](Self::take_summary) returns the summary.
    pub(crate) fn for_caller(reporter: Arc<dyn Reporter>) -> Self {
        Self(Output::Caller { reporter, summary: Mutex::new(None) })
    }

    /// Returns the object that `--json` prints, if the command has already produced it.
    pub(crate) fn take_summary(&self) -> Option<String> {
        match &self.0 {
            Output::Terminal { .. } => None,
            Output::Caller { summary, .. } => locked(summary).take(),
        }
    }

    /// Prints the result of a command: `text`, or with `--json` the object `json` on one line.
    ///
    /// # Errors
    ///
    /// An error of stdout, or of serialising `json`.
    pub fn summary(&self, text: &str, json: &impl Serialize) -> io::Result<()> {
        match &self.0 {
            Output::Terminal { options: OutputOptions { json: true, .. }, .. } => {
                writeln!(io::stdout().lock(), "{}", serde_json::to_string(json)?)
            }
            Output::Terminal { .. } => writeln!(io::stdout().lock(), "{}", text.trim_end()),
            Output::Caller { summary, .. } => {
                *locked(summary) = Some(serde_json::to_string(json)?);
                Ok(())
            }
        }
    }

    /// Prints a remark on stderr, unless the command is quiet or prints JSON.
    pub fn remark(&self, text: &str) {
        if let Output::Terminal { options: OutputOptions { json: false, quiet: false }, .. } = &self.0 {
            // An error is ignored: stderr may be closed.
            let _ = writeln!(io::stderr().lock(), "{text}");
        }
    }
}

impl Reporter for Printer {
    fn begin(&self, stage: &str, total: Option<u64>, unit: &str) {
        match &self.0 {
            Output::Terminal { options, bar } => *locked(bar) = new_bar(options.quiet, stage, total, unit),
            Output::Caller { reporter, .. } => reporter.begin(stage, total, unit),
        }
    }

    fn advance(&self, amount: u64) {
        match &self.0 {
            Output::Terminal { bar, .. } => locked(bar).inc(amount),
            Output::Caller { reporter, .. } => reporter.advance(amount),
        }
    }

    fn note(&self, text: &str) {
        match &self.0 {
            Output::Terminal { bar, .. } => locked(bar).set_message(text.to_owned()),
            Output::Caller { reporter, .. } => reporter.note(text),
        }
    }

    fn end(&self) {
        match &self.0 {
            Output::Terminal { bar, .. } => locked(bar).finish_and_clear(),
            Output::Caller { reporter, .. } => reporter.end(),
        }
    }

    fn go_on(&self) -> io::Result<()> {
        match &self.0 {
            // At a terminal, a signal ends the process.
            Output::Terminal { .. } => Ok(()),
            Output::Caller { reporter, .. } => reporter.go_on(),
        }
    }
}

fn new_bar(quiet: bool, stage: &str, total: Option<u64>, unit: &str) -> ProgressBar {
    let bar = match (quiet, total) {
        (true, _) => ProgressBar::hidden(),
        (false, Some(total)) => ProgressBar::new(total).with_style(style(&format!(
            "{{prefix:<12}} {{bar:30}} {{human_pos}}/{{human_len}} {unit}  {{per_sec}}  {{msg}}"
        ))),
        (false, None) => ProgressBar::new_spinner().with_style(style(&format!(
            "{{prefix:<12}} {{spinner}} {{human_pos}} {unit}  {{per_sec}}  {{msg}}"
        ))),
    };
    bar.set_prefix(stage.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
