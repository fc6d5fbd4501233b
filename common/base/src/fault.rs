//! Errors as values: a kind, a message, hints, and the options that the message and the hints name.
//!
//! A library knows the options of its API, but not the flags of a command. It puts options into its texts as values,
//! and the caller decides how they are written: a binary writes
//! `` `--memory-limit` ``, a Python function writes `` `memory_limit` ``. If a library's error is displayed without
//! such a caller, the option is written as ``the option `memory_limit` ``.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::process::panic_text;
pub use crate::text;

/// The kind of an error. The exit status of a command and the exception of a function follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The arguments of a command cannot be read; nothing was done.
    Usage,
    /// Options or a configuration that are invalid, or that do not fit this dataset.
    Options,
    /// Data that is damaged or was changed, or that has an invalid form or invalid values.
    Data,
    /// An error of the operating system or of an object store: a file does not exist, a disk is full.
    Storage,
    /// A limit that is too low, another process that holds a lock, a failed check, or any other error.
    Failed,
    /// The caller stopped the work.
    Stopped,
    /// A panic that is a bug in Onefold.
    Internal,
}

/// An option of a library's API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OptionName {
    /// The name of the option. It equals the id of the command's argument that sets this option.
    pub name: String,
    /// The value of the option, as text.
    pub value: Option<String>,
}

/// Returns the option `name`, to be used as a part of a [`Text`].
pub fn option(name: &str) -> OptionName {
    OptionName { name: name.to_owned(), value: None }
}

impl OptionName {
    /// Returns the option with the value `value`.
    #[must_use]
    pub fn set_to(self, value: impl fmt::Display) -> Self {
        Self { value: Some(value.to_string()), ..self }
    }
}

impl fmt::Display for OptionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            None => write!(f, "the option `{}`", self.name),
            Some(value) => write!(f, "the option `{} = {value}`", self.name),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Part {
    Words(String),
    Option(OptionName),
}

/// A text of words and options. The macro [`text!`] joins its parts; a text without options can be made from a
/// string.
///
/// ```
/// use onefold_base::fault::{option, text};
///
/// let text = text!["raise ", option("memory_limit"), ", or take smaller batches"];
/// assert_eq!(text.to_string(), "raise the option `memory_limit`, or take smaller batches");
/// assert_eq!(text.named(|option| format!("`--{}`", option.name)), "raise `--memory_limit`, or take smaller batches");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text(Vec<Part>);

impl Text {
    /// Appends `end`.
    pub fn push(&mut self, end: impl Into<Self>) {
        self.0.extend(end.into().0);
    }

    /// Returns the text as a string. `name` gives the name of each option.
    pub fn named(&self, name: impl Fn(&OptionName) -> String) -> String {
        let parts = self.0.iter().map(|part| match part {
            Part::Words(words) => words.clone(),
            Part::Option(option) => name(option),
        });
        parts.collect()
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.named(ToString::to_string))
    }
}

impl From<String> for Text {
    fn from(words: String) -> Self {
        Self(vec![Part::Words(words)])
    }
}

impl From<&str> for Text {
    fn from(words: &str) -> Self {
        words.to_owned().into()
    }
}

impl From<&String> for Text {
    fn from(words: &String) -> Self {
        words.clone().into()
    }
}

impl From<OptionName> for Text {
    fn from(option: OptionName) -> Self {
        Self(vec![Part::Option(option)])
    }
}

/// Makes a [`Text`] of these parts: strings, options and other texts.
#[macro_export]
macro_rules! text {
    ($($part:expr),+ $(,)?) => {{
        let mut text = $crate::fault::Text::default();
        $(text.push($part);)+
        text
    }};
}

/// An error as a value: its kind, its message and its hints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The kind of the error.
    pub kind: Kind,
    /// The message: what is wrong, and where.
    pub message: Text,
    /// The hints: what to do. Each one is a sentence without a full stop.
    pub hints: Vec<Text>,
}

