//! How errors of libraries name options, and how binaries turn these names into flags.
//!
//! A library knows options of its API, not flags. Its errors name one as ``the option `memory_limit` ``, or with a value as
//! ``the option `commit = merge` ``. A binary prints the flag in its place: the long flag of the argument whose id in the
//! binary's own clap command is that name, as `` `--memory-limit` ``. The id of an argument is the name of its field; where the
//! API has another name, the argument says so: `#[arg(id = "memory_bytes", long = "memory")]`.
//!
//! An option that the command does not have keeps the library's name. Names in backticks without the words before them are
//! never changed: columns and features may have the names of options.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::Command;

/// What stands before an option's name in an error.
const OPTION: &str = "the option `";

/// The flags of a command, by the ids of its arguments.
#[derive(Debug, Default)]
pub(crate) struct Flags(BTreeMap<String, String>);

impl Flags {
    /// The flags of `command` and of the subcommand that `arguments` name; the first of the arguments is the program. None if
    /// the command does not take such arguments.
    pub(crate) fn of(mut command: Command, arguments: impl IntoIterator<Item = OsString>) -> Self {
        let mut flags = Self::default();
        let Ok(matches) = command.try_get_matches_from_mut(arguments) else { return flags };
        let (mut command, mut matches) = (&command, &matches);
        loop {
            for argument in command.get_arguments() {
                if let Some(long) = argument.get_long() {
                    flags.0.insert(argument.get_id().to_string(), format!("--{long}"));
                }
            }
            let Some((name, of_subcommand)) = matches.subcommand() else { return flags };
            let Some(subcommand) = command.find_subcommand(name) else { return flags };
            (command, matches) = (subcommand, of_subcommand);
        }
    }

    /// The text with flags in place of the options that it names.
    pub(crate) fn put_into(&self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once(OPTION) {
            shown.push_str(before);
            let named = after.split_once('`').and_then(|(option, after)| Some((self.flag(option)?, after)));
            rest = match named {
                Some((flag, after)) => {
                    shown.push_str(&format!("`{flag}`"));
                    after
                }
                None => {
                    shown.push_str(OPTION);
                    after
                }
            };
        }
        shown + rest
    }

    /// The flag of an option, which may have a value: of an argument with the whole as its id, or with the name and the value.
    fn flag(&self, option: &str) -> Option<String> {
        if let Some(flag) = self.0.get(option) {
            return Some(flag.clone());
        }
        let (name, value) = option.split_once(" = ")?;
        Some(format!("{} {value}", self.0.get(name)?))
    }
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn flags(line: &str) -> Flags {
        let number = |id: &'static str, long: &'static str| Arg::new(id).long(long);
        let switch = |id: &'static str, long: &'static str| number(id, long).action(ArgAction::SetTrue);
        let build = Command::new("build")
            .arg(Arg::new("logs").required(true))
            .arg(number("memory_limit", "memory-limit"))
            .arg(switch("commit = overwrite", "overwrite"));
        let plan = Command::new("plan").arg(number("memory_bytes", "memory"));
        let program = Command::new("program").arg(switch("json", "json").global(true));
        let program = program.subcommand_required(true).subcommand(build).subcommand(plan);
        Flags::of(program, line.split(' ').map(OsString::from))
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
