//! Shell completions and manual pages of a program, generated from its clap definition.
//!
//! Each program generates its own, so that `onefold` can collect them without being linked with the programs. `onefold`
//! requests them with the hidden option `--generate`, which must be the first argument:
//!
//! - `onefold-read --generate bash` prints the completions for a shell (bash, zsh or fish).
//! - `onefold-read --generate man DIR` writes a manual page for the program and for each of its commands.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use onefold_base::fault::{Fault, Kind};
use onefold_base::location::check_local;

/// The hidden option that makes a program generate its completions or manual pages.
pub const GENERATE: &str = "--generate";

/// Returns the arguments after [`GENERATE`] if it is the first argument of the program; otherwise `None`. The first
/// element of `arguments` is the program's name.
pub(crate) fn requested(arguments: &[OsString]) -> Option<&[OsString]> {
    match arguments {
        [_, first, rest @ ..] if first == GENERATE => Some(rest),
        _ => None,
    }
}

/// Prints completions, or writes manual pages, as the arguments after [`GENERATE`] request.
///
/// # Errors
///
/// An error for unknown arguments, and for failures to write to stdout or to the directory.
pub(crate) fn generate(definition: Command, request: &[OsString]) -> anyhow::Result<()> {
    match request {
        [man, folder] if man == "man" => Ok(manual(definition, Path::new(folder))?),
        [shell] => {
            let shell = shell.to_str().and_then(|name| name.parse::<Shell>().ok()).ok_or_else(misused)?;
            Ok(io::stdout().lock().write_all(&completions(definition, shell))?)
        }
        _ => Err(misused().into()),
    }
}

fn misused() -> Fault {
    Fault::new(Kind::Usage, format!("`{GENERATE}` takes a shell, or `man` and a directory"))
        .hint("run `onefold completions` or `onefold man`")
}

/// Returns the script that completes the arguments of a program.
fn completions(mut definition: Command, shell: Shell) -> Vec<u8> {
    let (name, mut script) = (definition.get_name().to_owned(), Vec::new());
    clap_complete::generate(shell, &mut definition, name.clone(), &mut script);
    if shell != Shell::Bash {
        return script;
    }
    // For bash, clap_complete replaces the hyphen of the program's name in some labels as if it began a command.
    let (mistaken, right) = (name.replace('-', "__subcmd__"), name.replace('-', "__"));
    String::from_utf8_lossy(&script).replace(&mistaken, &right).into_bytes()
}

/// Writes the manual pages of a program and of its commands (`onefold-read.1`, `onefold-read-head.1`). Creates the
/// directory if it does not exist.
pub(crate) fn manual(definition: Command, folder: &Path) -> io::Result<()> {
    check_local(folder).map_err(|(message, hint)| {
        io::Error::other(Fault::of_file(Kind::Options, folder, message).hint(hint))
    })?;
    fs_err::create_dir_all(folder)?;
    clap_mangen::generate_to(definition, folder)
}

#[cfg(test)]
mod tests {
    use clap::Arg;
    use onefold_base::fault::Explain;

    use super::*;

    fn program() -> Command {
        let build =
            Command::new("build").about("Build a dataset").arg(Arg::new("limit").long("memory-limit"));
        Command::new("onefold-test").version("1").about("Test").subcommand(build)
    }

    fn line(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn completions_name_commands_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completions(program(), shell)).unwrap();
            for part in ["onefold-test", "build", "memory-limit"] {
                assert!(script.contains(part), "{shell}: no {part} in\n{script}");
            }
        }
    }

    #[test]
    fn every_command_has_a_manual_page() {
        let folder = tempfile::tempdir().unwrap();
        let pages = folder.path().join("man1");
        generate(program(), &[OsString::from("man"), pages.clone().into()]).unwrap();
        let page = fs_err::read_to_string(pages.join("onefold-test-build.1")).unwrap();
        assert!(page.contains("memory\\-limit"), "{page}");
        let page = fs_err::read_to_string(pages.join("onefold-test.1")).unwrap();
        assert!(page.contains("Build a dataset"), "{page}");
        assert_eq!(fs_err::read_dir(&pages).unwrap().count(), 2);
    }

    #[test]
    fn a_location_that_is_no_local_folder_gets_no_manual_pages() {
        for folder in ["~/man", "file:/man", "s3://bucket/man"] {
            let error = generate(program(), &line(&["man", folder])).unwrap_err();
            let fault = error.downcast::<io::Error>().unwrap().fault();
            assert_eq!(fault.kind, Kind::Options);
            assert!(fault.message.to_string().starts_with(&format!("`{folder}`: ")), "{fault}");
            assert!(!Path::new(folder).exists());
        }
    }

    #[test]
    fn completions_are_requested_by_the_first_argument_only() {
        assert_eq!(requested(&line(&["program", "--generate", "bash"])), Some(&line(&["bash"])[..]));
        assert_eq!(requested(&line(&["program", "build", "--generate"])), None);
        assert_eq!(requested(&line(&["program"])), None);
        for words in [&["tcsh"][..], &[], &["man"], &["bash", "zsh"]] {
            let error = generate(program(), &line(words)).unwrap_err();
            assert_eq!(error.downcast::<Fault>().unwrap().kind, Kind::Usage);
        }
    }
}