impl Fault {
    /// Returns an error without hints.
    pub fn new(kind: Kind, message: impl Into<Text>) -> Self {
        Self { kind, message: message.into(), hints: Vec::new() }
    }

    /// Returns an error about a file or directory, without hints.
    pub fn of_file(kind: Kind, path: impl AsRef<Path>, message: impl Into<Text>) -> Self {
        Self::new(kind, text![format!("`{}`: ", path.as_ref().display()), message])
    }

    /// Returns the error for a panic. Its kind is [`Kind::Internal`], unless the panic's message says that the
    /// machine is out of memory, threads, files or disk space, because foreign code panics in these cases.
    pub fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic_text(panic);
        // Some messages contain a backtrace. Its line ends are escaped if the panic came from `unwrap` on an error.
        let first = text.lines().next().unwrap_or_default();
        let first = first.split("\\n").next().unwrap_or_default();
        match exhausted(text) {
            Some(hint) => Self::new(Kind::Failed, first).hint(hint),
            None => Self::new(Kind::Internal, format!("internal error: {first}")).hint(
                "this is a bug in Onefold; please report it with the command line and what it says under \
                 `ONEFOLD_LOG=debug`",
            ),
        }
    }

    /// Returns the same error with one more hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<Text>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Returns the same error with `place` before its message. If `place` ends with the message, as in errors that
    /// repeat their causes, `place` becomes the message.
    #[must_use]
    pub fn within(mut self, place: &str) -> Self {
        let message = self.message.to_string();
        let before = place.strip_suffix(message.as_str());
        let repeats = before.is_some_and(|before| before.is_empty() || before.ends_with(": "));
        self.message = match repeats || message.is_empty() {
            true => place.into(),
            false => text![place, ": ", self.message],
        };
        self
    }
}

/// Returns the hint for an error message of another library which says that memory, threads, files or disk space are
/// used up, and `None` for any other message.
pub fn exhausted(message: &str) -> Option<&'static str> {
    const THREADS: &str = "the machine gives this process no more threads: raise the limit (`ulimit -u`, a container's \
                           `pids.max`), or use fewer threads";
    const MEMORY: &str = "this process gets no more memory: use a smaller model, smaller batches or fewer threads, or \
                          raise the limit (`ulimit -v`, a container's limit)";
    const FILES: &str = "this process may not open more files: raise the limit (`ulimit -n`)";
    const SPACE: &str = "free some space, or choose another disk";
    const SIGNS: [(&str, &str); 12] = [
        ("failed to spawn thread", THREADS),
        ("resource temporarily unavailable", THREADS),
        ("cannot allocate memory", MEMORY),
        ("can't allocate memory", MEMORY),
        ("out of memory", MEMORY),
        ("bad_alloc", MEMORY),
        ("memory allocation of", MEMORY),
        ("failed to allocate", MEMORY),
        ("not enough memory", MEMORY),
        ("too many open files", FILES),
        ("no space left on device", SPACE),
        ("quota exceeded", SPACE),
    ];
    let message = message.to_lowercase();
    SIGNS.iter().find(|(sign, _)| message.contains(sign)).map(|(_, hint)| *hint)
}

/// Returns the hint for an error that is a bug, unless its message says that something is [used up](exhausted).
pub fn unexpected(message: &str) -> &'static str {
    exhausted(message).unwrap_or("this is a bug in Onefold; please report it with the command line")
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)?;
        self.hints.iter().try_for_each(|hint| write!(f, "\n  hint: {hint}"))
    }
}

impl Error for Fault {}

/// An error that can be converted into a [`Fault`].
pub trait Explain {
    /// Returns the error's kind, message and hints.
    fn fault(&self) -> Fault;
}

impl Explain for Fault {
    fn fault(&self) -> Fault {
        self.clone()
    }
}

/// Returns the [`Fault`] that an error of a store carries, or else the operating system's message.
impl Explain for io::Error {
    fn fault(&self) -> Fault {
        let carried = self.get_ref().and_then(|inner| inner.downcast_ref::<Fault>());
        carried.cloned().unwrap_or_else(|| Fault::new(Kind::Storage, self.to_string()))
    }
}

