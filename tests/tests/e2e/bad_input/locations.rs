//! Datasets at places that cannot be reached, as a person meets them at first: wrong names, no credentials, no server.

use std::net::TcpListener;

use onefold_tests::{Dir, S3Server, TestCommand};

use crate::logs::write_logs;
use crate::remote::SOON;

/// What every command does with a dataset.
const COMMANDS: [&str; 10] = [
    "onefold-ingest build logs/dataset.toml --out DATASET",
    "onefold-ingest append logs/dataset.toml --out DATASET",
    "onefold-ingest verify DATASET",
    "onefold-ingest history DATASET",
    "onefold-ingest vacuum DATASET",
    "onefold-ingest report DATASET",
    "onefold-read head DATASET",
    "onefold-read bench DATASET",
    "onefold-train run logs/train.toml --data DATASET --out run",
    "onefold-shard tables logs/train.toml --data DATASET --out tables.json",
];

/// A command whose environment has nothing about stores but `variables`, and no proxy. Asking this machine for
/// credentials of its own fails at once, as it does on one that has none.
fn command(dir: &Dir, line: &str, location: &str, variables: &[(&str, &str)]) -> TestCommand {
    let nowhere = "127.0.0.1:1";
    let mut command = dir.command(&line.replace("DATASET", location));
    for prefix in ["AWS_", "GOOGLE_", "AZURE_"] {
        command = command.without_variables(prefix);
    }
    let endpoint = format!("http://{nowhere}");
    for (name, value) in [
        ("NO_PROXY", "*"),
        ("no_proxy", "*"),
        ("AWS_METADATA_ENDPOINT", &endpoint),
        ("GCE_METADATA_HOST", nowhere),
        ("GCE_METADATA_IP", nowhere),
        ("AZURE_MSI_ENDPOINT", &endpoint),
    ] {
        command = command.with_variable(name, value);
    }
    variables.iter().fold(command, |command, (name, value)| command.with_variable(name, value))
}

/// Runs a command, which must fail with all of `parts` in its error, and soon.
#[track_caller]
fn fails_soon(command: TestCommand, parts: &[&str]) {
    command.with_time_limit(SOON).fails(parts);
}

fn with_logs() -> Dir {
    let dir = Dir::new();
    write_logs(&dir);
    dir
}

const KEYS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];

#[test]
fn every_command_says_that_a_store_cannot_be_reached() {
    let dir = with_logs();
    let closed = [("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_ALLOW_HTTP", "true")];
    for line in COMMANDS {
        let variables = [&KEYS[..], &closed].concat();
        let parts = ["s3://bucket/ds", "http://127.0.0.1:1 cannot be reached", "AWS_ENDPOINT_URL"];
        fails_soon(command(&dir, line, "s3://bucket/ds", &variables), &parts);
    }
    let read = "onefold-read head DATASET";
    let nowhere = [("AWS_ENDPOINT_URL", "http://nowhere.invalid"), ("AWS_ALLOW_HTTP", "true")];
    let variables = [&KEYS[..], &nowhere].concat();
    fails_soon(
        command(&dir, read, "s3://bucket/ds", &variables),
        &["http://nowhere.invalid cannot be reached", "AWS_ENDPOINT_URL"],
    );
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let mute = [("AWS_ENDPOINT_URL", endpoint.as_str()), ("AWS_ALLOW_HTTP", "true")];
    let variables = [&KEYS[..], &mute].concat();
    fails_soon(
        command(&dir, read, "s3://bucket/ds", &variables),
        &[&format!("{endpoint} cannot be reached"), "AWS_ENDPOINT_URL"],
    );
    // Without leave, no credentials go over plain HTTP.
    fails_soon(command(&dir, read, "s3://bucket/ds", &variables[..3]), &[&endpoint, "AWS_ALLOW_HTTP"]);
}

#[test]
fn missing_credentials_are_named() {
    let dir = with_logs();
    /// A location, variables with their values, and parts of the error.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str]);
    let cases: &[Case<'_>] = &[
        ("s3://bucket/ds", &[], &["there are no credentials", "AWS_ACCESS_KEY_ID"]),
        ("gs://bucket/ds", &[], &["there are no credentials", "GOOGLE_APPLICATION_CREDENTIALS"]),
        (
            "az://container/ds",
            &[("AZURE_STORAGE_ACCOUNT_NAME", "account")],
            &["there are no credentials", "AZURE_STORAGE_ACCOUNT_KEY"],
        ),
        ("az://container/ds", &[], &["Account must be specified", "AZURE_STORAGE_ACCOUNT_NAME"]),
        (
            "gs://bucket/ds",
            &[("GOOGLE_APPLICATION_CREDENTIALS", "nowhere.json")],
            &["nowhere.json", "GOOGLE_APPLICATION_CREDENTIALS"],
        ),
    ];
    for (location, variables, parts) in cases {
        for line in ["onefold-read head DATASET", "onefold-ingest append logs/dataset.toml --out DATASET"] {
            let parts = [&[*location][..], parts].concat();
            fails_soon(command(&dir, line, location, variables), &parts);
        }
    }
}

#[test]
fn wrong_names_are_told_apart() {
    let dir = with_logs();
    let server = S3Server::start();
    for line in COMMANDS {
        let command = |location: &str| dir.command(&line.replace("DATASET", location)).with_s3(&server);
        fails_soon(command("s3://dtaa/ds"), &["s3://dtaa/ds", "no such bucket", "bucket's name"]);
        fails_soon(command("ftp://host/ds"), &["`ftp://host/ds`", "`s3://bucket/folder`"]);
        fails_soon(command("s3:///ds"), &["s3:///ds", "`s3://bucket/folder`"]);
        if !line.contains("--out DATASET") {
            let folder = format!("file://{}", dir.path("nothing").display());
            for location in ["s3://data/ds", "nothing", folder.as_str()] {
                fails_soon(
                    command(location),
                    &[&format!("`{location}` is not a dataset"), "onefold-ingest build"],
                );
            }
        }
    }
}
