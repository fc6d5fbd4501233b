//! A command's arguments as keyword arguments of a function: `--memory-limit 1GiB` is `memory_limit="1GiB"`.
//!
//! The keywords are derived from the command's clap definition. A call converts them back into command-line
//! arguments, which the same parser reads.

use std::error::Error as _;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command};
use onefold_base::fault::{Fault, Kind};
use onefold_base::names::suggest;

/// Arguments that are not keywords, because a function prints nothing.
const OF_TERMINALS: [&str; 4] = ["help", "json", "quiet", "version"];

/// A keyword argument of a command's function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyword {
    /// The name: the long flag with underscores, or the id of an argument without a flag.
    pub name: String,
    /// The kind of value that the keyword takes.
    pub kind: KeywordKind,
    /// Whether the argument has no flag, so that a function takes it by position.
    pub positional: bool,
    /// Whether the argument is always required.
    pub required: bool,
    /// The default value, as text.
    pub default: Option<String>,
    /// The description, in one sentence.
    pub help: String,
}

/// The kind of value that a keyword takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeywordKind {
    /// A boolean.
    Switch,
    /// One value.
    One,
    /// Any number of values.
    Many,
}

/// Returns the keyword of an argument. A keyword that is a reserved word in Python ends with an underscore.
pub(crate) fn name(argument: &Arg) -> String {
    match argument.get_long() {
        Some("from") => "from_".to_owned(),
        Some(long) => long.replace('-', "_"),
        None => argument.get_id().to_string(),
    }
}

/// Returns whether an argument takes no value.
pub(crate) fn is_switch(argument: &Arg) -> bool {
    matches!(argument.get_action(), ArgAction::SetTrue)
}

fn of(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|argument| !OF_TERMINALS.contains(&argument.get_id().as_str()))
}

/// Returns the keywords of a command. The command must be built.
pub(crate) fn keywords(command: &Command) -> Vec<Keyword> {
    let keyword = |argument: &Arg| Keyword {
        name: name(argument),
        kind: match argument.get_action() {
            ArgAction::SetTrue => KeywordKind::Switch,
            ArgAction::Append => KeywordKind::Many,
            _ => KeywordKind::One,
        },
        positional: argument.is_positional(),
        required: argument.is_required_set(),
        default: match argument.get_default_values() {
            [value] if !is_switch(argument) && !argument.is_hide_default_value_set() => {
                Some(value.to_string_lossy().into_owned())
            }
            _ => None,
        },
        help: argument.get_help().map(ToString::to_string).unwrap_or_default(),
    };
    of(command).map(keyword).collect()
}

/// Converts keywords into command-line arguments, beginning with the program's name. A switch is set whatever its
/// value is.
///
/// # Errors
///
/// The program has no such command, or the command has no such keyword.
pub(crate) fn arguments(
    program: &Command,
    command: &str,
    given: &[(String, Vec<OsString>)],
) -> Result<Vec<OsString>, Fault> {
    let wrong = |message: String, hint: String| Fault::new(Kind::Usage, message).hint(hint);
    let Some(definition) = program.find_subcommand(command) else {
        let hint = suggest(command, program.get_subcommands().map(Command::get_name));
        return Err(wrong(format!("`{}` has no command `{command}`", program.get_name()), hint));
    };
    let mut flags = Vec::new();
    let mut by_place = Vec::new();
    for (keyword, values) in given {
        let Some(argument) = of(definition).find(|argument| name(argument) == *keyword) else {
            let names: Vec<String> = of(definition).map(name).collect();
            let hint = suggest(keyword, names.iter().map(String::as_str));
            return Err(wrong(format!("`{command}` has no argument `{keyword}`"), hint));
        };
        match argument.get_long() {
            None => by_place.push((argument.get_index(), values)),
            Some(long) if is_switch(argument) => flags.push(OsString::from(format!("--{long}"))),
            Some(long) => {
                for value in values {
                    let mut flag = OsString::from(format!("--{long}="));
                    flag.push(value);
                    flags.push(flag);
                }
            }
        }
    }
    by_place.sort_by_key(|(index, _)| *index);
    let start = [program.get_name(), command].map(OsString::from);
    // Arguments after `--` are never flags.
    let end = by_place.into_iter().flat_map(|(_, values)| values.iter().cloned());
    Ok(start.into_iter().chain(flags).chain([OsString::from("--")]).chain(end).collect())
}

