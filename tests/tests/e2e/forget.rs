//! Tests of the commands that forget users and merge files.

use onefold_tests::Dir;
use serde_json::{Value, json};

use crate::logs::write_logs;
use crate::row_groups::write_many_row_groups;
use crate::samples::{assert_only_named_files, read_samples, snapshot_numbers};

const JOINED: &str = "ON f.request = e.request";

/// Creates a directory with the hand-made log in `logs`, and with a second configuration that leaves out user 2.
fn with_logs() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir.write("logs/without.toml", dir.text("logs/dataset.toml"));
    dir.edit("logs/without.toml", JOINED, &format!("{JOINED} WHERE f.user <> 2"));
    dir
}

fn digest(dir: &Dir, dataset: &str) -> Value {
    dir.command(&format!("onefold-ingest verify {dataset}")).json()["digest"].clone()
}

/// Runs `verify` with these arguments. Returns the exit status, the summary and the stderr.
fn look(dir: &Dir, arguments: &str) -> (Option<i32>, Value, String) {
    let output = dir.command(&format!("onefold-ingest verify dataset --json {arguments}")).output();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let summary = serde_json::from_str(stdout.lines().last().unwrap_or_default()).unwrap_or_default();
    (output.status.code(), summary, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn forgotten_users_are_gone_and_the_others_stay() {
    let dir = with_logs();
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.command("onefold-ingest build logs/without.toml --out without").works();
    dir.write("users.txt", "2\n77\n");
    let (status, found, error) = look(&dir, "--absent users.txt");
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("has something of the users") && error.contains("hint: "), "{error}");
    let places = found["absent"]["places"].as_array().unwrap();
    let of = |part: &str| places.iter().any(|place| place.to_string().contains(part));
    assert!(of("samples are of sessions of users (`2`)") && of("it has values of user `2`"), "{places:?}");
    assert!(of("\"column\":\"user\""), "{places:?}");

    let forget = "onefold-ingest forget dataset --users users.txt";
    let dry = dir.command(&format!("{forget} --dry-run --purge")).json();
    assert_eq!((&dry["changed"], &dry["snapshots_with_users"]), (&json!(false), &json!([1])));
    let removed = dir.command(forget).json();
    let figures = ["users", "users_found", "samples_removed", "sessions_removed", "snapshot"];
    assert_eq!(figures.map(|figure| removed[figure].as_u64()), [2, 1, 4, 2, 2].map(Some), "{removed}");
    assert_eq!(removed["users_not_found"], json!(["77"]));
    for figure in ["samples_removed", "files_rewritten", "bytes_rewritten", "partitions"] {
        assert_eq!(dry[figure], removed[figure], "{figure}");
    }
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "without"));
    assert!(read_samples(&dir.path("dataset")) == read_samples(&dir.path("without")));
    dir.command("onefold-ingest verify dataset --against logs/without.toml").works();
    let history = dir.command("onefold-ingest history dataset").json();
    let last = &history["snapshots"][1];
    assert_eq!((&last["operation"], &last["samples_gained"]), (&json!("forget"), &json!(-4)));

    // The older snapshot still contains the user.
    assert_eq!(look(&dir, "--absent users.txt --at 2").0, Some(0));
    assert_eq!(look(&dir, "--absent users.txt").0, Some(1));
    let purged = dir.command(&format!("{forget} --purge")).json();
    assert_eq!((&purged["changed"], &purged["purged"]["snapshots_removed"]), (&json!(false), &json!([1])));
    let (status, found, error) = look(&dir, "--absent users.txt");
    assert_eq!((status, &found["absent"]["snapshots"]), (Some(0), &json!([2])), "{error}");
    assert_eq!(snapshot_numbers(&dir.path("dataset")), [2]);
    assert_only_named_files(&dir.path("dataset"));
    // An append of the same logs adds the user again.
    dir.command("onefold-ingest append logs/dataset.toml --out dataset").works();
    assert_eq!(look(&dir, "--absent users.txt").0, Some(1));
}

