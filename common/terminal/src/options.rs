//! How errors name options: libraries by the names of their API, binaries by flags, and functions by keywords.
//!
//! A library knows options of its API, not flags. Its errors name one as ``the option `memory_limit` ``, or with a
//! value as ``the option `commit = merge` ``. A binary prints the flag in its place: the long flag of the argument
//! whose id in the binary's own clap command is that name, as `` `--memory-limit` ``. The id of an argument is the name
//! of its field; where the API has another name, the argument says so: `#[arg(id = "memory_bytes", long = "memory")]`.
//!
//! A command that is called as a function has [keywords] instead, which replace the names of options, and the
//! flags that a command's own errors name: `` `memory_limit` ``, `` `threads=2` ``, `` `overwrite=True` ``.
//!
//! An option that the command does not have keeps its name. Names in backticks without the words before them are
//! never changed: columns and features may have the names of options.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::{Arg, Command};

use crate::keywords;

/// What stands before an option's name in an error.
const OPTION: &str = "the option `";
/// What stands before a flag's.
const FLAG: &str = "`--";

/// How the arguments of a command are named.
#[derive(Debug)]
pub(crate) struct Names {
    style: Style,
    /// By their ids.
    arguments: BTreeMap<String, Argument>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Style {
    Flags,
    Keywords,
}

#[derive(Debug)]
struct Argument {
    long: String,
    keyword: String,
    is_switch: bool,
}

impl Names {
    /// The flags of `command` and of the subcommand that `arguments` name; the first of the arguments is the program.
    /// None if the command does not take such arguments.
    pub(crate) fn flags(command: Command, arguments: &[OsString]) -> Self {
        Self { style: Style::Flags, arguments: arguments_of(command, arguments) }
    }

    /// Likewise the keywords.
    pub(crate) fn keywords(command: Command, arguments: &[OsString]) -> Self {
        Self { style: Style::Keywords, arguments: arguments_of(command, arguments) }
    }

    /// The text with these names in place of the options that it names.
    pub(crate) fn put_into(&self, text: &str) -> String {
        let text = replaced(text, OPTION, |option| self.of_option(option));
        match self.style {
            Style::Flags => text,
            Style::Keywords => replaced(&text, FLAG, |flag| self.of_flag(flag)),
        }
    }

    /// The name of an option, which may have a value: of an argument with the whole as its id, or with the name and the
    /// value.
    fn of_option(&self, option: &str) -> Option<String> {
        if let Some(argument) = self.arguments.get(option) {
            return Some(self.name(argument, None));
        }
        let (name, value) = option.split_once(" = ")?;
        Some(self.name(self.arguments.get(name)?, Some(value)))
    }

    /// The name in place of a flag without its dashes, which may have a value.
    fn of_flag(&self, flag: &str) -> Option<String> {
        let split = flag.split_once([' ', '=']);
        let (long, value) = split.map_or((flag, None), |(long, value)| (long, Some(value)));
        let argument = self.arguments.values().find(|argument| argument.long == long)?;
        Some(self.name(argument, value))
    }