/// Converts clap's error about the arguments of a command into a fault that names the arguments as keywords.
pub(crate) fn usage_fault(error: &clap::Error, program: &Command, command: &str) -> Fault {
    let texts = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    };
    // clap writes an argument with its value name: `--memory-limit <SIZE>`.
    let keyword = |shown: &String| {
        let commands = std::iter::once(program).chain(program.get_subcommands());
        let argument = commands.flat_map(Command::get_arguments).find(|arg| arg.to_string() == *shown);
        argument.map_or_else(|| shown.clone(), name)
    };
    let listed = |texts: &[String]| match texts {
        [one] => format!(" `{}`", keyword(one)),
        several => {
            let lines: String = several.iter().map(|shown| format!("\n  `{}`", keyword(shown))).collect();
            format!(":{lines}")
        }
    };
    let (arguments, value) = (texts(ContextKind::InvalidArg), texts(ContextKind::InvalidValue).concat());
    let argument = listed(&arguments);
    // The error of a value's parser may contain a message and a hint.
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    let (cause, own_hint) = match cause.split_once("\n  hint: ") {
        Some((cause, hint)) => (cause, Some(hint)),
        None => (&*cause, None),
    };
    let message = match error.kind() {
        ErrorKind::InvalidValue if value.is_empty() => {
            format!("a value is required for{argument} but none was supplied")
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let cause = if cause.is_empty() { String::new() } else { format!(": {cause}") };
            let valid = texts(ContextKind::ValidValue).join(", ");
            let valid = if valid.is_empty() { valid } else { format!("\n  [possible values: {valid}]") };
            format!("invalid value '{value}' for{argument}{cause}{valid}")
        }
        ErrorKind::ArgumentConflict => match texts(ContextKind::PriorArg) {
            prior if prior == arguments => format!("the argument{argument} cannot be used multiple times"),
            prior => format!("the argument{argument} cannot be used with{}", listed(&prior)),
        },
        ErrorKind::MissingRequiredArgument => {
            let missing = arguments.iter().map(|shown| format!("\n  `{}`", keyword(shown)));
            format!("the following required arguments were not provided:{}", missing.collect::<String>())
        }
        kind => {
            let what = kind.as_str().unwrap_or("the arguments cannot be read");
            if arguments.is_empty() { what.to_owned() } else { format!("{what}:{argument}") }
        }
    };
    let of_argument = || match (&*texts(ContextKind::SuggestedValue), error.get(ContextKind::InvalidArg)) {
        ([value], _) => format!("a similar value exists: '{value}'"),
        ([], Some(ContextValue::String(_))) => "correct the argument".to_owned(),
        ([], _) => format!("see what `{command}` takes"),
        (values, _) => format!("some similar values exist: '{}'", values.join("', '")),
    };
    Fault::new(Kind::Usage, message).hint(own_hint.map_or_else(of_argument, str::to_owned))
}

#[cfg(test)]
mod tests {
    use clap::value_parser;

    use super::*;

    fn condition(text: &str) -> Result<String, Fault> {
        let fault = || Fault::new(Kind::Options, format!("`{text}` is not a condition")).hint("write `a=1`");
        if text.contains('=') { Ok(text.to_owned()) } else { Err(fault()) }
    }