#[test]
fn keys_of_several_columns_are_given_as_csv() {
    let dir = with_logs();
    for config in ["logs/dataset.toml", "logs/without.toml"] {
        dir.edit(config, "user = \"user\"\ngap = \"30m\"", "key = [\"user\", \"visit\"]");
    }
    dir.command("onefold-ingest build logs/dataset.toml --out dataset --layout rows").works();
    dir.command("onefold-ingest build logs/without.toml --out without --layout rows").works();
    dir.write("users.txt", "2\n");
    dir.write("users.csv", "visit,user\nc,2\n");
    let forget = "onefold-ingest forget dataset --users";
    dir.command(&format!("{forget} users.txt")).fails(&[
        "`user`, `visit`",
        "not of one column",
        "`--column`",
    ]);
    dir.command(&format!("{forget} users.csv --column user")).fails(&["keeps no column `user`", "keep = "]);
    dir.command(&format!("{forget} missing.csv")).fails(&["missing.csv"]);
    assert_eq!(dir.command(&format!("{forget} users.csv")).json()["samples_removed"], 4);
    assert_eq!(digest(&dir, "dataset"), digest(&dir, "without"));
}

#[test]
fn many_row_groups_are_merged() {
    let dir = Dir::new();
    let (dataset, requests) = write_many_row_groups(&dir);
    let before = (digest(&dir, "many"), read_samples(&dataset));
    dir.write("users.txt", "1\n");
    let refused = ["does not say what its sessions were made from"];
    dir.command("onefold-ingest forget many --users users.txt").fails(&refused);
    dir.command("onefold-ingest compact many --partition part=c").fails(&["no partition matches"]);
    let first = dir.command("onefold-ingest compact many --partition part=a").json();
    assert_eq!(
        (&first["changed"], &first["files"], &first["row_groups"]),
        (&json!(true), &json!(1), &json!(1))
    );
    assert!(first["files_before"].as_u64() > Some(3) && first["bytes_on_disk"].as_u64() > Some(0), "{first}");
    assert!(first["bytes_on_disk"].as_u64() < first["bytes_on_disk_before"].as_u64(), "{first}");
    assert_eq!(first["samples_rewritten"].as_u64(), Some(requests.len() as u64 / 2));
    let second = dir.command("onefold-ingest compact many").json();
    assert_eq!((&second["partitions"], &second["ranges_rewritten"]), (&json!(2), &json!(1)));
    let text = dir.command("onefold-ingest compact many").works();
    assert!(text.starts_with("nothing to gain in 2 partitions (2 files, 2 row groups"), "{text}");
    assert_eq!(snapshot_numbers(&dataset), [1, 2, 3]);
    assert!(before == (digest(&dir, "many"), read_samples(&dataset)));
    let history = dir.command("onefold-ingest history many").json();
    assert_eq!(history["snapshots"][2]["operation"], "compact");
}

#[test]
fn a_model_goes_on_after_users_were_forgotten() {
    let dir = with_logs();
    let (plain, numbered) =
        ("group = \"user\" }\ncity", "group = \"user\", vocabulary = \"frequency\" }\ncity");
    dir.edit("logs/dataset.toml", plain, numbered);
    dir.command("onefold-ingest build logs/dataset.toml --out dataset").works();
    dir.command("onefold-train run logs/train.toml --data dataset --out run").works();
    let eval = || {
        let eval = "onefold-train eval run --partitions split=holdout --data dataset";
        dir.command(eval).json()["loss"].clone()
    };
    let before = eval();
    dir.write("users.txt", "2\n");
    let removed = dir.command("onefold-ingest forget dataset --users users.txt --purge").json();
    assert_eq!(removed["vocabulary_entries_removed"], 1, "{removed}");
    assert_eq!(look(&dir, "--absent users.txt").0, Some(0));
    assert_eq!(eval(), before);
    // An append of the same logs adds the user again, under a new id.
    dir.command("onefold-ingest append logs/dataset.toml --out dataset").works();
    assert_eq!(eval(), before);
    dir.command("onefold-ingest verify dataset").works();
}
