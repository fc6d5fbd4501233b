//! The reference pages of the commands are what the programs print for `--help`.

use std::path::Path;
use std::process::Command;

/// `docs/commands.py` writes these pages. Here it compares them with the programs of this build.
#[test]
fn the_pages_of_the_commands_are_what_they_print() {
    let test = std::env::current_exe().expect("the path of this test");
    let binaries = test.ancestors().nth(2).expect("the folder of the programs, above that of the tests");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/commands.py");
    let mut command = Command::new("python3");
    let output = command.arg(script).arg("--binaries").arg(binaries).arg("--check").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
