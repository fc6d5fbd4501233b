//! Tests of `onefold` with a program `onefold-shell`, which is a link to the system's shell.

use std::os::unix::fs::symlink;
use std::process::{Command, Output, Stdio};

/// Returns a command that runs `onefold` with these arguments, and the directory on its PATH that contains
/// `onefold-shell`. `onefold` also finds the programs that are built beside it.
fn onefold(arguments: &[&str]) -> (Command, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    symlink("/bin/sh", folder.path().join("onefold-shell")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_onefold"));
    command.args(arguments).env("PATH", folder.path()).stdin(Stdio::null());
    (command, folder)
}

fn run(arguments: &[&str]) -> Output {
    let (mut command, _folder) = onefold(arguments);
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_program_gets_its_arguments_as_they_are() {
    let output =
        run(&["shell", "-c", "printf '%s|' \"$@\"", "name", "build", "--json", "--help", "--", "a b"]);
    assert!(output.status.success());
    assert_eq!(stdout(&output), "build|--json|--help|--|a b|");
}

#[test]
fn a_program_replaces_the_process() {
    let (mut command, _folder) = onefold(&["shell", "-c", "echo $$; exit 7"]);
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    assert_eq!(stdout(&output), format!("{process}\n"));
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn programs_are_listed_without_a_command() {
    for arguments in [&["help"][..], &[]] {
        let output = run(arguments);
        assert!(output.status.success());
        let listed = stdout(&output);
        assert!(listed.contains("\n  shell\n"), "{listed}");
    }
    let version = stdout(&run(&["--version"]));
    assert_eq!(version, format!("onefold {}\n", env!("CARGO_PKG_VERSION")));
    let help = stdout(&run(&["--help"]));
    assert!(help.contains("completions") && help.contains("Usage: onefold [COMMAND]"), "{help}");
}

#[test]
fn a_wrong_name_is_compared_with_the_known_ones() {
    let output = run(&["shel"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.starts_with("error: `onefold-shel` is neither in the directory of"), "{error}");
    assert!(error.contains("\n  hint: did you mean `shell`? Known names: "), "{error}");
    assert_eq!(run(&["--json"]).status.code(), Some(2));
    assert_eq!(run(&["completions", "tcsh"]).status.code(), Some(2));
}
