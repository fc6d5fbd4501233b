//! How errors name options: libraries use the names of their API, binaries use flags, and functions use keywords.
//!
//! A library puts an option into its texts as a value: see [`onefold_base::fault`]. A binary writes the option as the
//! long flag of the argument whose id in its clap command equals the option's name: `` `--memory-limit` ``. The id of
//! an argument is the name of its field. If the API has another name, the argument sets its id:
//! `#[arg(id = "memory_bytes", long = "memory")]`. An id may also consist of an option and its value:
//! `#[arg(id = "commit = overwrite", long = "overwrite")]`.
//!
//! If a command is called as a function, errors name [keywords]:
//! `` `memory_limit` ``, `` `threads=2` ``, `` `overwrite=True` ``. An option that the command does not have keeps
//! the name of the API.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::{Arg, Command};
use onefold_base::fault::OptionName;

use crate::keywords;

/// The names of the arguments of a command.
#[derive(Debug)]
pub(crate) struct Names {
    style: Style,
    /// The arguments by their ids.
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
    /// Returns the flags of `command` and of the subcommand that `arguments` name. The first element of `arguments`
    /// is the program. There are no flags if the command does not have this subcommand.
    pub(crate) fn flags(command: Command, arguments: &[OsString]) -> Self {
        Self { style: Style::Flags, arguments: arguments_of(command, arguments) }
    }

    /// Returns the keywords of `command` and of the subcommand, as [`flags`](Self::flags) does.
    pub(crate) fn keywords(command: Command, arguments: &[OsString]) -> Self {
        Self { style: Style::Keywords, arguments: arguments_of(command, arguments) }
    }

    /// Returns the name of an option. An argument whose id is the option with its value takes precedence over an
    /// argument whose id is the option.
    pub(crate) fn name(&self, option: &OptionName) -> String {
        let OptionName { name, value } = option;
        let whole = value.as_ref().and_then(|value| self.arguments.get(&format!("{name} = {value}")));
        match (whole, self.arguments.get(name)) {
            (Some(argument), _) => self.written(argument, None),
            (None, Some(argument)) => self.written(argument, value.as_deref()),
            (None, None) => option.to_string(),
        }
    }

    fn written(&self, argument: &Argument, value: Option<&str>) -> String {
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

#[cfg(test)]
mod tests {
    use clap::ArgAction;
    use onefold_base::fault::option;

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

    fn named(names: &Names, option: OptionName) -> String {
        names.name(&option)
    }

    #[test]
    fn options_become_the_flags_of_the_command_that_was_run() {
        let build = flags("program build logs --memory-limit 5 --json");
        assert_eq!(named(&build, option("memory_limit")), "`--memory-limit`");
        assert_eq!(named(&build, option("memory_limit").set_to("1GiB")), "`--memory-limit 1GiB`");
        assert_eq!(named(&build, option("commit").set_to("overwrite")), "`--overwrite`");
        assert_eq!(named(&build, option("json")), "`--json`");
        assert_eq!(named(&flags("program plan"), option("memory_bytes")), "`--memory`");
    }

    #[test]
    fn options_become_keywords_of_a_function() {
        let build = Names::keywords(program(), &line("program build logs"));
        assert_eq!(named(&build, option("memory_limit")), "`memory_limit`");
        assert_eq!(named(&build, option("memory_limit").set_to("1GiB")), "`memory_limit=\"1GiB\"`");
        assert_eq!(named(&build, option("memory_limit").set_to(5)), "`memory_limit=5`");
        assert_eq!(named(&build, option("commit").set_to("overwrite")), "`overwrite=True`");
    }

    #[test]
    fn other_options_keep_the_name_of_the_api() {
        let build = flags("program build logs");
        // An option of another command, an option that no command has, and an argument without a flag.
        assert_eq!(named(&build, option("memory_bytes")), "the option `memory_bytes`");
        assert_eq!(named(&build, option("threads").set_to(2)), "the option `threads = 2`");
        assert_eq!(named(&build, option("logs")), "the option `logs`");
        // Arguments that name no known command.
        for line in ["program build", "program sing"] {
            assert_eq!(named(&flags(line), option("memory_limit")), "the option `memory_limit`");
        }
    }
}