/// A function that finds the fault of an error of unknown type.
pub type Explainer = fn(&(dyn Error + 'static)) -> Option<Fault>;

/// Returns the fault of `error`, if `error` is an `E`.
pub fn explained<E: Explain + Error + 'static>(error: &(dyn Error + 'static)) -> Option<Fault> {
    error.downcast_ref::<E>().map(E::fault)
}

/// Implements `Display` for an error type by displaying its fault, with options named as in the API.
#[macro_export]
macro_rules! display_fault {
    ($error:ty) => {
        impl std::fmt::Display for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&$crate::fault::Explain::fault(self), f)
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_displayed_with_the_names_of_the_api() {
        let fault = Fault::new(Kind::Failed, "no room").hint(text!["raise ", option("limit").set_to(3)]);
        assert_eq!(fault.to_string(), "no room\n  hint: raise the option `limit = 3`");
        assert_eq!(fault.clone().within("a.toml").message.to_string(), "a.toml: no room");
        assert_eq!(fault.clone().within("a.toml: no room").message.to_string(), "a.toml: no room");
        assert_eq!(fault.clone().within("no room").message.to_string(), "no room");
        // A name may hold the words of the message.
        let place = fault.within("`no room.toml` cannot be read");
        assert_eq!(place.message.to_string(), "`no room.toml` cannot be read: no room");
    }

    #[test]
    fn a_panic_is_a_bug_unless_something_is_used_up() {
        let fault = |message: &str| Fault::of_panic(&message.to_owned());
        let bug = fault("index out of bounds\nbacktrace");
        assert_eq!(
            (bug.kind, bug.message.to_string()),
            (Kind::Internal, "internal error: index out of bounds".into())
        );
        assert!(bug.hints[0].to_string().contains("a bug in Onefold"));
        let thread = "failed to spawn thread: Os { code: 11, kind: WouldBlock, message: \"Resource temporarily unavailable\" }";
        let torch = "called `Result::unwrap()` on an `Err` value: Torch(\"DefaultCPUAllocator: can't allocate memory: you \
                     tried to allocate 768000000 bytes. Error code 12 (Cannot allocate memory)\\nframe #0: c10\\n\")";
        let disk = "write failed: No space left on device (os error 28)";
        for (message, hint) in [(thread, "pids.max"), (torch, "no more memory"), (disk, "free some space")] {
            let fault = fault(message);
            assert_eq!(fault.kind, Kind::Failed, "{message}");
            let text = fault.to_string();
            assert!(text.contains(hint) && !text.contains("bug") && !text.contains("frame"), "{text}");
        }
    }

    #[test]
    fn exhausted_memory_and_full_disks_are_not_reported_as_bugs() {
        assert!(unexpected("a tensor of 3 dimensions").contains("bug"));
        for message in
            ["std::bad_alloc", "Failed to allocate 8 bytes", "writing: No space left on device (os error 28)"]
        {
            assert!(!unexpected(message).contains("bug"), "{message}");
        }
    }

    #[test]
    fn a_fault_travels_as_json() {
        let fault = Fault::new(Kind::Options, text![option("a"), " is wrong"]).hint("give another");
        let json = serde_json::to_string(&fault).unwrap();
        assert!(
            json.starts_with(r#"{"kind":"options","message":[{"name":"a","value":null}," is wrong"]"#),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<Fault>(&json).unwrap(), fault);
    }

    #[test]
    fn an_error_of_a_store_is_found_in_that_of_the_operating_system() {
        let fault = Fault::new(Kind::Storage, "denied").hint("set a key");
        assert_eq!(io::Error::other(fault.clone()).fault(), fault);
        let missing = io::Error::from(io::ErrorKind::NotFound);
        assert_eq!(explained::<io::Error>(&missing), Some(Fault::new(Kind::Storage, missing.to_string())));
        assert_eq!(explained::<Fault>(&missing), None);
    }
}
