//! Tests of `onefold`, which starts the other programs and collects their completions and manual pages.

use std::process::Command;

use onefold_tests::Dir;

/// The programs that `onefold` lists, without `onefold-`.
const PROGRAMS: [&str; 7] = ["data", "ingest", "cluster", "read", "serve", "shard", "train"];

#[test]
fn every_program_is_found_and_started() {
    let dir = Dir::new();
    let listed = dir.command("onefold").works();
    for name in PROGRAMS {
        assert!(listed.contains(&format!("\n  {name} ")), "{listed}");
        let version = dir.command(&format!("onefold {name} --version")).works();
        assert_eq!(version, dir.command(&format!("onefold-{name} --version")).works());
    }
    let help = dir.command("onefold help read head").works();
    assert_eq!(help, dir.command("onefold-read head --help").works());
    dir.command("onefold read head missing").fails(&["`missing`"]);
    dir.command("onefold ingets build").is_misused(&["`onefold-ingets`", "did you mean `ingest`?"]);
}

#[test]
fn every_program_has_manual_pages() {
    let dir = Dir::new();
    dir.command("onefold man pages/man1").works();
    let page = dir.text("pages/man1/onefold.1");
    assert!(page.contains("completions"), "{page}");
    for name in PROGRAMS {
        let page = dir.text(format!("pages/man1/onefold-{name}.1"));
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
    let page = dir.text("pages/man1/onefold-ingest-build.1");
    assert!(page.contains("memory\\-limit"), "{page}");
    assert!(dir.path("pages/man1/onefold-train-run.1").is_file());
    dir.command("onefold man ~/man1").fails(&["`~/man1`: the shell did not expand `~`", "$HOME"]);
    assert!(!dir.path("~").exists());
}

/// Returns the completions that bash offers for the last word of a line.
fn completed(dir: &Dir, line: &str) -> Vec<String> {
    let words: Vec<_> = line.split(' ').collect();
    let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
    let complete = format!(
        "source completions.bash; COMP_WORDS=({line}); COMP_CWORD={}; COMPREPLY=(); \
         _onefold onefold '{last}' '{before}'; echo \"${{COMPREPLY[@]}}\"",
        words.len() - 1
    );
    let output =
        Command::new("bash").args(["--norc", "-c", &complete]).current_dir(dir.root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn bash_completes_programs_commands_and_options() {
    let dir = Dir::new();
    dir.write("completions.bash", dir.command("onefold completions bash").works());
    assert_eq!(completed(&dir, "onefold ing"), ["ingest"]);
    assert_eq!(completed(&dir, "onefold ingest bui"), ["build"]);
    assert_eq!(completed(&dir, "onefold ingest build --memory-l"), ["--memory-limit"]);
    assert_eq!(completed(&dir, "onefold serve worker --cache-d"), ["--cache-dir"]);
    for shell in ["zsh", "fish"] {
        let script = dir.command(&format!("onefold completions {shell}")).works();
        for part in ["onefold-train", "memory-limit", "Run a preprocessing service"] {
            assert!(script.contains(part), "{shell}: no {part}");
        }
    }
}
