//! The completions of `onefold`: the names of programs, then the completions of the named program.
//!
//! Each script takes the words after `onefold ingest` as the arguments of `onefold-ingest`, whose completions are
//! defined before it in the same script.

use std::fmt::Write as _;

use crate::Shell;

/// The commands of `onefold` itself, each with a description.
const COMMANDS: [(&str, &str); 3] = [
    ("completions", "Print a script for a shell"),
    ("help", "List the programs, or print the help of one"),
    ("man", "Write the manual pages"),
];

/// Returns the script for a shell: `scripts`, which are the scripts of the programs, followed by the script of
/// `onefold`. `programs` has the names of the programs without `onefold-`, each with a description.
pub(crate) fn script(shell: Shell, programs: &[(&str, &str)], scripts: &str) -> String {
    let mut words = String::new();
    for (name, purpose) in programs.iter().chain(&COMMANDS) {
        let _ = match shell {
            Shell::Bash => write!(words, "{name} "),
            Shell::Zsh => write!(words, "\n            '{name}:{purpose}'"),
            Shell::Fish => {
                writeln!(words, "complete -c onefold -f -n __onefold_first -a {name} -d '{purpose}'")
            }
        };
    }
    let own = match shell {
        Shell::Bash => BASH,
        Shell::Zsh => ZSH,
        Shell::Fish => FISH,
    };
    let own = own.replace("@NAMES@", words.trim_end());
    match shell {
        Shell::Bash | Shell::Fish => format!("{scripts}{own}"),
        Shell::Zsh => {
            // zsh reads the first line of a file in its `fpath`, and loads the file for these commands.
            let names: String = programs.iter().map(|(name, _)| format!(" onefold-{name}")).collect();
            format!("#compdef onefold{names}\n\n{scripts}{own}")
        }
    }
}

const BASH: &str = r#"
_onefold() {
    if [ "$COMP_CWORD" -le 1 ]; then
        COMPREPLY=( $(compgen -W "@NAMES@" -- "$2") )
        return
    fi
    local program="onefold-${COMP_WORDS[1]}"
    local complete="_${program//-/__}"
    declare -F "$complete" >/dev/null || return 0
    local words=("$program" "${COMP_WORDS[@]:2}") position=$((COMP_CWORD - 1))
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$position
    "$complete" "$program" "$2" "$3"
}
complete -F _onefold -o bashdefault -o default onefold
"#;

const ZSH: &str = r#"
_onefold() {
    if [[ "$service" != onefold ]]; then
        "_$service" "$@"
    elif (( CURRENT == 2 )); then
        local -a programs
        programs=(@NAMES@
        )
        _describe -t commands program programs
    else
        shift words
        words[1]="onefold-${words[1]}"
        (( CURRENT-- ))
        _normal
    fi
}

if [ "$funcstack[1]" = "_onefold" ]; then
    _onefold "$@"
else
    compdef _onefold onefold
fi
"#;

const FISH: &str = r#"
function __onefold_first
    test (count (commandline -opc)) -eq 1
end

function __onefold_rest
    set -l words (commandline -opc)
    set -l program onefold-$words[2]
    set -e words[1..2]
    complete -C (string join ' ' -- $program $words (commandline -ct))
end

@NAMES@
complete -c onefold -f -n 'not __onefold_first' -a '(__onefold_rest)'
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_contains_the_completions_and_names_of_all_programs() {
        let programs = [("ingest", "Build datasets"), ("read", "Show batches")];
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell, &programs, "# theirs\n");
            for part in ["# theirs\n", "ingest", "read", "completions", "man"] {
                assert!(script.contains(part), "{shell:?}: no {part} in\n{script}");
            }
            assert!(!script.contains("@NAMES@"), "{shell:?}\n{script}");
            assert_eq!(script.contains("Build datasets"), shell != Shell::Bash);
        }
        let script = script(Shell::Zsh, &programs, "");
        assert!(script.starts_with("#compdef onefold onefold-ingest onefold-read\n"), "{script}");
    }
}