    fn name(&self, argument: &Argument, value: Option<&str>) -> String {
        let Argument { long, keyword, is_switch } = argument;
        match (self.style, value) {
            (Style::Flags, None) => format!("`--{long}`"),
            (Style::Flags, Some(value)) => format!("`--{long} {value}`"),
            (Style::Keywords, _) if *is_switch => format!("`{keyword}=True`"),
            (Style::Keywords, None) => format!("`{keyword}`"),
            (Style::Keywords, Some(value)) if value.parse::<f64>().is_ok() => format!("`{keyword}={value}`"),
            (Style::Keywords, Some(value)) => format!("`{keyword}=\"{value}\"`"),
        }
    }
}

fn arguments_of(mut command: Command, line: &[OsString]) -> BTreeMap<String, Argument> {
    let mut arguments = BTreeMap::new();
    let Ok(matches) = command.try_get_matches_from_mut(line) else { return arguments };
    let (mut command, mut matches) = (&command, &matches);
    let of = |argument: &Arg| {
        let long = argument.get_long()?.to_owned();
        let (keyword, is_switch) = (keywords::name(argument), keywords::is_switch(argument));
        Some((argument.get_id().to_string(), Argument { long, keyword, is_switch }))
    };
    loop {
        arguments.extend(command.get_arguments().filter_map(of));
        let Some((name, of_subcommand)) = matches.subcommand() else { return arguments };
        let Some(subcommand) = command.find_subcommand(name) else { return arguments };
        (command, matches) = (subcommand, of_subcommand);
    }
}

/// The text with another name in place of `start`, what follows it, and a backtick: where there is another name.
fn replaced(text: &str, start: &str, name: impl Fn(&str) -> Option<String>) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(start) {
        shown.push_str(before);
        let named = after.split_once('`').and_then(|(old, after)| Some((name(old)?, after)));
        rest = match named {
            Some((name, after)) => {
                shown.push_str(&name);
                after
            }
            None => {
                shown.push_str(start);
                after
            }
        };
    }
    shown + rest
}

#[cfg(test)]
mod tests {
    use clap::ArgAction;

    use super::*;

    fn program() -> Command {
        let number = |id: &'static str, long: &'static str| Arg::new(id).long(long);
        let switch = |id: &'static str, long: &'static str| number(id, long).action(ArgAction::SetTrue);
        let build = Command::new("build")
            .arg(Arg::new("logs").required(true))
            .arg(number("memory_limit", "memory-limit"))
            .arg(switch("commit = overwrite", "overwrite"));
        let plan = Command::new("plan").arg(number("memory_bytes", "memory"));
        let program = Command::new("program").arg(switch("json", "json").global(true));
        program.subcommand_required(true).subcommand(build).subcommand(plan)
    }

    fn line(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn flags(arguments: &str) -> Names {
        Names::flags(program(), &line(arguments))
    }

    #[test]
    fn options_become_the_flags_of_the_command_that_was_run() {
        let build = flags("program build logs --memory-limit 5 --json");
        let text =
            "raise the option `memory_limit`, or set the option `commit = overwrite`; see the option `json`";
        assert_eq!(build.put_into(text), "raise `--memory-limit`, or set `--overwrite`; see `--json`");
        assert_eq!(build.put_into("as the option `memory_limit = 1GiB`"), "as `--memory-limit 1GiB`");
        assert_eq!(flags("program plan").put_into("raise the option `memory_bytes`"), "raise `--memory`");
    }

    #[test]
    fn options_and_flags_become_keywords_of_a_function() {
        let build = Names::keywords(program(), &line("program build logs"));
        let text = "raise the option `memory_limit`, or set the option `commit = overwrite`";
        assert_eq!(build.put_into(text), "raise `memory_limit`, or set `overwrite=True`");
        let text = "as the option `memory_limit = 1GiB`, or `--memory-limit 5`, or `--overwrite`";
        let named = "as `memory_limit=\"1GiB\"`, or `memory_limit=5`, or `overwrite=True`";
        assert_eq!(build.put_into(text), named);
        // Flags of another command.
        let text = "give `onefold-train run --resume`, or `--resume`";
        assert_eq!(build.put_into(text), text);
    }

    #[test]
    fn other_names_stay() {
        let build = flags("program build logs");
        for text in [
            "feature `memory_limit`: the memory limit does not suffice",
            // An option of another command, one of none, an argument without a flag, and text that ends early.
            "raise the option `memory_bytes`",
            "raise the option `threads = 2`",
            "change the option `logs`",
            "the option `memory_limit",
            "the option `",
        ] {
            assert_eq!(build.put_into(text), text);
        }
        assert_eq!(build.put_into("the option `a``the option `json`"), "the option `a```--json`");
    }

    #[test]
    fn arguments_that_are_no_command_have_no_flags() {
        let text = "raise the option `memory_limit`";
        assert_eq!(flags("program build").put_into(text), text);
        assert_eq!(flags("program sing").put_into(text), text);
    }
}