    fn program() -> Command {
        let build = Command::new("build")
            .arg(Arg::new("logs").required(true).action(ArgAction::Append))
            .arg(
                Arg::new("memory_limit")
                    .long("memory-limit")
                    .value_parser(value_parser!(u16))
                    .default_value("4"),
            )
            .arg(Arg::new("commit = overwrite").long("overwrite").action(ArgAction::SetTrue))
            .arg(Arg::new("layout").long("layout").value_parser(["rows", "folded"]))
            .arg(Arg::new("partition").long("partition").value_parser(condition))
            .arg(Arg::new("json").long("json").action(ArgAction::SetTrue));
        let mut program = Command::new("program").subcommand(build);
        program.build();
        program
    }

    fn given(keywords: &[(&str, &[&str])]) -> Vec<(String, Vec<OsString>)> {
        let values = |values: &[&str]| values.iter().map(OsString::from).collect();
        keywords.iter().map(|(name, given)| ((*name).to_owned(), values(given))).collect()
    }

    fn refused(keywords: &[(&str, &[&str])]) -> String {
        let program = program();
        let fault = match arguments(&program, "build", &given(keywords)) {
            Err(fault) => fault,
            Ok(arguments) => {
                let error = program.clone().try_get_matches_from(arguments).unwrap_err();
                usage_fault(&error, &program, "build")
            }
        };
        assert_eq!(fault.kind, Kind::Usage);
        fault.to_string()
    }

    #[test]
    fn keywords_are_those_of_the_definition() {
        let program = program();
        let keywords = keywords(program.find_subcommand("build").unwrap());
        let shown: Vec<_> = keywords.iter().map(|keyword| (keyword.name.as_str(), keyword.kind)).collect();
        let expected = [
            ("logs", KeywordKind::Many),
            ("memory_limit", KeywordKind::One),
            ("overwrite", KeywordKind::Switch),
            ("layout", KeywordKind::One),
            ("partition", KeywordKind::One),
        ];
        assert_eq!(shown, expected);
        assert!(keywords[0].required && keywords[0].positional && !keywords[1].required);
        assert_eq!(keywords[1].default.as_deref(), Some("4"));
    }

    #[test]
    fn keywords_become_arguments_that_the_parser_reads() {
        let keywords: &[(&str, &[&str])] =
            &[("logs", &["-a", "--json"]), ("memory_limit", &["7"]), ("overwrite", &[""])];
        let arguments = arguments(&program(), "build", &given(keywords)).unwrap();
        let line = ["program", "build", "--memory-limit=7", "--overwrite", "--", "-a", "--json"];
        assert_eq!(arguments, line);
        let matches = program().try_get_matches_from(arguments).unwrap();
        let (_, matches) = matches.subcommand().unwrap();
        assert_eq!(matches.get_one::<u16>("memory_limit"), Some(&7));
        assert!(matches.get_flag("commit = overwrite") && !matches.get_flag("json"));
    }

    #[test]
    fn errors_name_keywords_instead_of_flags() {
        let logs: (&str, &[&str]) = ("logs", &["a"]);
        let text = refused(&[logs, ("memory_limti", &["1"])]);
        assert_eq!(
            text,
            "`build` has no argument `memory_limti`\n  hint: did you mean `memory_limit`? Known names: `logs`, \
                          `memory_limit`, `overwrite`, `layout`, `partition`"
        );
        let text = refused(&[logs, ("memory_limit", &["much"])]);
        assert!(text.starts_with("invalid value 'much' for `memory_limit`: "), "{text}");
        let text = refused(&[logs, ("layout", &["row"])]);
        assert!(
            text.starts_with("invalid value 'row' for `layout`\n  [possible values: rows, folded]"),
            "{text}"
        );
        assert!(text.contains("\n  hint: a similar value exists: 'rows'"), "{text}");
        let text = refused(&[logs, ("partition", &["train"])]);
        let hint = "write `a=1`";
        assert_eq!(
            text,
            format!("invalid value 'train' for `partition`: `train` is not a condition\n  hint: {hint}")
        );
        let text = refused(&[]);
        assert!(text.starts_with("the following required arguments were not provided:\n  `logs`"), "{text}");
        assert!(refused(&[("json", &[""])]).starts_with("`build` has no argument `json`"));
    }
}
